"""Collectives up and down a double binary tree, each tree for one half of the tensor.

`paceline.topologies.tree` draws the trees and gives the place of each rank. An all-reduce adds up on the way to the top
of each tree and copies the result down. It takes few steps, 2·floor(log2 N), so it is for small tensors and many ranks.
No rank sends more than twice the tensor, where the inner ranks of a single tree send it three times. Nothing is
pipelined here: a half moves as a whole.
"""

from __future__ import annotations

import torch

from paceline.collectives.algorithms.chunks import split
from paceline.collectives.algorithms.messages import Combine, outgoing
from paceline.topologies.tree import TREES, TreePosition, place, top
from paceline.transport.channel import Channel


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leave the sum of everybody's `tensor` in everybody's `tensor`."""
    places = [place(which, channel.rank, channel.size) for which in TREES]
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
        return [TreePosition(None, (real(top(tree, size)),) if size else ()) for tree in TREES]
    own = (channel.rank - root - 1) % channel.size
    places = [place(tree, own, size) for tree in TREES]
    return [TreePosition(real(parent), tuple(map(real, children))) for parent, children in places]
