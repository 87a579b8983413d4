"""How far an operation on a shard is, and the bytes that its part in progress overwrites.

A process that dies within an operation leaves one part half written. The next owner of the shard restores the bytes of
that part, and goes on with it: so every part is done exactly once. All of it is in shared memory, which outlives the
process.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.transport import Memory

_HEAD = 64
_PARTS = 24
"""Bits of the word for the parts of an operation: two numbers for each."""


class ProgressLog:
    """The operation that a shard's owner is in, and an undo copy of the part that it writes.

    One word holds the number of the operation and its progress: 2n before part n, 2n + 1 while it is written and the
    copy is complete. It is stored at once, so a process that dies leaves the one or the other.
    """

    def __init__(self, memory: Memory, start: int, size: int) -> None:
        self._word = memory.bytes(start, 8).cast("q")
        self._copy = memory.bytes(start + _HEAD, size - _HEAD)
        self._operation = 0
        self.first = 0
        """The first part of the operation that is not complete."""
        self.torn = False
        """True if a process died while it wrote that part."""

    @staticmethod
    def memory_size(largest: int) -> int:
        """Bytes for parts that overwrite so many at most."""
        return _HEAD + -(-largest // _HEAD) * _HEAD

    def open(self, operation: int) -> None:
        """Begins an operation, or goes on with it if a process has died within it."""
        self._operation = operation << _PARTS
        begun = self._word[0] >> _PARTS == operation
        progress = self._word[0] & ((1 << _PARTS) - 1) if begun else 0
        self.first, self.torn = progress >> 1, bool(progress & 1)

    def restore(self, places: Sequence[memoryview]) -> None:
        """Undoes the part that was half written, which overwrites these places."""
        at = 0
        for place in places:
            place[:] = self._copy[at : at + len(place)]
            at += len(place)
        self.torn = False

    def begin(self, part: int, places: Sequence[memoryview]) -> None:
        """Copies these places, which this part overwrites."""
        operation, copy, at = self._operation, self._copy, 0
        self._word[0] = operation | part << 1
        for place in places:
            end = at + len(place)
            copy[at:end] = place
            at = end
        self._word[0] = operation | part << 1 | 1

    def end(self, part: int) -> None:
        """This part is complete."""
        self._word[0] = self._operation | (part + 1) << 1
