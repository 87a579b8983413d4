"""The mean gradient: each worker sums its shard of all buffers, then copies the other shards."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import distributed

from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout

CHUNK = 512 * 1024
"""Bytes of a chunk, which fits into a core's own cache."""

Weights = list[tuple[int, float]]
"""Ranks that contribute, in rising order, each with its weight."""


def weighted_sum(total: torch.Tensor, parts: tuple[torch.Tensor, ...], weights: Weights, scale: float = 1.0) -> None:
    """Sum `parts` by weight into `total`, in the order of ranks, so that the same parts always give the same bits."""
    (first, weight), *rest = weights
    if rest and weight * scale == 1.0:  # the same bits, reading memory once less
        (second, share), *rest = rest
        torch.add(parts[first], parts[second], alpha=share * scale, out=total)
    else:
        torch.mul(parts[first], weight * scale, out=total)
    for rank, share in rest:
        total.add_(parts[rank], alpha=share * scale)


class Reduction(ABC):
    """Makes the mean gradient in this worker's own buffer, in two steps with a barrier between them."""

    @abstractmethod
    def shard(self, weights: Weights, used: list[bytes] | None, *, again: bool = False) -> int:
        """Sum this worker's shard; returns the bytes read from other workers.

        again: True if what was summed while the backward pass ran is not these gradients.
        """

    @abstractmethod
    def gather(self) -> int:
        """Copy the other shards, once they are summed; returns the bytes read."""

    @abstractmethod
    def adopt(self, rank: int) -> None:
        """Copy another worker's mean gradient, which its script may have changed."""

    def close(self) -> None:
        """Ends what runs in the background; all workers call it, or have failed."""

    def norm(self, kind: float, used: bytes | None) -> float:
        """The norm of this worker's shard, raised to `kind` so that shards can be added (the norm itself for inf)."""
        raise NotImplementedError


class SharedReduction(Reduction):
    """Sums a shard of all workers' buffers in shared memory."""

    def __init__(self, layout: Layout, gradients: Gradients, rank: int, target: int | None = None) -> None:
        """rank: of the shard; target: the buffer that the sums are written to, if not that of the same number."""
        self._layout, self._gradients, self._rank = layout, gradients, rank
        self._target = rank if target is None else target

    def shard(self, weights: Weights, used: list[bytes] | None, *, again: bool = False) -> int:
        read = 0
        for number, flat in enumerate(self._layout.flats):
            read += self.stretch(number, *flat.shards[self._rank], weights, used)
        return read

    def stretch(self, number: int, start: int, stop: int, weights: Weights, used: list[bytes] | None) -> int:
        """Sum a stretch of one of the flats; returns the bytes read from other workers."""
        flat = self._layout.flats[number]
        if used is None:
            self._sum(number, start, stop, weights)
        for slot in flat.slots if used is not None else ():
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
            contributing = [(rank, weight) for rank, weight in weights if used is not None and used[rank][slot.index]]
            if first < last and contributing:
                self._sum(number, first, last, contributing)
        return sum(rank != self._rank for rank, _ in weights) * (stop - start) * flat.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes of all sums."""
        return self._layout.size

    def total(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Where the sum of a stretch is."""
        return self._gradients.flats[self._target][number][start:stop]

    def clear(self, number: int, start: int, stop: int, weights: Weights, used: list[bytes] | None) -> None:
        """Set the sum to zero where no worker of this machine has a gradient; others may have."""
        for slot in self._layout.flats[number].slots:
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
            anybody = any(used is None or used[rank][slot.index] for rank, _ in weights)
            if first < last and not anybody:
                self._gradients.flats[self._target][number][first:last].zero_()

    def _sum(self, number: int, start: int, stop: int, weights: Weights) -> None:
        parts = tuple(tensors[number] for tensors in self._gradients.flats)
        places = self._gradients.places
        step = CHUNK // parts[0].itemsize
        total = torch.empty(min(step, stop - start), dtype=parts[0].dtype)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            piece = total[: end - begin]
            if places is not None:
                places.mix(piece, number, begin, end, weights)
            else:
                weighted_sum(piece, tuple(part[begin:end] for part in parts), weights)
            parts[self._target][begin:end].copy_(piece)

    def gather(self) -> int:
        copied = 0
        for number, flat in enumerate(self._layout.flats):
            own = self._gradients.own[number]
            for rank, (start, stop) in enumerate(flat.shards):
                if rank != self._rank:
                    own[start:stop].copy_(self._gradients.flats[rank][number][start:stop])
                    copied += (stop - start) * flat.dtype.itemsize
        return copied

    def adopt(self, rank: int) -> None:
        for own, other in zip(self._gradients.own, self._gradients.flats[rank], strict=True):
            own.copy_(other)

    def norm(self, kind: float, used: bytes | None) -> float:
        values = [0.0]
        for number, flat in enumerate(self._layout.flats):
            start, stop = flat.shards[self._rank]
            for slot in flat.slots:
                first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
                if first >= last or (used is not None and not used[slot.index]):
                    continue
                value = float(torch.linalg.vector_norm(self._gradients.flats[self._target][number][first:last], kind))
                values.append(value if kind == float("inf") else value**kind)
        return combine_norms(values, kind)


def combine_norms(parts: list[float], kind: float) -> float:
    """The norms of parts as one, both raised to `kind` (the largest for inf); a NaN among them is never hidden."""
    return float(torch.tensor(parts, dtype=torch.float64).amax()) if kind == float("inf") else sum(parts)


class CollectiveReduction(Reduction):
    """Sums the buffers by torch.distributed, on accelerators, whose memory workers cannot share."""

    def __init__(self, layout: Layout, gradients: Gradients, rank: int) -> None:
        self._layout, self._gradients, self._rank = layout, gradients, rank
        if not distributed.is_initialized():
            distributed.init_process_group()

    def shard(self, weights: Weights, used: list[bytes] | None, *, again: bool = False) -> int:
        weight = dict(weights).get(self._rank, 0.0)
        read = 0
        for flat, tensor in zip(self._layout.flats, self._gradients.own, strict=True):
            for slot in flat.slots:
                if weight == 0.0 or (used is not None and not used[self._rank][slot.index]):
                    slot.view(tensor).zero_()  # it holds a gradient of an earlier step
            tensor.mul_(weight)
            distributed.all_reduce(tensor)
            read += flat.size
        return read

    def gather(self) -> int:
        return 0

    def adopt(self, rank: int) -> None:
        pass
