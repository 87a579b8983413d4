"""The time of an exchange: latencies on its longest path, and bytes through its busiest port.

N ranks hold S bytes each. A message takes the link's latency plus its bytes over the bandwidth B. A rank sends one
message at a time and receives one at a time, both at once. Adding takes no time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from paceline.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Link:
    """A full-duplex link between one machine and all others."""

    latency: float = 0.0
    """Seconds per message."""
    bandwidth: float = math.inf
    """Bytes per second, each way."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise UsageError(f"the latency is {self.latency:g} s; it must be 0 or more")
        if not self.bandwidth > 0:
            raise UsageError(f"the bandwidth is {self.bandwidth:g} bytes/s; it must be above 0")


class ExchangeCost(NamedTuple):
    """The cost of an exchange of S bytes, independent of S and of the link."""

    latencies: float
    """Messages that follow each other on the longest path."""
    volume: float
    """Bytes that follow each other on that path, in units of S."""

    def seconds(self, size: float, link: Link) -> float:
        """Seconds that an exchange of `size` bytes takes."""
        return self.latencies * link.latency + self.volume * (size / link.bandwidth)


def lower_bound(ranks: int, size: float, bandwidth: float) -> float:
    """Seconds below which no all-reduce can be: each rank must send and receive this much (Patarasuk and Yuan)."""
    return 2 * (ranks - 1) / ranks * size / bandwidth


def textbook_tree(ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce up and down one binary tree with one message per level, not pipelined.

    No topology here is this tree: `tree` is a double binary tree, see `paceline.topologies.tree`.
    """
    levels = (ranks - 1).bit_length()  # ceil(log2 N)
    return ExchangeCost(2 * levels, 2 * levels).seconds(size, link)


def sharded_servers(workers: int, servers: int, size: float, link: Link) -> float:
    """Seconds of push and pull, with the parameters in equal shards on machines without workers.

    The bottleneck is the servers' links or, with more servers than workers, the workers' own. One server is the hub of
    textbooks, which is not one of the N ranks.
    """
    if servers < 1:
        raise UsageError(f"there are {servers} servers; there must be at least 1")
    return ExchangeCost(2, 2 * max(1.0, workers / servers)).seconds(size, link)


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
