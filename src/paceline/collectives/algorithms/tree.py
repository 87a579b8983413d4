"""Collectives up and down a double binary tree, each tree for one half of the tensor.

`paceline.topologies.tree` draws the trees and gives the place of each rank. An all-reduce adds up on the way to the top
of each tree and copies the result down. It takes few steps, 2·floor(log2 N), so it is for small tensors and many ranks.
No rank sends more than twice the tensor, where the inner ranks of a single tree send it three times. Nothing is
pipelined here: a half moves as a whole.
"""

from __future__ import annotations

import torch

from paceline.collectives.algorithms.messages import Combine, outgoing, split
from paceline.topologies.tree import TREES, TreePosition, place, top
from paceline.transport.channel import Channel


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leaves the sum of all ranks' `tensor` in each rank's `tensor`."""
    places = [place(which, channel.rank, channel.size) for which in TREES]
    _up(channel, places, tensor, combine)
    _down(channel, places, tensor)


def broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> None:
    """Copies the root's `tensor` to all."""
    _down(channel, _below(channel, root), tensor)


def reduce(channel: Channel, tensor: torch.Tensor, combine: Combine, root: int) -> None:
    """Leaves the sum of all ranks' `tensor` in the root's; the others keep theirs."""
    total = tensor if channel.rank == root else tensor.clone()
    _up(channel, _below(channel, root), total, combine)


def barrier(channel: Channel) -> None:
    """Returns when all ranks have arrived; one tree is enough, since the messages are empty."""
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
    """Adds up both halves towards the tops of their trees."""
    work = zip(places, split(tensor, len(places)), strict=True)
    with outgoing(channel) as send:
        # The half in which this rank is a leaf first: its parent waits for it, while its children have yet to send.
        for (parent, children), half in sorted(work, key=_is_inner):
            arriving = torch.empty_like(half)
            for child in reversed(children):  # the smaller subtree is ready first
                channel.receive(child, arriving)
                combine(half, arriving)
            if parent is not None:
                send(parent, half)


def _down(channel: Channel, places: list[TreePosition], tensor: torch.Tensor) -> None:
    """Copies both halves from the tops of their trees to all."""
    work = zip(places, split(tensor, len(places)), strict=True)
    with outgoing(channel) as send:
        # The half in which this rank is inner first: its children wait for it. All ranks do so, which avoids deadlock.
        for (parent, children), half in sorted(work, key=_is_inner, reverse=True):
            if parent is not None:
                channel.receive(parent, half)
            for child in children:  # the larger subtree has the longer path
                send(child, half)


def _is_inner(work: tuple[TreePosition, torch.Tensor]) -> bool:
    return bool(work[0].children)


def _below(channel: Channel, root: int) -> list[TreePosition]:
    """This rank's places in two trees of all ranks but the root, which is the parent of both tops."""
    size = channel.size - 1

    def real(rank: int | None) -> int:
        return root if rank is None else (root + 1 + rank) % channel.size

    if channel.rank == root:
        return [TreePosition(None, (real(top(tree, size)),) if size else ()) for tree in TREES]
    own = (channel.rank - root - 1) % channel.size
    places = [place(tree, own, size) for tree in TREES]
    return [TreePosition(real(parent), tuple(map(real, children))) for parent, children in places]
