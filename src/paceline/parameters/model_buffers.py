"""The buffers and frozen parameters of a model, such as batch norm's statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.transport import Memory

_ALIGNMENT = 64


class ModelBuffers:
    """Copies these values to and from shared memory, for a worker that joins later."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._places: list[int] = []
        self.size = 0
        """In bytes."""
        for tensor in self._tensors:
            self._places.append(self.size)
            self.size = -(-(self.size + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT

    def _at(self, memory: Memory) -> list[torch.Tensor]:
        return [
            memory.tensor(place, tensor.numel(), tensor.dtype).view(tensor.shape)
            for place, tensor in zip(self._places, self._tensors, strict=True)
        ]

    def write(self, memory: Memory) -> None:
        for place, tensor in zip(self._at(memory), self._tensors, strict=True):
            place.copy_(tensor.detach())

    def read(self, memory: Memory) -> None:
        with torch.no_grad():
            for place, tensor in zip(self._at(memory), self._tensors, strict=True):
                tensor.copy_(place)
