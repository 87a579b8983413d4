"""Docstrings of this repository for mkdocstrings: lines `name: what it is` at their end describe parameters."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"^(\w+(?:, \w+)*): (.+)$")


class Parameters(griffe.Extension):
    """Makes the lines about parameters a section that mkdocstrings knows."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = with_section(func.docstring.value, [one.name for one in func.parameters])


def with_section(text: str, names: list[str]) -> str:
    """The docstring with its lines about these parameters below `Args:`."""
    kept, described = [], []
    for block in text.split("\n\n"):
        if not _described(block.partition("\n")[0], names):
            kept.append(block)
            continue
        for line in block.splitlines():
            if own := _described(line, names):
                described += [f"    {name}: {line.partition(': ')[2]}" for name in own]
            else:
                described.append(f"        {line.strip()}")
    if described:
        kept.append("\n".join(["Args:", *described]))
    return "\n\n".join(kept)


def _described(line: str, names: list[str]) -> list[str]:
    """The parameters that a line describes: `name: …` or `name, other: …`."""
    match = _LINE.match(line)
    found = match[1].split(", ") if match is not None else []
    return found if all(name in names for name in found) else []
