"""The `paceline` command: assembles the verbs, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import sys
from importlib import metadata
from typing import Annotated

import typer

from paceline.cli.panels import PanelCommand
from paceline.errors import PacelineError, UsageError, too_few_files
from paceline.requirements import unmet_by

VERBS = {
    "run": ("run", "Train"),
    "scale": ("scale", "Train"),
    "report": ("report", "See"),
    "live": ("live", "See"),
    "log": ("log", "See"),
    "plan": ("plan", "Choose"),
    "simulate": ("simulate_command", "Choose"),
    "bench": ("app", "Choose"),
    "doctor": ("doctor", "Machines"),
    "key": ("key", "Machines"),
}
"""Verbs, each with the name of its function in the module of the same name, and its panel in the help."""


def assemble(asked: str | None) -> typer.Typer:
    """The command with the given verb, or with all: a launcher of workers need not load the code of reports."""
    app = typer.Typer(
        name="paceline",
        help="Train PyTorch models over many devices at the pace of the pack, not of the slowest rider.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)  # also so that the verb's name is needed even if it is the only one
    light = ["key"] if asked == "--version" else VERBS  # which needs none of them
    for verb in [asked] if asked in VERBS else light:
        name, panel = VERBS[verb]
        found = getattr(importlib.import_module(f"paceline.cli.{verb}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb, rich_help_panel=panel)
        else:
            app.command(verb, cls=PanelCommand, rich_help_panel=panel)(found)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"paceline {metadata.version('paceline')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        asked = sys.argv[1] if len(sys.argv) > 1 else None
        if asked in VERBS:
            _check_torch()
        code = assemble(asked)(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except typer.TyperException as error:
        code = _complain(_sentence(error), error.exit_code)
    except UsageError as error:
        code = _complain(str(error), 2)
    except PacelineError as error:
        code = _complain(str(error), 1)
    except BrokenPipeError:  # the reader of the output has gone
        sys.stdout = None
        code = 1
    except OSError as error:  # a full disk, a folder that cannot be read or written
        code = _complain(_system_error(error), 1)
    sys.exit(code or 0)


def _check_torch() -> None:
    """Refuses a torch that is missing or too old, without importing it."""
    try:
        problem = unmet_by(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        problem = "Paceline needs torch, which is not installed: see https://pytorch.org/get-started"
    if problem is not None:
        raise UsageError(problem)


def _sentence(error: typer.TyperException) -> str:
    """A complaint about the command line, with a way out."""
    message = error.format_message().rstrip(".").replace(". Did you", "; did you")
    context = getattr(error, "ctx", None)
    if message and context is not None and not message.endswith("?"):
        message += f"; see {context.command_path} --help"
    return message[:1].lower() + message[1:]


def _system_error(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return too_few_files()
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _complain(sentence: str, code: int) -> int:
    if sentence:  # without a verb the help is printed instead
        print(f"paceline: {sentence}", file=sys.stderr)
    return code
