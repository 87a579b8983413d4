"""What a layer of which each worker has a part is to the layers around it."""

from __future__ import annotations

import msgspec
import torch

from paceline.tensor_parallel.comm_functions import ShardSpace, collected, copied, scattered, summed
from paceline.tensor_parallel.partial_tensor import PartialTensor
from paceline.tensor_parallel.placement import Placement

ROLES = ("column", "row", "vocabulary", "channels", "heads")


class Role(msgspec.Struct, frozen=True):
    """What becomes of a layer."""

    name: str
    blocks: tuple[int, ...] = ()
    """Of the dimension that is cut."""
    sequence: bool = False
    """A sum is handed out in parts along the sequence."""


def entering(value: torch.Tensor, space: ShardSpace) -> torch.Tensor:
    """What goes into a layer of which each worker computes a part: the whole."""
    if type(value) is PartialTensor:
        return collected(value.local, value.placed, space)
    return copied(value, space)


def leaving(total: torch.Tensor, role: Role, space: ShardSpace) -> torch.Tensor:
    """What comes out of one whose workers each have a term of the sum."""
    if role.sequence and total.dim() >= 3 and total.shape[1] % space.size == 0:
        placement = Placement(1, (total.shape[1],))
        return PartialTensor.of(scattered(total, placement, space), placement, space)
    return summed(total, space)
