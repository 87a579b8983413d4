"""The time of an exchange: latencies on its longest path, and bytes through its busiest port.

N ranks hold S bytes each. A message takes the link's latency plus its bytes over the bandwidth B. A rank sends one
message at a time and receives one at a time, both at once. Adding takes no time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import msgspec

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


def sharded_servers(workers: int, servers: int, size: float, link: Link) -> float:
    """Seconds of push and pull, with the parameters in equal shards on machines without workers.

    The bottleneck is the servers' links or, with more servers than workers, the workers' own. One server is the hub of
    textbooks, which is not one of the N ranks.
    """
    if servers < 1:
        raise UsageError(f"there are {servers} servers; there must be at least 1")
    return ExchangeCost(2, 2 * max(1.0, workers / servers)).seconds(size, link)


class Traffic(msgspec.Struct):
    """Messages and bytes that one rank has sent and received."""

    sent: int = 0
    """Messages."""
    bytes_sent: int = 0
    received: int = 0
    """Messages."""
    bytes_received: int = 0
