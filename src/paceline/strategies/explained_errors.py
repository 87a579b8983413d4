"""Adds to an error that ends the script what the team knows about its cause."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_Concerns = Callable[[BaseException], bool]
_notes: dict[str, _Concerns] = {}


def explain_errors(concerns: _Concerns, note: str) -> None:
    """From now on, adds a note to an error of this kind that ends the script."""
    _notes[note] = concerns
    plain = sys.excepthook
    if getattr(plain, "explains", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        for text, concerned in _notes.items():
            if concerned(error):
                error.add_note(f"paceline: {text}")
        plain(kind, error, trace)

    hook.explains = True  # type: ignore[attr-defined]
    sys.excepthook = hook
