"""Which part of a tensor each worker has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Placement(NamedTuple):
    """A tensor is cut along one dimension, and each worker has its part of it.

    A dimension may consist of blocks, one after the other, each of which is cut by itself: of queries, keys and values
    that one layer makes together, every worker has its part of each.
    """

    dim: int
    blocks: tuple[int, ...]
    """Sizes of the blocks in the whole tensor."""

    @property
    def size(self) -> int:
        """Of the dimension, in the whole tensor."""
        return sum(self.blocks)

    def at(self, dim: int) -> Placement:
        """The same along another dimension."""
        return Placement(dim, self.blocks)

    def divides(self, workers: int) -> bool:
        return all(block % workers == 0 for block in self.blocks)


def cut(tensor: torch.Tensor, placement: Placement, rank: int, workers: int) -> torch.Tensor:
    """One worker's part of a whole tensor; a view of it where it is in one piece."""
    parts, start = [], 0
    for block in placement.blocks:
        length = block // workers
        parts.append(tensor.narrow(placement.dim, start + rank * length, length))
        start += block
    return parts[0] if len(parts) == 1 else torch.cat(parts, placement.dim)


def join(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor from all workers' parts."""
    if len(placement.blocks) == 1:
        return torch.cat(list(parts), placement.dim)
    pieces, start = [], 0
    for block in placement.blocks:
        length = block // len(parts)
        pieces += [part.narrow(placement.dim, start, length) for part in parts]
        start += length
    return torch.cat(pieces, placement.dim)
