"""The double binary tree: the place of each rank in both trees, and the cost.

In one binary tree half of the ranks are leaves, which send once and receive once, while an inner rank serves a parent
and two children. So there are two trees, each for one half of the tensor, and a rank that is inner in one is a leaf in
the other. With seven ranks:

              first half of the tensor            second half of the tensor

                         3                                   2
                     ╱       ╲                           ╱       ╲
                   1           5                       0           4
                  ╱ ╲         ╱ ╲                     ╱ ╲         ╱ ╲
                 0   2       4   6                   6   1       3   5

Both trees have the same shape, numbered from left to right as places 0, 1, 2, …: the top of a run of places is the one
that has a full tree (one place less than a power of two) on its left. Every even place is then a leaf. In the first
tree rank r has place r. In the second tree all ranks move by one place or, if their number is even, are in reverse
order; both turn an even place into an odd one. (With an odd number of ranks the last one is a leaf twice.)

The tree of textbooks is a single one with ceil(log2 N) levels and a message of S bytes per level.
Here a level is two messages of half the size, which a parent receives one after the other, so a level also costs one
latency and S/B. But a binary tree of N ranks has only floor(log2 N) levels below its top and, unless all of them are
full, the longest path has one message less to wait for, up and down: S/(2B) each.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.topologies.costs import ExchangeCost

TREES = (0, 1)


class TreePosition(NamedTuple):
    """The neighbours of a rank in a tree."""

    parent: int | None
    children: tuple[int, ...]
    """The child with the larger subtree first."""


def place(tree: int, rank: int, size: int) -> TreePosition:
    """The parent and the children of a rank in the first (0) or the second (1) tree of `size` ranks."""
    position = _position(tree, rank, size)
    start, stop, above = 0, size, None
    while (middle := _top(start, stop)) != position:
        above = middle
        start, stop = (start, middle) if position < middle else (middle + 1, stop)
    below = [_top(first, last) for first, last in ((start, middle), (middle + 1, stop)) if first < last]
    parent = None if above is None else _rank(tree, above, size)
    return TreePosition(parent, tuple(_rank(tree, child, size) for child in below))


def top(tree: int, size: int) -> int:
    """The rank at the top of a tree of `size` ranks."""
    return _rank(tree, _top(0, size), size)


def cost(size: int) -> ExchangeCost:
    """2·floor(log2 N)(latency + S/B) − S/B, or without the − S/B if N + 1 is a power of two."""
    levels = size.bit_length() - 1
    is_full = size + 1 == 2 << levels
    return ExchangeCost(2 * levels, 2 * levels - (not is_full))


def _top(start: int, stop: int) -> int:
    """The top of the places from `start` to before `stop`."""
    return start + (1 << ((stop - start).bit_length() - 1)) - 1


def _position(tree: int, rank: int, size: int) -> int:
    if tree == 0:
        return rank
    return (rank + 1) % size if size % 2 else size - 1 - rank


def _rank(tree: int, position: int, size: int) -> int:
    if tree == 0:
        return position
    return (position - 1) % size if size % 2 else size - 1 - position
