"""The mean gradient: each worker sums its own shard from everybody's buffers, then takes the others' shards."""

from __future__ import annotations

import torch

from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout

CHUNK = 512 * 1024
"""Bytes of a chunk: what is done to it is done while it stays in a core's own cache."""

Weights = list[tuple[int, float]]
"""Ranks that contribute, in rising order, each with its weight."""


def weighted_sum(total: torch.Tensor, parts: tuple[torch.Tensor, ...], weights: Weights, scale: float = 1.0) -> None:
    """Sum `parts` by weight into `total`, in the order of ranks, so that the same parts always give the same bits."""
    (first, weight), *rest = weights
    torch.mul(parts[first], weight * scale, out=total)
    for rank, share in rest:
        total.add_(parts[rank], alpha=share * scale)


class Reduction:
    """Makes the mean gradient, of this worker's shard or of everything, in this worker's own buffer."""

    def __init__(self, layout: Layout, gradients: Gradients, rank: int) -> None:
        self._layout, self._gradients, self._rank = layout, gradients, rank

    def shard(self, weights: Weights, used: list[bytes] | None) -> int:
        """Sum this worker's shard in place; returns the bytes read from other workers' memory."""
        read = 0
        for number, flat in enumerate(self._layout.flats):
            parts = tuple(tensors[number] for tensors in self._gradients.flats)
            start, stop = flat.shards[self._rank]
            others = sum(rank != self._rank for rank, _ in weights)
            read += others * (stop - start) * flat.dtype.itemsize
            if used is None:
                self._sum(parts, start, stop, weights)
                continue
            for slot in flat.slots:
                first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
                contributing = [(rank, weight) for rank, weight in weights if used[rank][slot.index]]
                if first < last and contributing:
                    self._sum(parts, first, last, contributing)
        return read

    def _sum(self, parts: tuple[torch.Tensor, ...], start: int, stop: int, weights: Weights) -> None:
        step = CHUNK // parts[0].itemsize
        total = torch.empty(min(step, stop - start), dtype=parts[0].dtype)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            piece = total[: end - begin]
            weighted_sum(piece, tuple(part[begin:end] for part in parts), weights)
            parts[self._rank][begin:end].copy_(piece)

    def gather(self) -> int:
        """Copy the other workers' shards, once they are summed; returns the bytes copied."""
        copied = 0
        for number, flat in enumerate(self._layout.flats):
            own = self._gradients.own[number]
            for rank, (start, stop) in enumerate(flat.shards):
                if rank != self._rank:
                    own[start:stop].copy_(self._gradients.flats[rank][number][start:stop])
                    copied += (stop - start) * flat.dtype.itemsize
        return copied

    def norm(self, kind: float, used: bytes | None) -> float:
        """The norm of this worker's shard, raised to `kind` so that shards can be added (the norm itself for inf)."""
        total = 0.0
        for number, flat in enumerate(self._layout.flats):
            start, stop = flat.shards[self._rank]
            for slot in flat.slots:
                first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
                if first >= last or (used is not None and not used[slot.index]):
                    continue
                value = float(torch.linalg.vector_norm(self._gradients.own[number][first:last], kind))
                total = max(total, value) if kind == float("inf") else total + value**kind
        return total
