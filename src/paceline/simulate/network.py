"""The way of gradients and versions between machines: every port serves one message after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from paceline.config import parse_servers
from paceline.simulate.cluster import SimulatedCluster


class Port:
    """One direction of a machine's link. What comes while it is busy queues."""

    __slots__ = ("bandwidth", "bytes", "free")

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.free = 0.0
        self.bytes = 0.0

    def take(self, now: float, size: float) -> float:
        """When a message of so many bytes is through."""
        self.bytes += size
        self.free = max(self.free, now) + size / self.bandwidth
        return self.free


class SimulatedNetwork(ABC):
    """How long it takes until a gradient is there, and until a worker has its next version."""

    @abstractmethod
    def push(self, rank: int, now: float, ready: float) -> float:
        """A worker sends from now, and has all of its gradient when it is ready: when it has arrived."""

    @abstractmethod
    def pull(self, ranks: Sequence[int], now: float, new: Sequence[bool]) -> list[float]:
        """Workers are let go, with another version if it is a new one: when each has it.

        What is sent at once shares the ports on its way, so all have it when the last one does.
        """

    def traffic(self) -> dict[str, list[float]]:
        """Bytes through every port."""
        return {}


class Nothing(SimulatedNetwork):
    """Messages cost nothing."""

    def push(self, rank: int, now: float, ready: float) -> float:
        return ready

    def pull(self, ranks: Sequence[int], now: float, new: Sequence[bool]) -> list[float]:
        return [now] * len(ranks)


class Served(SimulatedNetwork):
    """A parameter server, in equal shards, on machines of its own or on the workers'.

    A message is through once all ports on its way are, each at its own pace: the shards of one message go through the
    servers' ports side by side, and so do the two ends of a link.
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
            # Shards are equal, so ports of equal width are busy alike: as one that is so much wider.
            self._server_in, self._server_out = Port(where * own.bandwidth), Port(where * own.bandwidth)
            self._home, far = -1, 1.0
        elif where == "lead":
            own = links[0]
            self._server_in, self._server_out = self._in[0], self._out[0]
            self._home, far = 0, 1.0
        else:
            # Every machine has a shard; the slowest one's port is the one that counts.
            own = cluster.narrowest()
            wide = len(links) * own.bandwidth
            self._server_in, self._server_out = Port(wide), Port(wide)
            self._home, far = -1, 1.0 - 1.0 / len(links)
        self._far = far
        """Of a message, the share that leaves its machine."""
        # Everything goes over both links, as one message.
        slow = dict(cluster.links)
        self._latency = [max(slow.get(rank, cluster.link).latency, own.latency) for rank in range(cluster.workers)]

    def push(self, rank: int, now: float, ready: float) -> float:
        machine = self._machine[rank]
        if machine == self._home:
            return ready
        size = self._pushed * self._far
        through = max(self._out[machine].take(now, size), self._server_in.take(now, size))
        return max(through, ready) + self._latency[rank]

    def pull(self, ranks: Sequence[int], now: float, new: Sequence[bool]) -> list[float]:
        size = self._size * self._far
        if len(ranks) == 1:  # as it mostly is; the rest would say the same, but take longer
            machine = self._machine[ranks[0]]
            if machine == self._home:
                return [now]
            if new[0]:
                now = max(self._in[machine].take(now, size), self._server_out.take(now, size))
            return [now + self._latency[ranks[0]]]
        sent = [fresh and self._machine[rank] != self._home for rank, fresh in zip(ranks, new, strict=True)]
        through = self._server_out.take(now, size * sum(sent)) if any(sent) else now
        into = Counter(self._machine[rank] for rank, some in zip(ranks, sent, strict=True) if some)
        here = {machine: self._in[machine].take(now, size * count) for machine, count in into.items()}
        ends = []
        for rank, some in zip(ranks, sent, strict=True):
            machine = self._machine[rank]
            if machine == self._home:
                ends.append(now)
            else:
                ends.append((max(here[machine], through) if some else now) + self._latency[rank])
        return ends

    def traffic(self) -> dict[str, list[float]]:
        told = {"out": [port.bytes for port in self._out], "in": [port.bytes for port in self._in]}
        if self._apart:
            told |= {"server_in": [self._server_in.bytes], "server_out": [self._server_out.bytes]}
        return told


class Collective(SimulatedNetwork):
    """An all-reduce: from when the last worker has something to send, so many seconds."""

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
