"""Encodings of pushed gradients: in full, in fewer bits, or only the largest elements.

Whatever a form leaves out is kept by the worker and added to its next gradient (error feedback), so that nothing is
lost, only late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from paceline.config import Compression
from paceline.parameters.layout import Layout
from paceline.transport import Memory

_BLOCK = 1024
"""Elements that share one scale as int8."""


class Codec(ABC):
    """One form, for the gradients of all workers."""

    def __init__(self, layout: Layout, memory: Memory, workers: int) -> None:
        self.layout = layout
        self.bytes = self.memory_size(layout, 1)
        """That one push takes."""

    @classmethod
    @abstractmethod
    def memory_size(cls, layout: Layout, workers: int) -> int: ...

    @abstractmethod
    def encode(self, rank: int, flat: int, value: torch.Tensor) -> torch.Tensor:
        """Write a flat gradient as `rank`'s; returns the gradient as it will be decoded."""

    @abstractmethod
    def decode(self, rank: int, flat: int, start: int, stop: int) -> torch.Tensor:
        """Elements of `rank`'s gradient, in full."""


def _places(sizes: list[int], workers: int) -> tuple[list[list[int]], int]:
    """Where each worker's parts begin, each on a cache line of its own; and where all end."""
    places, offset = [], 0
    for _ in range(workers):
        row = []
        for size in sizes:
            row.append(offset)
            offset += -(-size // 64) * 64
        places.append(row)
    return places, offset


class Half(Codec):
    """Every element in 16 bits."""

    dtype = torch.bfloat16

    def __init__(self, layout: Layout, memory: Memory, workers: int) -> None:
        super().__init__(layout, memory, workers)
        places, _ = _places(self._sizes(layout), workers)
        self._flats = [
            [memory.tensor(place, flat.count, self.dtype) for place, flat in zip(row, layout.flats, strict=True)]
            for row in places
        ]
        self._largest = torch.finfo(self.dtype).max

    @classmethod
    def _sizes(cls, layout: Layout) -> list[int]:
        return [flat.count * cls.dtype.itemsize for flat in layout.flats]

    @classmethod
    def memory_size(cls, layout: Layout, workers: int) -> int:
        return _places(cls._sizes(layout), workers)[1]

    def encode(self, rank: int, flat: int, value: torch.Tensor) -> torch.Tensor:
        target = self._flats[rank][flat]
        # What is too large for the form is cut, and the rest of it comes with the next gradient.
        target.copy_(torch.where(value.isinf(), value, value.clamp(-self._largest, self._largest)))
        return target.to(value.dtype)

    def decode(self, rank: int, flat: int, start: int, stop: int) -> torch.Tensor:
        return self._flats[rank][flat][start:stop].to(self.layout.flats[flat].dtype)


class Float16(Half):
    dtype = torch.float16


class Int8(Codec):
    """Every element in 8 bits, with a scale per block."""

    def __init__(self, layout: Layout, memory: Memory, workers: int) -> None:
        super().__init__(layout, memory, workers)
        places, _ = _places(self._sizes(layout), workers)
        self._values, self._scales = [], []
        for row in places:
            pairs = list(zip(row[::2], row[1::2], layout.flats, strict=True))
            self._values.append([memory.tensor(at, _blocks(flat.count) * _BLOCK, torch.int8) for at, _, flat in pairs])
            self._scales.append([memory.tensor(at, _blocks(flat.count), torch.float32) for _, at, flat in pairs])

    @classmethod
    def _sizes(cls, layout: Layout) -> list[int]:
        return [size for flat in layout.flats for size in (_blocks(flat.count) * _BLOCK, _blocks(flat.count) * 4)]

    @classmethod
    def memory_size(cls, layout: Layout, workers: int) -> int:
        return _places(cls._sizes(layout), workers)[1]

    def encode(self, rank: int, flat: int, value: torch.Tensor) -> torch.Tensor:
        blocks = _blocks(value.numel())
        padded = torch.zeros(blocks * _BLOCK, dtype=torch.float32)
        padded[: value.numel()] = value
        rows = padded.view(blocks, _BLOCK)
        scales = rows.abs().amax(1).div_(127)
        rows = rows / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        self._scales[rank][flat].copy_(scales)
        self._values[rank][flat].copy_(rows.round_().clamp_(-127, 127).view(-1))
        return self.decode(rank, flat, 0, value.numel())

    def decode(self, rank: int, flat: int, start: int, stop: int) -> torch.Tensor:
        first, last = start // _BLOCK, -(-stop // _BLOCK)
        values = self._values[rank][flat][first * _BLOCK : last * _BLOCK].view(-1, _BLOCK)
        dense = values * self._scales[rank][flat][first:last, None]
        return dense.view(-1)[start - first * _BLOCK : stop - first * _BLOCK].to(self.layout.flats[flat].dtype)


class TopK(Codec):
    """Only the largest elements, with their places."""

    share = 0.01

    def __init__(self, layout: Layout, memory: Memory, workers: int) -> None:
        super().__init__(layout, memory, workers)
        places, _ = _places(self._sizes(layout), workers)
        self._values, self._where = [], []
        for row in places:
            pairs = list(zip(row[::2], row[1::2], layout.flats, strict=True))
            self._values.append([memory.tensor(at, self._kept(flat.count), flat.dtype) for at, _, flat in pairs])
            self._where.append([memory.tensor(at, self._kept(flat.count), torch.int32) for _, at, flat in pairs])

    @classmethod
    def _kept(cls, count: int) -> int:
        return min(count, max(1, int(count * cls.share)))

    @classmethod
    def _sizes(cls, layout: Layout) -> list[int]:
        return [
            size
            for flat in layout.flats
            for size in (cls._kept(flat.count) * flat.dtype.itemsize, cls._kept(flat.count) * 4)
        ]

    @classmethod
    def memory_size(cls, layout: Layout, workers: int) -> int:
        return _places(cls._sizes(layout), workers)[1]

    def encode(self, rank: int, flat: int, value: torch.Tensor) -> torch.Tensor:
        where = torch.topk(value.abs(), self._kept(value.numel()), sorted=False).indices.sort().values
        self._where[rank][flat].copy_(where)
        self._values[rank][flat].copy_(value[where])
        kept = torch.zeros_like(value)
        kept[where] = value[where]
        return kept

    def decode(self, rank: int, flat: int, start: int, stop: int) -> torch.Tensor:
        where = self._where[rank][flat]
        first, last = torch.searchsorted(where, torch.tensor([start, stop], dtype=where.dtype)).tolist()
        dense = torch.zeros(stop - start, dtype=self.layout.flats[flat].dtype)
        dense[where[first:last].long() - start] = self._values[rank][flat][first:last]
        return dense


def _blocks(count: int) -> int:
    return -(-count // _BLOCK)


def codec_class(compression: Compression) -> type[Codec] | None:
    """The form asked for; None for gradients as they are."""
    match compression.form:
        case "bf16":
            return Half
        case "fp16":
            return Float16
        case "int8":
            return Int8
        case "topk":
            return type("TopK", (TopK,), {"share": compression.share})
    return None


class Feedback:
    """The error of a worker's pushes so far, which is added to the next gradient."""

    def __init__(self, codec: Codec, rank: int, gradients: list[torch.Tensor]) -> None:
        self._codec, self._rank = codec, rank
        self._gradients = gradients
        self._left = [torch.zeros_like(tensor) for tensor in gradients]
        self._factor = 1.0

    def encode(self, used: bytes | None = None, factor: float = 1.0) -> None:
        """Write this worker's gradient where the server reads it.

        used: per parameter, whether it has a gradient; what was left out of the others goes on waiting for their next.
        factor: what undoes the scale of the loss, in which the gradient and what is left of it are.
        """
        if factor != self._factor:
            for left in self._left:
                left.mul_(self._factor / factor)
            self._factor = factor
        for number, (gradient, left) in enumerate(zip(self._gradients, self._left, strict=True)):
            waiting = [
                (place, place.clone())
                for slot in self._codec.layout.flats[number].slots
                if used is not None and not used[slot.index]
                for place in (left[slot.offset : slot.offset + slot.count],)
            ]
            left.add_(gradient)
            for place, _ in waiting:
                place.zero_()
            left.sub_(self._codec.encode(self._rank, number, left))
            # A gradient that overflowed must not poison all that follow.
            left.nan_to_num_(0.0, 0.0, 0.0)
            for place, before in waiting:
                place.copy_(before)
