"""Lets a test that measures times be the only one that runs, however many are run at a time.

Every test holds a lock that it shares with others; one that must be alone holds it by itself. Before either, one goes
through a gate, where whoever waits to be alone keeps those who come after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PLACE = Path(tempfile.gettempdir(), f"paceline-tests-{os.getuid()}")


class Room:
    """That all tests of a user run in."""

    def __init__(self) -> None:
        self._held: int | None = None

    def enter(self, alone: bool = False) -> None:
        """Wait until this test may run."""
        with _opened("gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            self._held = os.open(f"{_PLACE}-room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            fcntl.flock(self._held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)

    def leave(self) -> None:
        if self._held is not None:
            fcntl.flock(self._held, fcntl.LOCK_UN)  # also of those who were forked meanwhile and have it open
            os.close(self._held)
            self._held = None


ROOM = Room()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While this lasts, no other test runs."""
    ROOM.leave()
    ROOM.enter(alone=True)
    try:
        yield
    finally:
        ROOM.leave()
        ROOM.enter()


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    descriptor = os.open(f"{_PLACE}-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
