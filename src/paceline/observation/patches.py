"""Replaces functions of torch by others that call them, until it is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Functions that are replaced."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Lets calls of `owner.name` call the replacement, with the original as its first argument."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            return replacement(original, *arguments, **options)

        setattr(owner, name, call)

        def restore() -> None:
            if getattr(owner, name) is call:  # unless somebody else has replaced it since
                setattr(owner, name, original)

        self.add(restore)

    def add(self, undo: Callable[[], None]) -> None:
        """Has this called by `undo`."""
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
