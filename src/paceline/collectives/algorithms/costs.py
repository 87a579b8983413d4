"""What the algorithms take, by formula: the time of an all-reduce, and the traffic of each rank.

N ranks each have S bytes; a message takes a latency and its bytes over the bandwidth B; a rank sends one message at a
time and receives one at a time, both at once. Adding costs nothing.

| topology | time |
|---|---|
| ring | 2(N−1)(latency + S/(N·B)) |
| tree | 2·floor(log2 N)(latency + S/B) − S/B, or without the − S/B if N + 1 is a power of two |
| halving-doubling | 2·log2 P·latency + 2(P−1)/P·S/B, and 2(latency + S/B) if P, the power of two within N, is not N |
| hub | 2·latency + 2(N−1)·S/B |
| direct | 2·latency + 2(N−1)/N·S/B |

One rank alone needs no time. The formulas are exact where all chunks are of one length; where they are not, a message
may be one element longer.

The tree of textbooks is a single one in which a rank has one child more per level: a message of S bytes in each of
ceil(log2 N) levels, both ways (`single_tree`). Here a level is two messages of half the size that a parent takes one
after the other, so a level costs the same latency + S/B. But a binary tree of N ranks has only floor(log2 N) levels
below its top, and unless all of them are full, the longest way has one message less to wait for, up and down: S/(2B)
each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from paceline.collectives.algorithms import halving_doubling, tree
from paceline.collectives.algorithms.chunks import bounds
from paceline.errors import UsageError
from paceline.transport.channel import LinkCost, Traffic


def seconds(topology: str, size: int, bytes: float, link: LinkCost) -> float:
    """The time of an all-reduce of `bytes` over `size` ranks."""
    latency, whole = link.latency, bytes / link.bandwidth
    levels = size.bit_length() - 1  # floor(log2 N)
    power = 1 << levels
    match topology:
        case "ring":
            return 2 * (size - 1) * (latency + whole / size)
        case "tree":
            is_full = size == 2 * power - 1
            return 2 * levels * (latency + whole) - (0.0 if is_full else whole)
        case "halving-doubling":
            guests = 0.0 if size == power else 2 * (latency + whole)
            return guests + 2 * levels * latency + 2 * (power - 1) / power * whole
        case "hub":
            return 2 * latency + 2 * (size - 1) * whole if size > 1 else 0.0
        case "direct":
            return 2 * latency + 2 * (size - 1) / size * whole if size > 1 else 0.0
    raise _unknown(topology)


def bound(size: int, bytes: float, bandwidth: float) -> float:
    """No all-reduce is faster: each rank must send and receive this much (Patarasuk and Yuan)."""
    return 2 * (size - 1) / size * bytes / bandwidth


def single_tree(size: int, bytes: float, link: LinkCost) -> float:
    """The time of an all-reduce up and down one tree with one message per level, nothing pipelined."""
    return 2 * (size - 1).bit_length() * (link.latency + bytes / link.bandwidth)


def servers(workers: int, count: int, bytes: float, link: LinkCost) -> float:
    """The time of push and pull with parameters sharded over `count` machines in which no worker is.

    Either the servers' links are the bottleneck or, if there are more servers than workers, the workers' own.
    """
    return 2 * link.latency + 2 * max(1.0, workers / count) * bytes / link.bandwidth


class ServerShares(NamedTuple):
    """How many bytes of the parameters are served from each machine."""

    spare: float
    """By each machine without a worker."""
    busy: float
    """By each machine with one."""


def best_shares(workers: int, spare: int, bytes: float) -> ServerShares:
    """Shares that load all links alike, with one worker per machine and `spare` machines besides (BytePS).

    A worker's machine also moves that worker's gradients, so it serves less than a spare one, and nothing once there
    are as many spare machines as workers.
    """
    if workers == 1:
        return ServerShares(0.0, bytes)
    if spare >= workers:
        return ServerShares(bytes / spare, 0.0)
    whole = workers**2 + spare * workers - 2 * spare
    return ServerShares(2 * (workers - 1) * bytes / whole, (workers - spare) * bytes / whole)


def best_servers(workers: int, spare: int, bytes: float, bandwidth: float) -> float:
    """The time of push and pull under `best_shares`, latency left out: from the bound of all-reduce down to S/B."""
    if workers == 1:
        return 0.0
    helpful = min(spare, workers)  # beyond that the workers' own links are the bottleneck
    whole = workers**2 + helpful * workers - 2 * helpful
    return 2 * workers * (workers - 1) / whole * bytes / bandwidth


def traffic(topology: str, rank: int, size: int, bytes: int, *, itemsize: int = 1) -> Traffic:
    """What a rank sends and receives in an all-reduce of `bytes`, in elements of `itemsize` (rank 0 is the hub)."""
    length = bytes // itemsize
    match topology:
        case "ring":
            chunks = _chunks(length, size)
            own, before, after = chunks[rank], chunks[rank - 1], chunks[(rank + 1) % size]
            # Each half of the algorithm leaves out one chunk: the one that stays here, or that is there already.
            return _traffic(2 * (size - 1), 2 * length - own - after, itemsize, 2 * length - own - before)
        case "tree":
            return _traffic(*_tree(rank, size, length), itemsize)
        case "halving-doubling":
            return _traffic(*_halving_doubling(rank, size, length), itemsize)
        case "hub":
            messages = size - 1 if rank == 0 else 1
            return _traffic(messages, messages * length, itemsize)
        case "direct":
            own = _chunks(length, size)[rank]
            return _traffic(2 * (size - 1), length - own + (size - 1) * own, itemsize)
    raise _unknown(topology)


def _tree(rank: int, size: int, length: int) -> tuple[int, int]:
    """Messages and elements, as many sent as received: one with each neighbour in each tree, both ways."""
    messages = elements = 0
    for which, half in enumerate(_chunks(length, len(tree.TREES))):
        parent, children = tree.place(which, rank, size)
        neighbours = len(children) + (parent is not None)
        messages, elements = messages + neighbours, elements + neighbours * half
    return messages, elements


def _halving_doubling(rank: int, size: int, length: int) -> tuple[int, int]:
    """Messages and elements, as many sent as received."""
    power = halving_doubling.hosts(size)
    if rank >= power:
        return 1, length
    edges, rounds = bounds(length, power), halving_doubling.rounds(rank, power)
    # What is given on the way down is taken on the way up, so a round moves, in all, the range that it divides.
    divided = sum(edges[max(kept + given)] - edges[min(kept + given)] for _, kept, given in rounds)
    guests = int(rank + power < size)
    return 2 * len(rounds) + guests, divided + guests * length


def _traffic(messages: int, sent: int, itemsize: int, received: int | None = None) -> Traffic:
    received = sent if received is None else received
    return Traffic(messages, sent * itemsize, messages, received * itemsize)


def _chunks(length: int, count: int) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds(length, count))]


def _unknown(topology: str) -> UsageError:
    return UsageError(
        f"there is no formula for the topology {topology!r}; there are ring, tree, halving-doubling, hub, direct"
    )
