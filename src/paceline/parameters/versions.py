"""The buffers that hold versions of the parameters, shared by all workers of a machine.

A buffer is free when no worker computes on the version that it holds. Under all-reduce the only version is free as soon
as all workers have reached the barrier of an update, so the next version takes its place: one buffer is enough, a pull
costs nothing, and `parameter.data` stays where it is. (A second buffer to swap with was measured: it costs a copy
of all parameters per update and as much memory again.) A parameter server whose workers compute on versions of
different age needs one buffer for each of them, one for the newest version and one for the next.
"""

from __future__ import annotations

import torch

from paceline.parameters.layout import Layout
from paceline.transport import Memory


class Versions:
    """Buffers of versions in shared memory, with the model's parameters as views of one of them."""

    def __init__(self, layout: Layout, memory: Memory, buffers: int = 1) -> None:
        self.layout = layout
        self.buffers: list[list[torch.Tensor]] = []
        """Per buffer, one flat tensor per dtype."""
        offset = 0
        for _ in range(buffers):
            flats = []
            for flat in layout.flats:
                flats.append(memory.tensor(offset, flat.count, flat.dtype))
                offset += flat.size
            self.buffers.append(flats)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._pairs: dict[int, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
        """By buffer, the model's parameters and where they lie in it."""

    @classmethod
    def memory_size(cls, layout: Layout, buffers: int = 1) -> int:
        return buffers * layout.size

    @property
    def flats(self) -> list[torch.Tensor]:
        """Of the first buffer, which is the only one under all-reduce."""
        return self.buffers[0]

    def views(self, buffer: int) -> list[torch.Tensor]:
        """The parameters as they are in a buffer."""
        if buffer not in self._views:
            self._views[buffer] = self.layout.buffers(self.buffers[buffer])
        return self._views[buffer]

    def fill(self, buffer: int = 0) -> None:
        """Write this process's parameter values into a buffer."""
        for slot, view in zip(self.layout.slots, self.views(buffer), strict=True):
            view.copy_(slot.parameter.data)

    def pull(self, buffer: int = 0) -> None:
        """Point the model's parameters at a buffer; on another device than the host, copy it there."""
        pairs = self._pairs.get(buffer)
        if pairs is None:
            slots = self.layout.slots
            pairs = self._pairs[buffer] = [(s.parameter, v) for s, v in zip(slots, self.views(buffer), strict=True)]
        for parameter, view in pairs:
            if parameter.is_cpu:
                parameter.data = view
            else:
                parameter.data.copy_(view, non_blocking=True)
