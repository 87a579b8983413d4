"""Direct collectives: every rank exchanges with every other, one round of messages per step.

        0 ─── 1            round 1    each rank receives its chunk from all, and adds them in the order of ranks
        │ ╲ ╱ │            round 2    each rank sends its sum to all
        │ ╱ ╲ │
        3 ─── 2

An all-reduce takes two latencies for any number of ranks, and moves as few bytes as the ring. It needs a network in
which each pair of ranks has its own path, and N−1 messages per rank and round: many small ones for large N.

Rank r sends to rank r+1 first, then to r+2, and so forth, so at any time each rank receives from only one other.
"""

from __future__ import annotations

import torch

from paceline.collectives.algorithms.messages import Combine, combine_all, one_each, others, outgoing, split
from paceline.transport.channel import Channel


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leaves the sum of all ranks' `tensor` in each rank's `tensor`."""
    chunks = split(tensor, channel.size)
    reduce_scatter(channel, chunks, combine)
    all_gather(channel, chunks)


def reduce_scatter(channel: Channel, parts: list[torch.Tensor], combine: Combine) -> None:
    """Leaves the sum of all ranks' `parts[i]` in `parts[i]` of rank i; the other parts stay as they are."""
    with outgoing(channel) as send:
        for peer in others(channel):
            send(peer, parts[peer])
        combine_all(channel, parts[channel.rank], combine)


def all_gather(channel: Channel, parts: list[torch.Tensor]) -> None:
    """Fills in all `parts`, of which each rank has its own."""
    with outgoing(channel) as send:
        for peer in others(channel):
            send(peer, parts[channel.rank])
        for peer in reversed(others(channel)):  # the order of arrival
            channel.receive(peer, parts[peer])


def broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> None:
    """Copies the root's `tensor` to all."""
    if channel.rank != root:
        channel.receive(root, tensor)
        return
    with outgoing(channel) as send:
        for peer in others(channel):
            send(peer, tensor)


def reduce(channel: Channel, tensor: torch.Tensor, combine: Combine, root: int) -> None:
    """Leaves the sum of all ranks' `tensor` in the root's; the others keep theirs."""
    if channel.rank == root:
        combine_all(channel, tensor, combine)
        return
    channel.send(root, tensor).wait()


def gather(channel: Channel, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int) -> None:
    """Copies the `tensor` of rank i to `outputs[i]` of the root of any length."""
    if channel.rank == root:
        outputs = one_each(channel, outputs)
        outputs[root].copy_(tensor)
        for peer in others(channel):
            channel.receive(peer, outputs[peer])
        return
    channel.send(root, tensor).wait()


def scatter(channel: Channel, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> None:
    """Copies `inputs[i]` of the root to the `tensor` of rank i of any length."""
    if channel.rank != root:
        channel.receive(root, tensor)
        return
    inputs = one_each(channel, inputs)
    tensor.copy_(inputs[root])
    with outgoing(channel) as send:
        for peer in others(channel):
            send(peer, inputs[peer])


def all_to_all(channel: Channel, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Copies `inputs[j]` of rank i to `outputs[i]` of rank j of any length."""
    outputs[channel.rank].copy_(inputs[channel.rank])
    with outgoing(channel) as send:
        for peer in others(channel):
            send(peer, inputs[peer])
        for peer in reversed(others(channel)):
            channel.receive(peer, outputs[peer])


def barrier(channel: Channel) -> None:
    """Returns when all ranks have arrived."""
    all_gather(channel, [torch.empty(0) for _ in range(channel.size)])
