"""Collectives around a ring: every rank sends only to the next one, and receives only from the one before.

        rank 0 ──► rank 1 ──► rank 2 ──► rank 3 ──╮
          ▲                                       │
          ╰───────────────────────────────────────╯

An all-reduce cuts the tensor into as many chunks as there are ranks. In the first half, the reduce-scatter, each chunk
passes all ranks once, and each adds its own values. The sum of chunk i ends at rank i:

        step 1      0: sends chunk 3     1: sends chunk 0     2: sends chunk 1     3: sends chunk 2
        step 2      0: sends chunk 2     1: sends chunk 3     2: sends chunk 0     3: sends chunk 1
        step 3      0: sends chunk 1     1: sends chunk 2     2: sends chunk 3     3: sends chunk 0
        then        0: owns chunk 0      1: owns chunk 1      2: owns chunk 2      3: owns chunk 3

In the second half, the all-gather, the sums pass all ranks once more and are copied, not added. All links are busy
in all 2(N−1) steps, each with 1/N of the tensor, so no algorithm can move fewer bytes per rank. It takes one latency
per step: the ring is for large tensors, and for few ranks.
"""

from __future__ import annotations

import torch

from paceline.collectives.algorithms.messages import Combine, outgoing, split
from paceline.transport.channel import Channel


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leaves the sum of all ranks' `tensor` in each rank's `tensor`."""
    chunks = split(tensor, channel.size)
    reduce_scatter(channel, chunks, combine)
    all_gather(channel, chunks)


def reduce_scatter(channel: Channel, parts: list[torch.Tensor], combine: Combine) -> None:
    """Leaves the sum of all ranks' `parts[i]` in `parts[i]` of rank i; the other parts are overwritten."""
    before, after = _neighbours(channel)
    scratch = parts[0].new_empty(max(part.numel() for part in parts))
    for step in range(1, channel.size):
        leaving = parts[(channel.rank - step) % channel.size]
        growing = parts[(channel.rank - step - 1) % channel.size]
        arriving = scratch[: growing.numel()]
        with outgoing(channel) as send:
            send(after, leaving)
            channel.receive(before, arriving)
        combine(growing, arriving)


def all_gather(channel: Channel, parts: list[torch.Tensor]) -> None:
    """Fills in all `parts`, of which each rank has its own."""
    before, after = _neighbours(channel)
    for step in range(channel.size - 1):
        with outgoing(channel) as send:
            send(after, parts[(channel.rank - step) % channel.size])
            channel.receive(before, parts[(channel.rank - step - 1) % channel.size])


def broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> None:
    """Copies the root's `tensor` to all, along the ring.

    A rank forwards a chunk while the next one is arriving, which takes (N−1)(latency + 2S/(N·B)) instead of
    (N−1)(latency + S/B).
    """
    before, after = _neighbours(channel)
    with outgoing(channel) as send:
        for chunk in split(tensor, channel.size):
            if channel.rank != root:
                channel.receive(before, chunk)
            if after != root:
                send(after, chunk)


def reduce(channel: Channel, tensor: torch.Tensor, combine: Combine, root: int) -> None:
    """Leaves the sum of all ranks' `tensor` in the root's; the others keep theirs.

    Chunks pass along the ring as in the broadcast: the rank after the root begins, and each adds its own values.
    """
    before, after = _neighbours(channel)
    begins = channel.rank == (root + 1) % channel.size
    arriving = split(torch.empty_like(tensor), channel.size)
    with outgoing(channel) as send:
        for own, partial in zip(split(tensor, channel.size), arriving, strict=True):
            if not begins:
                channel.receive(before, partial)
                combine(partial, own)
            total = own if begins else partial
            if channel.rank == root:
                own.copy_(total)
            else:
                send(after, total)


def _neighbours(channel: Channel) -> tuple[int, int]:
    return (channel.rank - 1) % channel.size, (channel.rank + 1) % channel.size
