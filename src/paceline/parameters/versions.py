"""The buffers that hold versions of the parameters, shared by all workers of a machine.

A buffer is free when no worker computes on the version that it holds. Under all-reduce that is so for the only version
there is as soon as all workers have met for an update, so the next version takes its place: one buffer is enough, a
pull costs nothing, and `parameter.data` stays where it is. (A second buffer to swap with was measured: it costs a copy
of all parameters per update and as much memory again.)
"""

from __future__ import annotations

import torch

from paceline.parameters.layout import Layout
from paceline.transport import Memory


class Versions:
    """Shared memory in which the newest version of the parameters lies, with the model's parameters as views of it."""

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.layout = layout
        self.flats: list[torch.Tensor] = []
        """One flat tensor per dtype."""
        offset = 0
        for flat in layout.flats:
            self.flats.append(memory.tensor(offset, flat.count, flat.dtype))
            offset += flat.size
        self._views = layout.buffers(self.flats)

    @classmethod
    def memory_size(cls, layout: Layout) -> int:
        return layout.size

    def fill(self) -> None:
        """Write this process's parameter values as the newest version."""
        for slot, view in zip(self.layout.slots, self._views, strict=True):
            view.copy_(slot.parameter.data)

    def pull(self) -> None:
        """Point the model's parameters at the newest version."""
        for slot, view in zip(self.layout.slots, self._views, strict=True):
            slot.parameter.data = view
