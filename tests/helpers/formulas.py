"""Formulas that collectives are checked against: messages of each rank, bounds, and exchanges of the literature."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.topologies import ExchangeCost, Link, Traffic
from paceline.topologies.chunks import bounds
from paceline.topologies.halving_doubling import hosts, rounds
from paceline.topologies.tree import TREES, place


def lengths(length: int, count: int) -> list[int]:
    """The length of each of `count` chunks of `length` elements."""
    return [stop - start for start, stop in pairwise(bounds(length, count))]


def both_ways(messages: int, elements: int) -> Traffic:
    """As much sent as received."""
    return Traffic(messages, elements, messages, elements)


def ring(rank: int, size: int, length: int) -> Traffic:
    """A rank of the ring, in elements."""
    chunks = lengths(length, size)
    own, before, after = chunks[rank], chunks[rank - 1], chunks[(rank + 1) % size]
    # Each half of the algorithm leaves out one chunk: the one that stays here, or the one that is here already.
    return Traffic(2 * (size - 1), 2 * length - own - after, 2 * (size - 1), 2 * length - own - before)


def tree(rank: int, size: int, length: int) -> Traffic:
    """A rank of the trees, in elements: one message with each neighbour in each tree, both ways."""
    messages = elements = 0
    for which, half in zip(TREES, lengths(length, len(TREES)), strict=True):
        parent, children = place(which, rank, size)
        neighbours = len(children) + (parent is not None)
        messages, elements = messages + neighbours, elements + neighbours * half
    return both_ways(messages, elements)


def halving_doubling(rank: int, size: int, length: int) -> Traffic:
    """A host or a guest, in elements."""
    power = hosts(size)
    if rank >= power:
        return both_ways(1, length)
    edges, exchanges = bounds(length, power), rounds(rank, power)
    # Chunks that are sent while halving are received while doubling, so in all a round moves the range that it divides.
    divided = sum(edges[max(kept + given)] - edges[min(kept + given)] for _, kept, given in exchanges)
    guests = int(rank + power < size)
    return both_ways(2 * len(exchanges) + guests, divided + guests * length)


def hub(rank: int, size: int, length: int) -> Traffic:
    """The hub, rank 0, or another rank, in elements."""
    messages = size - 1 if rank == 0 else 1
    return both_ways(messages, messages * length)


def direct(rank: int, size: int, length: int) -> Traffic:
    """A rank of the direct exchange, in elements."""
    own = lengths(length, size)[rank]
    return both_ways(2 * (size - 1), length - own + (size - 1) * own)


COUNTS: dict[str, Callable[[int, int, int], Traffic]] = {
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "hub": hub,
    "direct": direct,
}
"""The traffic of a rank in an all-reduce, by rank, number of ranks and elements."""


def traffic(topology: str, rank: int, ranks: int, size: int, *, itemsize: int = 1) -> Traffic:
    """The traffic of a rank in an all-reduce of `size` bytes, in elements of `itemsize` bytes; rank 0 is the hub."""
    if topology not in COUNTS:
        raise UsageError(f"there is no message count for the topology {topology!r}; there are {', '.join(COUNTS)}")
    counted = COUNTS[topology](rank, ranks, size // itemsize)
    return Traffic(counted.sent, counted.bytes_sent * itemsize, counted.received, counted.bytes_received * itemsize)


def lower_bound(ranks: int, size: float, bandwidth: float) -> float:
    """Seconds below which no all-reduce can be: each rank must send and receive this much (Patarasuk and Yuan)."""
    return 2 * (ranks - 1) / ranks * size / bandwidth


def textbook_tree(ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce up and down one binary tree with one message per level, not pipelined."""
    levels = (ranks - 1).bit_length()  # ceil(log2 N)
    return ExchangeCost(2 * levels, 2 * levels).seconds(size, link)


class ServerShares(NamedTuple):
    """Bytes of the parameters that each machine serves."""

    spare: float
    """By each machine without a worker."""
    busy: float
    """By each machine with one."""


def byteps_shares(workers: int, spare: int, size: float) -> ServerShares:
    """The shares that load all links alike, with one worker per machine and `spare` machines besides (BytePS).

    A worker's machine also moves that worker's gradients, so it serves less than a spare one, and nothing once there
    are as many spare machines as workers.
    """
    if workers == 1:
        return ServerShares(0.0, size)
    if spare >= workers:
        return ServerShares(size / spare, 0.0)
    whole = workers**2 + spare * workers - 2 * spare
    return ServerShares(2 * (workers - 1) * size / whole, (workers - spare) * size / whole)


def byteps_seconds(workers: int, spare: int, size: float, bandwidth: float) -> float:
    """Seconds of push and pull under `byteps_shares` without latency: from all-reduce's lower bound down to S/B."""
    if workers == 1:
        return 0.0
    helpful = min(spare, workers)  # with more, the workers' own links are the bottleneck
    whole = workers**2 + helpful * workers - 2 * helpful
    return 2 * workers * (workers - 1) / whole * size / bandwidth
