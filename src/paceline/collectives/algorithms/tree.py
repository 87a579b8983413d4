"""The double binary tree: sums go up a tree, the result comes down, and a second tree gives the leaves some work.

In one binary tree half of the ranks are leaves, which send once and receive once, while an inner rank serves a parent
and two children. So there are two trees, each for one half of the tensor, and whoever is inner in one is a leaf in the
other. With seven ranks:

              first half of the tensor            second half of the tensor

                         3                                   2
                     ╱       ╲                           ╱       ╲
                   1           5                       0           4
                  ╱ ╲         ╱ ╲                     ╱ ╲         ╱ ╲
                 0   2       4   6                   6   1       3   5

Both trees have the same shape, read from left to right as places 0, 1, 2, …: the top of a run of places is the one that
has a full tree (one place less than a power of two) on its left. Every even place is then a leaf. In the first tree
rank r sits at place r. In the second tree all move by one place, or, if their number is even, sit in mirror order; both
turn an even place into an odd one. (With an odd number the last rank is a leaf twice.)

It takes few steps, 2·floor(log2 N), whence it is for small tensors and many ranks. No rank sends more than twice the
tensor, where the inner ranks of a single tree send it three times. Nothing is pipelined here: a half moves as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.collectives.algorithms.chunks import split
from paceline.collectives.algorithms.messages import Combine, outgoing
from paceline.transport.channel import Channel

TREES = (0, 1)


class TreePosition(NamedTuple):
    """Where a rank is in a tree."""

    parent: int | None
    children: tuple[int, ...]
    """The larger subtree's first."""


def place(tree: int, rank: int, size: int) -> TreePosition:
    """The parent and the children of a rank in the first (0) or the second (1) tree of `size` ranks."""
    position = _position(tree, rank, size)
    start, stop, above = 0, size, None
    while (top := _top(start, stop)) != position:
        above = top
        start, stop = (start, top) if position < top else (top + 1, stop)
    below = [_top(first, last) for first, last in ((start, top), (top + 1, stop)) if first < last]
    parent = None if above is None else _rank(tree, above, size)
    return TreePosition(parent, tuple(_rank(tree, child, size) for child in below))


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leave the sum of everybody's `tensor` in everybody's `tensor`."""
    places = [place(tree, channel.rank, channel.size) for tree in TREES]
    _up(channel, places, tensor, combine)
    _down(channel, places, tensor)


def broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to all."""
    _down(channel, _below(channel, root), tensor)


def reduce(channel: Channel, tensor: torch.Tensor, combine: Combine, root: int) -> None:
    """Leave the sum of everybody's `tensor` in the root's; the others keep theirs."""
    total = tensor if channel.rank == root else tensor.clone()
    _up(channel, _below(channel, root), total, combine)


def barrier(channel: Channel) -> None:
    """Return when all have come: one tree is enough, as nothing but the messages' arrival counts."""
    parent, children = place(0, channel.rank, channel.size)
    nothing = torch.empty(0)
    for child in children:
        channel.receive(child, nothing)
    with outgoing(channel) as send:
        if parent is not None:
            send(parent, nothing)
            channel.receive(parent, nothing)
        for child in children:
            send(child, nothing)


def _up(channel: Channel, places: list[TreePosition], tensor: torch.Tensor, combine: Combine) -> None:
    """Add up both halves on the way to the tops of their trees."""
    work = zip(places, split(tensor, len(places)), strict=True)
    with outgoing(channel) as send:
        # A leaf's half first: the parent in that tree waits for it, while the own children have yet to send.
        for (parent, children), half in sorted(work, key=_is_inner):
            arriving = torch.empty_like(half)
            for child in reversed(children):  # the smaller subtree is ready first
                channel.receive(child, arriving)
                combine(half, arriving)
            if parent is not None:
                send(parent, half)


def _down(channel: Channel, places: list[TreePosition], tensor: torch.Tensor) -> None:
    """Copy both halves from the tops of their trees to all."""
    work = zip(places, split(tensor, len(places)), strict=True)
    with outgoing(channel) as send:
        # The inner place first: the children wait for it. As all do so, nobody waits for a rank that waits for it.
        for (parent, children), half in sorted(work, key=_is_inner, reverse=True):
            if parent is not None:
                channel.receive(parent, half)
            for child in children:  # the larger subtree has the longer way down
                send(child, half)


def _is_inner(work: tuple[TreePosition, torch.Tensor]) -> bool:
    return bool(work[0].children)


def _below(channel: Channel, root: int) -> list[TreePosition]:
    """The own places in two trees of all ranks but the root, which stands above the tops of both."""
    size = channel.size - 1

    def real(rank: int | None) -> int:
        return root if rank is None else (root + 1 + rank) % channel.size

    if channel.rank == root:
        tops = [(real(_rank(tree, _top(0, size), size)),) if size else () for tree in TREES]
        return [TreePosition(None, top) for top in tops]
    own = (channel.rank - root - 1) % channel.size
    places = [place(tree, own, size) for tree in TREES]
    return [TreePosition(real(parent), tuple(map(real, children))) for parent, children in places]


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
