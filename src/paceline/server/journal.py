"""The coordinator's journal in shared memory: all that it was told since it last noted its state.

The coordinator does the same again if it is told the same again, so that is enough to go on after it was killed. An
entry is written before it is handled. When the journal has grown, the coordinator notes its whole state in the other
half, and begins anew there.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

_ENTRY = struct.Struct("<BxhId")  # kind, rank, bytes, time
_LEAST = 1 << 13
"""Bytes of a journal after which the state is noted, at the least."""
_HALF, _STATE, _USED = range(3)
"""Places of the words: which half, and for each half the bytes of its state and of its entries."""


class EntryKind(IntEnum):
    """What an entry is about."""

    MESSAGE = 1
    CLOSED = 2
    SILENCE = 3
    """A message that was waited for has not come in time."""
    VALUE = 4
    JOIN = 5
    DISMISS = 6
    EVICT = 7
    RESOLVE = 8
    BACK = 9


class Entry(NamedTuple):
    """One thing that the coordinator was told."""

    kind: EntryKind
    rank: int
    data: bytes


class Journal:
    """Writes entries, or reads those of a process that was killed, until there are none left."""

    def __init__(
        self,
        head: memoryview | None = None,
        halves: Sequence[memoryview] = (),
        full: Callable[[], None] = lambda: None,
    ) -> None:
        """head: words for the journal's own use. Without memory nothing is written.

        full: called if there is no more room; then nothing is written any more.
        """
        self._full = full
        self.on = head is not None
        self._head = memoryview(bytearray(64)).cast("q") if head is None else head
        self._halves = halves
        self._half = self._head[_HALF]
        self._at = 0
        self._entry: Entry | None = None
        self.replaying = False
        self._written = self._taken = 0.0
        """While it is read, when the entry was written, and when it was read."""
        self._limit = _LEAST

    # -- the state ---------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """True if the state should be noted."""
        return self.on and self._at > self._limit

    def note(self, state: bytes) -> bool:
        """Notes the state, and begins anew; False if there is no room for it."""
        half = 1 - self._half
        room = self._halves[half]
        if 2 * len(state) + _LEAST > len(room):
            self.on = False
            return False
        room[: len(state)] = state
        self._head[_STATE + 2 * half], self._head[_USED + 2 * half] = len(state), 0
        self._head[_HALF] = self._half = half
        self._at, self._limit = 0, max(_LEAST, len(state))
        return True

    def read(self) -> bytes:
        """The state that was noted last; the entries since then are read from now on."""
        half = self._half
        self._at = 0
        self.replaying = True
        size = self._head[_STATE + 2 * half]
        self._limit = max(_LEAST, size)
        return bytes(self._halves[half][:size])

    # -- entries -----------------------------------------------------------------------------------------------------

    def add(self, kind: EntryKind, rank: int = -1, data: bytes = b"") -> None:
        """Writes an entry."""
        if not self.on:
            return
        half = self._half
        room, at = self._halves[half], self._head[_STATE + 2 * half] + self._at
        end = at + _ENTRY.size + len(data)
        if end > len(room):
            self.on = False
            self._full()
            return
        _ENTRY.pack_into(room, at, kind, rank, len(data), time.perf_counter())
        room[at + _ENTRY.size : end] = data
        self._at += _ENTRY.size + len(data)
        self._head[_USED + 2 * half] = self._at

    def peek(self) -> Entry | None:
        """The next entry to read; None once there are none left, and from then on."""
        if not self.replaying:
            return None
        if self._entry is None:
            half = self._half
            if self._at >= self._head[_USED + 2 * half]:
                self.replaying = False
                return None
            room, at = self._halves[half], self._head[_STATE + 2 * half] + self._at
            kind, rank, size, self._written = _ENTRY.unpack_from(room, at)
            at += _ENTRY.size
            self._entry = Entry(EntryKind(kind), rank, bytes(room[at : at + size]))
            self._taken = time.perf_counter()
            self._at += _ENTRY.size + size
        return self._entry

    def take(self) -> Entry:
        """Reads the entry that `peek` has returned."""
        entry, self._entry = self._entry, None
        assert entry is not None
        return entry

    def moment(self, now: float) -> float:
        """When a thing that is done again now was done before: about when its entry was written, in the same order."""
        return self._written + 1e-3 * (now - self._taken)

    def end(self) -> None:
        """Neither writes nor reads any more, as the run has failed."""
        self.on = self.replaying = False

    def value(self, find: Callable[[], Any]) -> Any:
        """A value that would not be found again: finds and writes it, or reads it."""
        entry = self.peek()
        if entry is not None:
            assert entry.kind is EntryKind.VALUE, entry
            return msgspec.msgpack.decode(self.take().data)
        found = find()
        self.add(EntryKind.VALUE, data=msgspec.msgpack.encode(found))
        return found
