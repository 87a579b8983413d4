"""Roles of sharded layers, and their communication with the layers before and after."""

from __future__ import annotations

import msgspec
import torch

from paceline.tensor_parallel.comm_functions import (
    ShardGroup,
    all_gather_for_shards,
    all_reduce,
    reduce_scatter,
    replicate,
)
from paceline.tensor_parallel.partial_tensor import PartialTensor
from paceline.tensor_parallel.placement import Placement

ROLES = ("column", "row", "vocabulary", "channels", "heads")


class Role(msgspec.Struct, frozen=True):
    """How a layer is sharded."""

    name: str
    blocks: tuple[int, ...] = ()
    """Blocks of the dimension that is cut."""
    sequence: bool = False
    """True if the layer's output is sharded along the sequence."""


def layer_input(value: torch.Tensor, group: ShardGroup) -> torch.Tensor:
    """The whole input of a layer that computes a shard of its output."""
    if type(value) is PartialTensor:
        return all_gather_for_shards(value.local, value.placement, group)
    return replicate(value, group)


def layer_output(term: torch.Tensor, role: Role, group: ShardGroup) -> torch.Tensor:
    """The output of a layer of which each worker computes one term of a sum."""
    if role.sequence and term.dim() >= 3 and term.shape[1] % group.size == 0:
        placement = Placement(1, (term.shape[1],))
        return PartialTensor.of(reduce_scatter(term, placement, group), placement, group)
    return all_reduce(term, group)
