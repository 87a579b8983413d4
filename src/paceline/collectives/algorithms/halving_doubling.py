"""Collectives by recursive halving and doubling: partners at half the distance exchange half as much, and back again.

`paceline.topologies.halving_doubling` draws the exchanges. If the number of ranks N is not a power of two, the ranks
from the largest power of two within N on are guests: each sends its tensor to a host and receives the result from it.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from paceline.collectives.algorithms.messages import Combine, outgoing
from paceline.topologies.chunks import bounds
from paceline.topologies.halving_doubling import hosts, rounds
from paceline.transport.channel import Channel


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Leaves the sum of all ranks' `tensor` in each rank's `tensor`."""
    host, guest = _pair(channel)
    if host is not None:
        channel.send(host, tensor).wait()
        channel.receive(host, tensor)
        return
    edges = bounds(tensor.numel(), hosts(channel.size))
    if guest is not None:
        _add(channel, guest, tensor, combine)
    _halve(channel, tensor, edges, combine)
    _double(channel, tensor, edges)
    if guest is not None:
        channel.send(guest, tensor).wait()


def reduce_scatter(channel: Channel, parts: list[torch.Tensor], combine: Combine) -> None:
    """Leaves the sum of all ranks' `parts[i]` in `parts[i]` of rank i; the other parts are overwritten."""
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
        channel.send(guest, views[guest]).wait()


def all_gather(channel: Channel, parts: list[torch.Tensor]) -> None:
    """Fills in all `parts`, of which each rank has its own."""
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
    """Between the hosts: leaves the sum of chunk i at rank i."""
    for peer, kept, given in rounds(channel.rank, hosts(channel.size)):
        own = flat[edges[kept[0]] : edges[kept[1]]]
        arriving = torch.empty_like(own)
        with outgoing(channel) as send:
            send(peer, flat[edges[given[0]] : edges[given[1]]])
            channel.receive(peer, arriving)
        combine(own, arriving)


def _double(channel: Channel, flat: torch.Tensor, edges: list[int]) -> None:
    """Between the hosts: copies chunk i of rank i to all, by the same exchanges in reverse."""
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
    """All parts in one tensor, a view of each part in it, and the bounds of each host's chunk.

    A message is contiguous, so parts must be in the order of the hosts, and a guest's part next to its host's.
    """
    count = hosts(len(parts))
    order = [rank for host in range(count) for rank in range(host, len(parts), count)]
    flat = torch.cat([parts[rank] for rank in order])
    stops = list(accumulate(parts[rank].numel() for rank in order))
    views = {rank: flat[stop - parts[rank].numel() : stop] for rank, stop in zip(order, stops, strict=True)}
    chunks = [sum(part.numel() for part in parts[host::count]) for host in range(count)]
    return flat, views, list(accumulate(chunks, initial=0))
