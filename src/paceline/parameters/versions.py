"""The buffers that hold versions of the parameters, shared by all workers of a machine.

Under all-reduce nobody computes on an old version while the next is written, so two buffers are enough: the one that
everybody reads, and the free one that gets the next version. The old one stays whole until the next is complete.
"""

from __future__ import annotations

import torch

from paceline.parameters.layout import Layout
from paceline.transport import Memory


class Versions:
    """Two buffers in turn; a pull is a pointer swap."""

    COUNT = 2

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.layout = layout
        self.flats: list[list[torch.Tensor]] = []
        """Per buffer, one flat tensor per dtype."""
        offset = 0
        for _ in range(self.COUNT):
            tensors = []
            for flat in layout.flats:
                tensors.append(memory.tensor(offset, flat.count, flat.dtype))
                offset += flat.size
            self.flats.append(tensors)
        self._views = [layout.buffers(tensors) for tensors in self.flats]
        self._parameters = [slot.parameter for slot in layout.slots]
        self.current = 0
        """Which buffer holds the newest version."""

    @classmethod
    def memory_size(cls, layout: Layout) -> int:
        return cls.COUNT * layout.size

    @property
    def next(self) -> int:
        return 1 - self.current

    def fill(self) -> None:
        """Write this process's parameter values as the newest version."""
        for parameter, view in zip(self._parameters, self._views[self.current], strict=True):
            view.copy_(parameter.data)

    def swap(self) -> None:
        """The next version is complete: it is now the newest, and the model's parameters are views of it."""
        self.current = 1 - self.current
        self.pull()

    def pull(self) -> None:
        """Point the model's parameters at the newest version."""
        for parameter, view in zip(self._parameters, self._views[self.current], strict=True):
            parameter.data = view
