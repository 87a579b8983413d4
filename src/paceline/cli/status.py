"""The line that says what a command is doing."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.status import Status

_INTERVAL = 10.0
"""Seconds between two lines where there is no terminal to rewrite one on."""


class StatusLine:
    """Shows what a command is doing on stderr: one line that changes on a terminal, else a new line now and then."""

    def __init__(self, words: str, *, at_once: bool = True) -> None:
        """words: what the command does first.

        at_once: without a terminal, print them when it begins; if not, nothing is printed unless it takes some seconds.
        """
        self._words, self._at_once, self._next = words, at_once, 0.0
        console = Console(stderr=True)
        self._status: Status | None = console.status(words) if console.is_terminal else None

    def __enter__(self) -> StatusLine:
        if self._status is not None:
            self._status.start()
        elif self._at_once:
            self._print(self._words)
        else:
            self._next = time.monotonic() + _INTERVAL
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, words: str) -> None:
        """Replaces the words; where there is no terminal, prints them if the last line is some seconds old."""
        if self._status is not None:
            self._status.update(words)
        elif time.monotonic() >= self._next:
            self._print(words)

    def detail(self, words: str) -> None:
        """Shows how far the command is with what it does first."""
        self.show(f"{self._words}: {words}")

    def _print(self, words: str) -> None:
        print(f"paceline: {words}", file=sys.stderr, flush=True)
        self._next = time.monotonic() + _INTERVAL
