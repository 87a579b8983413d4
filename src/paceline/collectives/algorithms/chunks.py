"""Cutting a flat tensor into chunks that differ by at most one element.

        length 10, 4 chunks      | 0 1 | 2 3 4 | 5 6 | 7 8 9 |
        bounds                   0     2       5     7      10

Everybody cuts alike, so the length of a chunk never has to be sent. With fewer elements than chunks some chunks are
empty; they are sent all the same, which keeps the number of messages independent of the length.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def bounds(length: int, count: int) -> list[int]:
    """Where `count` chunks of `length` elements begin, and at last where the final one ends."""
    return [length * index // count for index in range(count + 1)]


def split(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The chunks of a flat tensor, as views of it."""
    return [tensor[start:stop] for start, stop in pairwise(bounds(tensor.numel(), count))]
