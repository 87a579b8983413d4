"""Measures the links between machines, and chooses the order of a ring."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec
import torch

from paceline.topologies import Link, quickest
from paceline.transport.channel import Channel

_SIZES = (1 << 16, 1 << 20, 1 << 22)
"""Bytes of the probes, sent in turn until one takes long enough to be measured."""
_LONG = 0.02
"""Seconds that are long enough."""
_REPEATS, _CERTAIN = 3, 0.2
"""How often the last probe is sent, of which the quickest counts, and the seconds from which on once is enough."""
_PINGS, _MOST_BURSTS, _PINGING = 5, 20, 0.1
"""Pings of a burst, bursts, and the seconds after which there are no more. The quickest ping counts: on a busy machine
other processes delay most of them."""
_FEW = 8
"""Machines of which all orders are tried."""


class LinkRow(msgspec.Struct):
    """Measured links from one machine to each other."""

    latency: list[float]
    bandwidth: list[float]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class LinkMatrix(msgspec.Struct):
    """Measured links from each machine (row) to each other (column)."""

    latency: list[list[float]]
    """Seconds."""
    bandwidth: list[list[float]]
    """Bytes per second; infinite to itself."""

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> LinkMatrix:
        found = [msgspec.json.decode(row, type=LinkRow) for row in rows]
        for number, row in enumerate(found):
            row.bandwidth[number] = float("inf")  # which JSON does not know
        return cls([row.latency for row in found], [row.bandwidth for row in found])

    @property
    def size(self) -> int:
        return len(self.latency)

    def slowest(self, order: Sequence[int]) -> float:
        """The bandwidth of the slowest link of a ring."""
        return min(self.bandwidth[a][b] for a, b in ring_links(order))


def ring_links(order: Sequence[int]) -> list[tuple[int, int]]:
    """The links of a ring."""
    return list(itertools.pairwise([*order, order[0]]))


def best_order(links: LinkMatrix) -> list[int]:
    """The order of machines in which the slowest link of the ring is fastest; of several, that of the fastest links."""
    if links.size <= _FEW:
        rings = ([0, *rest] for rest in itertools.permutations(range(1, links.size)))
        return max(rings, key=lambda ring: _worth(links, ring))
    candidates = [_greedy(links, start) for start in range(links.size)]
    best = max(candidates, key=lambda ring: _worth(links, ring))
    start = best.index(0)
    return [*best[start:], *best[:start]]


def _worth(links: LinkMatrix, ring: Sequence[int]) -> tuple[float, float]:
    # Links of about the same speed count as equal, so that noise does not decide.
    slowest = round(links.slowest(ring), -int(len(str(int(links.slowest(ring)))) - 1))
    return slowest, -sum(1.0 / links.bandwidth[a][b] for a, b in ring_links(ring))


def _greedy(links: LinkMatrix, start: int) -> list[int]:
    ring = [start]
    while len(ring) < links.size:
        rest = [other for other in range(links.size) if other not in ring]
        ring.append(max(rest, key=lambda other: links.bandwidth[ring[-1]][other]))
    return ring


def best_topology(links: LinkMatrix, size: int) -> str:
    """The quickest topology for `size` bytes; the ring takes its best order, the others the slowest link."""
    latency = max(max(row) for row in links.latency)
    slowest = min(min(row) for row in links.bandwidth)
    ring = Link(latency, links.slowest(best_order(links)))
    return quickest(links.size, size, Link(latency, slowest), ring)


def measure(channel: Channel) -> LinkRow:
    """Measures the links from this member to the others, each while both ends use no other link."""
    size, rank = channel.size, channel.rank
    row = LinkRow([0.0] * size, [0.0] * size)
    for pairs in tournament(size):
        peer = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        if peer is None:
            continue
        for turn in (min(rank, peer), max(rank, peer)):
            if turn == rank:
                row.latency[peer], row.bandwidth[peer] = _ask(channel, peer)
            else:
                _answer(channel, peer)
    return row


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, in which every pair occurs once."""
    players: list[int | None] = list(range(size))
    if size % 2:
        players.append(None)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _ask(channel: Channel, peer: int) -> tuple[float, float]:
    since, latency = time.perf_counter(), float("inf")
    for _ in range(_MOST_BURSTS):
        latency = min(latency, _probe(channel, peer, 1, _PINGS) / 2)
        if time.perf_counter() - since > _PINGING:
            break
    seconds, size = 0.0, 0
    for size in _SIZES:
        seconds = _probe(channel, peer, size, 1) - latency
        if seconds > _LONG:
            break
    if seconds < _CERTAIN:
        seconds = min(seconds, _probe(channel, peer, size, _REPEATS - 1) - latency)
    channel.send(peer, torch.zeros(2)).wait()
    return latency, size / max(1e-9, seconds)


def _probe(channel: Channel, peer: int, size: int, count: int) -> float:
    """Seconds until so many bytes have been sent and answered: the shortest of several."""
    word, data, best = torch.zeros(1), torch.zeros(size, dtype=torch.uint8), float("inf")
    channel.send(peer, torch.tensor([float(size), float(count)])).wait()
    for _ in range(count):
        start = time.perf_counter()
        channel.send(peer, data).wait()
        channel.receive(peer, word)
        best = min(best, time.perf_counter() - start)
    return best


def _answer(channel: Channel, peer: int) -> None:
    """Answers probes, which are announced with their size and number, until one of no bytes is."""
    word, announced = torch.zeros(1), torch.zeros(2)
    while True:
        channel.receive(peer, announced)
        size, count = map(int, announced.tolist())
        if not size:
            return
        for _ in range(count):
            channel.receive(peer, torch.empty(size, dtype=torch.uint8))
            channel.send(peer, word).wait()
