"""Splits a flat tensor into chunks that differ by at most one element."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.topologies.chunks import bounds

if TYPE_CHECKING:
    import torch


def split(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The chunks of a flat tensor, as views of it."""
    return [tensor[start:stop] for start, stop in pairwise(bounds(tensor.numel(), count))]
