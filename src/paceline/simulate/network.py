"""Networks of a simulation: every port transfers one message after the other."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from paceline.config import parse_servers
from paceline.simulate.cluster import SimulatedCluster


@dataclasses.dataclass(slots=True)
class Port:
    """One direction of a machine's link; messages queue while it is busy."""

    bandwidth: float
    free: float = 0.0
    bytes: float = 0.0

    def take(self, now: float, size: float) -> float:
        """Queues a message of `size` bytes; returns the time at which it has passed."""
        self.bytes += size
        self.free = max(self.free, now) + size / self.bandwidth
        return self.free


class SimulatedNetwork(ABC):
    """The times at which gradients arrive at the server and versions at the workers."""

    @abstractmethod
    def push(self, rank: int, now: float, ready: float) -> float:
        """The arrival time of a gradient that a worker begins to send `now` and has computed by `ready`."""

    @abstractmethod
    def pull(self, ranks: Sequence[int], now: float, new: Sequence[bool]) -> list[float]:
        """The times at which workers that are released `now` have their version; `new` ones are sent.

        Versions that are sent at once share the ports, so all arrive with the last one.
        """

    @abstractmethod
    def traffic(self) -> dict[str, list[float]]:
        """Bytes through every port, by direction."""


class ServerNetwork(SimulatedNetwork):
    """A parameter server in equal shards, on separate machines or on the workers'.

    A message has arrived when it has passed all ports on its path, each at its own bandwidth: the shards of a message
    pass the servers' ports in parallel, and so do the two ends of a link.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        links = cluster.machine_links()
        self._machine = [rank // cluster.per_machine for rank in range(cluster.workers)]
        self._out = [Port(link.bandwidth) for link in links]
        self._in = [Port(link.bandwidth) for link in links]
        where = parse_servers(cluster.servers)
        own = cluster.server_link or cluster.link
        self._apart = isinstance(where, int)
        self._pushed, self._size = cluster.pushed, cluster.size
        if isinstance(where, int):
            # Shards are equal, so the servers' ports are busy alike: they act as one port of their total bandwidth.
            self._server_in, self._server_out = Port(where * own.bandwidth), Port(where * own.bandwidth)
            self._server_machine, far = -1, 1.0
        elif where == "lead":
            own = links[0]
            self._server_in, self._server_out = self._in[0], self._out[0]
            self._server_machine, far = 0, 1.0
        else:
            # Every machine has a shard; the slowest port is the bottleneck.
            own = cluster.narrowest()
            wide = len(links) * own.bandwidth
            self._server_in, self._server_out = Port(wide), Port(wide)
            self._server_machine, far = -1, 1.0 - 1.0 / len(links)
        self._far = far
        """The share of a message that leaves its machine."""
        # A message passes both links, and pays the larger latency once.
        slow = dict(cluster.links)
        self._latency = [max(slow.get(rank, cluster.link).latency, own.latency) for rank in range(cluster.workers)]

    def push(self, rank: int, now: float, ready: float) -> float:
        machine = self._machine[rank]
        if machine == self._server_machine:
            return ready
        size = self._pushed * self._far
        through = max(self._out[machine].take(now, size), self._server_in.take(now, size))
        return max(through, ready) + self._latency[rank]

    def pull(self, ranks: Sequence[int], now: float, new: Sequence[bool]) -> list[float]:
        size = self._size * self._far
        if len(ranks) == 1:  # the common case, without the general code's overhead
            machine = self._machine[ranks[0]]
            if machine == self._server_machine:
                return [now]
            if new[0]:
                now = max(self._in[machine].take(now, size), self._server_out.take(now, size))
            return [now + self._latency[ranks[0]]]
        sent = [fresh and self._machine[rank] != self._server_machine for rank, fresh in zip(ranks, new, strict=True)]
        through = self._server_out.take(now, size * sum(sent)) if any(sent) else now
        into = Counter(self._machine[rank] for rank, some in zip(ranks, sent, strict=True) if some)
        here = {machine: self._in[machine].take(now, size * count) for machine, count in into.items()}
        ends = []
        for rank, some in zip(ranks, sent, strict=True):
            machine = self._machine[rank]
            if machine == self._server_machine:
                ends.append(now)
            else:
                ends.append((max(here[machine], through) if some else now) + self._latency[rank])
        return ends

    def traffic(self) -> dict[str, list[float]]:
        found = {"out": [port.bytes for port in self._out], "in": [port.bytes for port in self._in]}
        if self._apart:
            found |= {"server_in": [self._server_in.bytes], "server_out": [self._server_out.bytes]}
        return found


class CollectiveNetwork(SimulatedNetwork):
    """An all-reduce of a fixed time, from when the last worker has something to send."""

    def __init__(self, workers: int, seconds: float, size: float) -> None:
        self._workers, self._seconds, self._size = workers, seconds, size
        self._last = 0.0
        self._bytes = [0.0] * workers

    def push(self, rank: int, now: float, ready: float) -> float:
        self._last = max(self._last, now)
        return ready

    def pull(self, ranks: Sequence[int], now: float, new: Sequence[bool]) -> list[float]:
        for rank in ranks:
            self._bytes[rank] += 2 * (self._workers - 1) / self._workers * self._size
        return [max(now, self._last + self._seconds)] * len(ranks)

    def traffic(self) -> dict[str, list[float]]:
        return {"out": list(self._bytes), "in": list(self._bytes)}
