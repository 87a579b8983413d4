"""Checks of single values; each refuses a wrong one in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from paceline.errors import UsageError

DECIMAL = r"(\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
NUMBER = re.compile(rf"^{DECIMAL}$")


def listed(names: Iterable[str]) -> str:
    """The names as a sentence lists them: 'a', 'b' or 'c'."""
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


T = TypeVar("T")


def one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """`value`, if it is one of those allowed."""
    choices = list(allowed)
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


def positive(name: str, value: int) -> int:
    """`value`, if it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value
