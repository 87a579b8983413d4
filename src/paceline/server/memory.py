"""The shared memory of a run, which its workers, servers and relay map on each machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.transport import Memory


class RunMemory(NamedTuple):
    """The memories of one run on one machine."""

    gradients: Memory
    versions: Memory
    table: Memory
    """See `WorkerTable`."""
    flags: Memory
    """See `SharedFlags`."""
    buffers: Memory
    """The model's buffers and frozen parameters."""
    state: Memory
    """The optimizer's."""
    kept: Memory
    """See `KeptVersion`."""
    record: Memory
    """See `ServerRecord`."""

    @classmethod
    def inherited(cls, descriptors: Iterable[int]) -> RunMemory:
        """The memory behind descriptors that came with a message."""
        return cls(*map(Memory.inherited, descriptors))

    @property
    def descriptors(self) -> list[int]:
        return [memory.descriptor for memory in self]

    def close_descriptors(self) -> None:
        for memory in self:
            memory.close_descriptor()


MEMORIES = len(RunMemory._fields)
"""Descriptors that travel with a run's memory."""
