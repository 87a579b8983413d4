"""The place of each parameter in flat buffers, each of one dtype, and the shard of them that each worker owns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch

_ALIGNMENT = 64
"""Bytes: a parameter and a shard begin on a cache line of their own."""
_STRIPE = 4 << 20
"""Bytes from which on a parameter, or neighbours together, have a flat buffer of their own in a striped layout."""

_Members = list[tuple[int, str, torch.nn.Parameter]]


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a flat buffer."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    offset: int
    count: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of `flat` that is this parameter, in its shape and memory format."""
        return flat[self.offset : self.offset + self.count].as_strided(self.shape, self.stride)

    def flatten(self, value: torch.Tensor) -> torch.Tensor:
        """`value` in the order in which it lies in the flat buffer."""
        flat = torch.empty(self.count, dtype=value.dtype)
        flat.as_strided(self.shape, self.stride).copy_(value)
        return flat


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """Parameters of one dtype: all of them, or in a striped layout some."""

    dtype: torch.dtype
    count: int
    slots: tuple[Slot, ...]
    shards: tuple[tuple[int, int], ...]
    """Per rank, the elements [start, stop) that it owns."""

    @property
    def size(self) -> int:
        return self.count * self.dtype.itemsize


class Layout:
    """The flat buffers of a model, equal on all workers."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        workers: int,
        *,
        whole: bool = False,
        striped: bool = False,
    ) -> None:
        """whole: no parameter is divided between owners; their shards are then only about equal.

        striped: every owner has a part of every large parameter, so that over a network what the backward pass makes
        last goes to all owners at once, and does not crowd the link of one.
        """
        by_dtype: dict[torch.dtype, _Members] = {}
        for index, (name, parameter) in enumerate(parameters):
            by_dtype.setdefault(parameter.dtype, []).append((index, name, parameter))
        self.flats = tuple(
            _flat(dtype, part, workers, whole)
            for dtype, members in by_dtype.items()
            for part in (_stripes(members) if striped and not whole else [members])
        )
        self.slots = tuple(sorted((slot for flat in self.flats for slot in flat.slots), key=_index))
        self.size = sum(flat.size for flat in self.flats)

    def buffers(self, flat_tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per parameter, its view of these flat tensors."""
        views: dict[int, torch.Tensor] = {}
        for flat, tensor in zip(self.flats, flat_tensors, strict=True):
            for slot in flat.slots:
                views[slot.index] = slot.view(tensor)
        return [views[slot.index] for slot in self.slots]


def _stripes(members: _Members) -> list[_Members]:
    """Groups of neighbours, each large enough to be divided."""
    parts: list[_Members] = [[]]
    size = 0
    for member in members:
        if size >= _STRIPE or (parts[-1] and member[2].nbytes >= _STRIPE):
            parts.append([])
            size = 0
        parts[-1].append(member)
        size += member[2].nbytes
    return parts


def _flat(dtype: torch.dtype, members: _Members, workers: int, whole: bool) -> Flat:
    unit = max(1, _ALIGNMENT // dtype.itemsize)
    offset = 0
    slots = []
    for index, name, parameter in members:
        shape, count = parameter.shape, parameter.numel()
        stride = parameter.stride() if _is_dense(parameter) else torch.empty(shape, device="meta").stride()
        slots.append(Slot(index, name, parameter, offset, count, shape, stride))
        offset = -(-(offset + count) // unit) * unit
    bounds = borders(offset, dtype, workers)
    if whole:
        edges = [slot.offset for slot in slots] + [offset]
        bounds = [min(edges, key=lambda edge: abs(edge - bound)) for bound in bounds]
    return Flat(dtype, offset, tuple(slots), tuple(itertools.pairwise(bounds)))


def borders(count: int, dtype: torch.dtype, workers: int) -> list[int]:
    """Where the shards of so many workers begin in a flat buffer, and the end."""
    unit = max(1, _ALIGNMENT // dtype.itemsize)
    return [count // unit * rank // workers * unit for rank in range(workers + 1)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements fill consecutive memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _index(slot: Slot) -> int:
    return slot.index
