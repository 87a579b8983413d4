"""A copy of one version and of the optimizer's state that belongs to it, for a snapshot.

The copy is made by the owners of shards, each of its own, inside the next update: a chunk is copied just before it is
overwritten, while it is in the cache. So nobody waits, and all shards are of the same version. The copy stays as it is
until the next snapshot is taken.
"""

from __future__ import annotations

import torch

from paceline.parameters.layout import Layout
from paceline.transport import Memory

_HEAD = 64
"""Bytes before the values, for the number of the complete copy."""


class KeptVersion:
    """Shared memory with the values of one version, and where the optimizer's state follows them."""

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.memory = memory
        self.values: list[torch.Tensor] = []
        """One flat tensor per dtype."""
        offset = _HEAD
        for flat in layout.flats:
            self.values.append(memory.tensor(offset, flat.count, flat.dtype))
            offset += -(-flat.size // _HEAD) * _HEAD
        self.state = offset
        """Where the optimizer's state begins, in bytes."""
        self._head = memory.bytes(0, _HEAD).cast("q")

    @staticmethod
    def memory_size(layout: Layout, state: int) -> int:
        """Bytes for values and this much state; the system provides them when they are first written."""
        return _HEAD + sum(-(-flat.size // _HEAD) * _HEAD for flat in layout.flats) + state

    def spans(self, layout: Layout, server: int, state: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The bytes [start, stop) that a server copies; state: those of its state in the memory of all states."""
        spans = [(self.state + start, self.state + stop) for start, stop in state]
        offset = _HEAD
        for flat in layout.flats:
            start, stop = (offset + place * flat.dtype.itemsize for place in flat.shards[server])
            spans.append((start, stop))
            offset += -(-flat.size // _HEAD) * _HEAD
        return spans

    @property
    def complete(self) -> int:
        """The number of the snapshot whose copy is complete; 0 if none is."""
        return self._head[0]

    @complete.setter
    def complete(self, number: int) -> None:
        self._head[0] = number

    def by_parameter(self, layout: Layout) -> dict[int, torch.Tensor]:
        """The values of each parameter, by its `id`."""
        return {id(slot.parameter): view for slot, view in zip(layout.slots, layout.buffers(self.values), strict=True)}

    def copy_state(self, start: int, size: int, source: Memory) -> None:
        """Copies bytes of the optimizer's state to the same place behind the values."""
        self.memory.bytes(self.state + start, size)[:] = source.bytes(start, size)
