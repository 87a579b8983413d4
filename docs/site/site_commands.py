"""The reference of the command line, made from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from paceline.cli.main import VERBS, assemble

_HEAD = """# Commands

What `paceline COMMAND --help` says. Every command ends with code 0 if all went well, 1 if it failed, 2 if its input was
refused, 130 after Ctrl-C; most print the same facts as JSON with `--json`.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that has no commands of its own, with its words."""
    for verb in VERBS:
        group: Any = get_command(assemble(verb))
        command = group.commands[verb]
        for name, one in getattr(command, "commands", {"": command}).items():
            yield f"{verb} {name}".strip(), one


def parameters(command: Any) -> list[Any]:
    """All arguments and options of a command that its help shows."""
    return [one for one in command.get_params(typer.Context(command)) if not getattr(one, "hidden", False)]


def command_reference() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *(_section(words, command) for words, command in commands())])


def _section(words: str, command: Any) -> str:
    context = typer.Context(command, info_name=f"paceline {words}")
    usage = command.get_usage(context).removeprefix("Usage: ").replace("\n", " ")
    lines = [f"## paceline {words}", "", f"```text\n{re.sub(' +', ' ', usage)}\n```", ""]
    lines += [re.sub(r"(?<!\n)\n(?!\n)", " ", command.help.strip()), ""]
    panels: dict[str, list[Any]] = {}
    for one in parameters(command):
        usual = "Arguments" if one.param_type_name == "argument" else "Options"
        panels.setdefault(one.rich_help_panel or usual, []).append(one)
    for panel, members in panels.items():
        lines += [f"### {panel} {{: #{words.replace(' ', '-')}-{_slug(panel)} }}", "", "| | |", "|---|---|"]
        lines += [f"| {_name(one, context)} | {_meaning(one, context)} |" for one in members]
        lines.append("")
    return "\n".join(lines)


def _slug(panel: str) -> str:
    return re.sub(r"\W+", "-", panel.lower()).strip("-")


def _name(one: Any, context: Any) -> str:
    if one.param_type_name == "argument":
        return _code(one.metavar or one.name.upper())
    kind = one.display_type_rich(context) or ""
    names = [*one.opts, *one.secondary_opts]
    return ", ".join(_code(f"{name} {kind}".strip()) for name in names)


def _meaning(one: Any, context: Any) -> str:
    words = one.help or ""
    default = one._extract_default_help_str(ctx=context)
    if default not in (None, "", []) and one.show_default and not getattr(one, "is_flag", False):
        words += f" [default: {default}]"
    return _escaped(words)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")


def _escaped(text: str) -> str:
    """Text for a cell: none of its characters is markup."""
    return re.sub(r"([|*_\[\]<>])", r"\\\1", text)
