"""A shard, cut at the borders of parameters and of chunks that fit into a core's cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.reduction import CHUNK
from paceline.parameters.versions import Versions

ByGroup = dict[int, list[torch.nn.Parameter]]
"""Parameters to update, by parameter group."""


@dataclasses.dataclass(slots=True)
class Piece:
    """The part of one parameter that lies in one chunk."""

    number: int
    flat: int
    slot: Slot
    group: int
    chunk: int
    start: int
    stop: int
    parameter: torch.nn.Parameter
    """Its values, with the summed gradient as `.grad`: the optimizer's view of it. Autograd does not know it."""
    head: int = 0
    """The number of the first piece of its run: neighbours of one group that can be updated as one."""
    in_memory: bool = False
    """True if its state lies in shared memory."""


@dataclasses.dataclass(slots=True)
class ShardChunk:
    """Consecutive elements of a shard that are summed and updated before the next ones are touched."""

    flat: int
    start: int
    stop: int
    pieces: list[Piece]
    by_group: ByGroup
    gradients: tuple[torch.Tensor, ...]
    """Each worker's gradients of this chunk."""
    total: torch.Tensor
    """Their sum."""
    buffers: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Its values in buffers of versions, by buffer; filled on demand."""
    state: list[memoryview] | None = None
    """Where the optimizer's state of it lies; filled on demand."""


def cut_pieces(optimizer: Optimizer, layout: Layout, workers: int) -> list[list[Piece]]:
    """The pieces of each worker's shard, numbered in the same order everywhere."""
    group_of = {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    by_owner: list[list[Piece]] = []
    count = 0
    for owner in range(workers):
        own: list[Piece] = []
        for number, flat in enumerate(layout.flats):
            before: Piece | None = None
            for piece in _cut(number, flat.slots, flat.shards[owner], flat.dtype, group_of):
                piece.number = piece.head = count
                if before is not None and (before.group, before.chunk) == (piece.group, piece.chunk):
                    piece.head = before.head
                before = piece
                own.append(piece)
                count += 1
        by_owner.append(own)
    return by_owner


def _cut(
    flat: int, slots: tuple[Slot, ...], shard: tuple[int, int], dtype: torch.dtype, group_of: dict[int, int]
) -> Iterable[Piece]:
    first, last = shard
    step = max(1, CHUNK // dtype.itemsize)
    for slot in slots:
        start = max(first, slot.offset)
        stop = min(last, slot.offset + slot.count)
        while start < stop:
            chunk = (start - first) // step
            end = min(stop, first + (chunk + 1) * step)
            empty = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            yield Piece(0, flat, slot, group_of[id(slot.parameter)], chunk, start, end, empty)
            start = end


def make_chunks(
    layout: Layout, versions: Versions, gradients: Gradients, rank: int, own: list[Piece]
) -> list[ShardChunk]:
    """The chunks of one worker's shard; its pieces become views of the first buffer of versions."""
    chunks: list[ShardChunk] = []
    for number, flat in enumerate(layout.flats):
        pieces = [piece for piece in own if piece.flat == number]
        start, stop = flat.shards[rank]
        step = max(1, CHUNK // flat.dtype.itemsize)
        total = torch.empty(min(step, max(0, stop - start)), dtype=flat.dtype)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            inside = [piece for piece in pieces if begin <= piece.start < end]
            by_group: ByGroup = {}
            for piece in inside:
                by_group.setdefault(piece.group, []).append(piece.parameter)
                piece.parameter.data = versions.flats[number][piece.start : piece.stop]
                piece.parameter.grad = total[piece.start - begin : piece.stop - begin]
            parts = tuple(tensors[number][begin:end] for tensors in gradients.flats)
            chunks.append(ShardChunk(number, begin, end, inside, by_group, parts, total[: end - begin]))
    return chunks
