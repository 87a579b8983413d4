"""Placement of a sharded tensor: the dimension that it is cut along, and the blocks of that dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Placement(NamedTuple):
    """A tensor is cut along one dimension, and each worker has one shard.

    The dimension may consist of consecutive blocks that are cut one by one: of queries, keys and values that one layer
    computes together, every worker has its shard of each.
    """

    dim: int
    blocks: tuple[int, ...]
    """Sizes of the blocks in the whole tensor."""

    @property
    def size(self) -> int:
        """Size of the dimension in the whole tensor."""
        return sum(self.blocks)

    def at(self, dim: int) -> Placement:
        """The same blocks along another dimension."""
        return Placement(dim, self.blocks)

    def divides(self, workers: int) -> bool:
        """True if every block can be cut into equal shards."""
        return all(block % workers == 0 for block in self.blocks)


def shard_of(tensor: torch.Tensor, placement: Placement, rank: int, workers: int) -> torch.Tensor:
    """One worker's shard of a whole tensor; a view of it if there is one block."""
    parts, start = [], 0
    for block in placement.blocks:
        length = block // workers
        parts.append(tensor.narrow(placement.dim, start + rank * length, length))
        start += block
    return parts[0] if len(parts) == 1 else torch.cat(parts, placement.dim)


def unshard(shards: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor from all workers' shards."""
    if len(placement.blocks) == 1:
        return torch.cat(list(shards), placement.dim)
    pieces, start = [], 0
    for block in placement.blocks:
        length = block // len(shards)
        pieces += [shard.narrow(placement.dim, start, length) for shard in shards]
        start += length
    return torch.cat(pieces, placement.dim)
