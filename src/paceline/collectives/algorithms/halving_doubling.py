"""Recursive halving and doubling: partners at half the distance exchange half as much, then all of it in reverse.

        chunks that eight ranks' partial sums cover, as rank 2 sees it

        begin            0 1 2 3 4 5 6 7
        with rank 6      0 1 2 3            gives 4–7, takes 6's 0–3 and adds
        with rank 0          2 3            gives 0–1, takes 0's 2–3 and adds
        with rank 3          2              gives 3, takes 3's 2 and adds: this is the sum of all eight
        with rank 3          2 3            the way back: the same partners, sums are copied instead of added
        with rank 0      0 1 2 3
        with rank 6      0 1 2 3 4 5 6 7

Going down is a reduce-scatter, going up an all-gather. For a power of two this takes only 2·log2 N messages per rank,
and the S/2 + S/4 + … + S/N bytes each way are 2(N−1)/N·S in all, as few as the ring's.

Other numbers of ranks: let P be the largest power of two within N. Rank P + i is a guest of rank i: it first hands its
tensor to its host, which adds it, and it gets the result back at the end. The P hosts do as above. This costs two more
messages of the whole tensor, one before and one after: 2(latency + S/B) in an all-reduce.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from paceline.collectives.algorithms.chunks import bounds
from paceline.collectives.algorithms.messages import Combine, outgoing
from paceline.transport.channel import Channel


class ExchangeRound(NamedTuple):
    """One exchange on the way down; ranges of chunks are given as first, last + 1."""

    peer: int
    kept: tuple[int, int]
    given: tuple[int, int]


def hosts(size: int) -> int:
    """The largest power of two within `size`: the ranks from there on are guests."""
    return 1 << (size.bit_length() - 1)


def rounds(rank: int, count: int) -> list[ExchangeRound]:
    """The exchanges of a rank on the way down, when `count` (a power of two) ranks take part."""
    found = []
    first, last = 0, count
    while last - first > 1:
        middle = (first + last) // 2
        lower, upper = (first, middle), (middle, last)
        kept, given = (lower, upper) if rank < middle else (upper, lower)
        found.append(ExchangeRound(rank ^ (middle - first), kept, given))
        first, last = kept
    return found


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leave the sum of everybody's `tensor` in everybody's `tensor`."""
    host, guest = _pair(channel)
    if host is not None:
        with outgoing(channel) as send:
            send(host, tensor)
        channel.receive(host, tensor)
        return
    edges = bounds(tensor.numel(), hosts(channel.size))
    if guest is not None:
        _add(channel, guest, tensor, combine)
    _halve(channel, tensor, edges, combine)
    _double(channel, tensor, edges)
    if guest is not None:
        with outgoing(channel) as send:
            send(guest, tensor)


def reduce_scatter(channel: Channel, parts: list[torch.Tensor], combine: Combine) -> None:
    """Leave the sum of everybody's `parts[i]` in `parts[i]` of rank i; the other parts are scratch afterwards."""
    host, guest = _pair(channel)
    flat, views, edges = _join(parts)
    if host is not None:
        with outgoing(channel) as send:
            send(host, flat)
            channel.receive(host, parts[channel.rank])
        return
    if guest is not None:
        _add(channel, guest, flat, combine)
    _halve(channel, flat, edges, combine)
    parts[channel.rank].copy_(views[channel.rank])
    if guest is not None:
        with outgoing(channel) as send:
            send(guest, views[guest])


def all_gather(channel: Channel, parts: list[torch.Tensor]) -> None:
    """Fill in all `parts`, of which each rank has its own."""
    host, guest = _pair(channel)
    flat, views, edges = _join(parts)
    with outgoing(channel) as send:
        if host is not None:
            send(host, parts[channel.rank])
            channel.receive(host, flat)
        if guest is not None:
            channel.receive(guest, views[guest])
        if host is None:
            _double(channel, flat, edges)
        if guest is not None:
            send(guest, flat)
    for rank, part in enumerate(parts):
        if rank != channel.rank:
            part.copy_(views[rank])


def _halve(channel: Channel, flat: torch.Tensor, edges: list[int], combine: Combine) -> None:
    """Between the hosts: the sum of chunk i comes to rank i."""
    for peer, kept, given in rounds(channel.rank, hosts(channel.size)):
        own = flat[edges[kept[0]] : edges[kept[1]]]
        arriving = torch.empty_like(own)
        with outgoing(channel) as send:
            send(peer, flat[edges[given[0]] : edges[given[1]]])
            channel.receive(peer, arriving)
        combine(own, arriving)


def _double(channel: Channel, flat: torch.Tensor, edges: list[int]) -> None:
    """Between the hosts: chunk i of rank i comes to all, by the same exchanges in reverse."""
    for peer, kept, given in reversed(rounds(channel.rank, hosts(channel.size))):
        with outgoing(channel) as send:
            send(peer, flat[edges[kept[0]] : edges[kept[1]]])
            channel.receive(peer, flat[edges[given[0]] : edges[given[1]]])


def _add(channel: Channel, guest: int, tensor: torch.Tensor, combine: Combine) -> None:
    arriving = torch.empty_like(tensor)
    channel.receive(guest, arriving)
    combine(tensor, arriving)


def _pair(channel: Channel) -> tuple[int | None, int | None]:
    """The host of this rank if it is a guest, and the guest of this rank if it is a host."""
    rank, count = channel.rank, hosts(channel.size)
    return (rank - count if rank >= count else None), (rank + count if rank + count < channel.size else None)


def _join(parts: list[torch.Tensor]) -> tuple[torch.Tensor, dict[int, torch.Tensor], list[int]]:
    """All parts in one tensor, where each lies in it, and where each host's chunk begins.

    A message is one stretch of memory, so neighbouring parts must lie side by side, and a guest's part with its host's.
    """
    count = hosts(len(parts))
    order = [rank for host in range(count) for rank in range(host, len(parts), count)]
    flat = torch.cat([parts[rank] for rank in order])
    stops = list(accumulate(parts[rank].numel() for rank in order))
    views = {rank: flat[stop - parts[rank].numel() : stop] for rank, stop in zip(order, stops, strict=True)}
    chunks = [sum(part.numel() for part in parts[host::count]) for host in range(count)]
    return flat, views, list(accumulate(chunks, initial=0))
