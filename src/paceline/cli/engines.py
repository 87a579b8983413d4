"""Options that engines declare, and the checks of a command's options against the engine that it uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from paceline.cli import panels
from paceline.cluster.engines import ENGINES, selectors
from paceline.cluster.engines.base import Engine
from paceline.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., None])

ON_METAVAR = "|".join(selectors())
ON_HELP = f"Where to start the workers: {', or '.join(engine.PLACE for engine in ENGINES.values() if engine.PLACE)}."
RESTARTS_DEFAULT = "; ".join(
    ["0", *(f"on {engine.NAME} {engine.DEFAULT_RESTARTS}" for engine in ENGINES.values() if engine.DEFAULT_RESTARTS)]
)


def with_engine_options(command: Command) -> Command:
    """Gives a command that takes `**options` the options of all engines, behind its `--on`."""
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
        if parameter.name == "on":
            parameters += _parameters()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameters() -> list[inspect.Parameter]:
    found: dict[str, inspect.Parameter] = {}
    for engine in ENGINES.values():
        for option in engine.OPTIONS:
            kind: Any = list[str] if option.repeatable else str | None
            found.setdefault(
                option.name,
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=[] if option.repeatable else option.default,
                    annotation=Annotated[
                        kind,
                        typer.Option(metavar=option.metavar, help=option.help, rich_help_panel=panels.ENGINES),
                    ],
                ),
            )
    return list(found.values())


def check_given(engine: type[Engine], context: typer.Context) -> None:
    """Raises UsageError for an option that was given and that this engine does not take."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    own = {option.name for option in engine.OPTIONS}
    others = {option.name: other for other in ENGINES.values() for option in other.OPTIONS if option.name not in own}
    if engine.DECIDES and (refused := [name for name in given if name in engine.DECIDES or name in others]):
        raise UsageError(f"{', '.join(map(_spelled, refused))}: {engine.DECIDES_REASON}")
    for name in given:
        if name in others:
            raise UsageError(f"{_spelled(name)} is for --on {others[name].NAME}; this run is on {engine.NAME}")


def _spelled(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")
