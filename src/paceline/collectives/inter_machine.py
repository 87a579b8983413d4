"""All-reduce between machines of the sums that each has made in its shared memory.

A machine's flat buffers are divided among its workers. Where all machines have as many workers, those in the same place
own the same part on all of them and exchange it with each other: all at once, each byte once. Where they have not, the
buffers are cut at the borders of all machines' parts, and each segment is exchanged by its owners on the machines.

        machine 0    ├──── rank 0 ────┼──── rank 1 ────┤
        machine 1    ├─ rank 2 ─┼─ rank 3 ─┼─ rank 4 ──┤
        segments     ├──────────┼─────┼────┼───────────┤
"""

from __future__ import annotations

import datetime
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.cluster.membership import Members
from paceline.collectives import algorithms
from paceline.collectives.algorithms.messages import split
from paceline.collectives.gloo import open_gloo
from paceline.collectives.links import LinkMatrix, best_order, best_topology, measure
from paceline.errors import TeamTimeout, WorkerLost
from paceline.transport.channel import PendingSend
from paceline.transport.peer_memory import bytes_of

_PIECE = 1 << 20
"""Bytes of a message of the ring: while one is added, the next ones are on the connection."""
_AHEAD = 4
"""Messages that are awaited at a time."""
_TAG = 0x4000_0000


class ReduceSegment(NamedTuple):
    """A stretch of a flat buffer that has one owner on each machine."""

    flat: int
    start: int
    stop: int
    owners: list[int]
    """By machine, a rank."""


def segments(flat: int, bounds: Sequence[Sequence[int]], machines: Sequence[Sequence[int]]) -> list[ReduceSegment]:
    """Cuts a flat buffer at all borders. bounds: by machine, where its workers' parts begin, and the end."""
    cuts = sorted({cut for edges in bounds for cut in edges})
    found = []
    for start, stop in itertools.pairwise(cuts):
        owners = []
        for edges, ranks in zip(bounds, machines, strict=True):
            place = max(index for index in range(len(ranks)) if edges[index] <= start and edges[index + 1] >= stop)
            owners.append(ranks[place])
        found.append(ReduceSegment(flat, start, stop, owners))
    return found


class InterMachineReduce:
    """One worker's exchange with the owners of the same segments on other machines."""

    def __init__(
        self,
        members: Members,
        topology: str,
        left: Sequence[Sequence[int]] | None = None,
        order: list[int] | None = None,
    ) -> None:
        """left: by machine, the workers that are left of an elastic team, in which any worker may own any segment.

        order: of the machines around the ring, if it is known.
        """
        self._members, self.topology = members, topology
        machines = members.machines if left is None else left
        if left is not None:
            name, ranks = "left", [rank for here in machines for rank in here]
        elif len({len(ranks) for ranks in machines}) == 1:
            name = str(members.local.rank)
            ranks = [ranks[members.local.rank] for ranks in machines]
        else:
            name, ranks = "all", list(range(members.size))
        self._index = {rank: index for index, rank in enumerate(ranks)}
        timeouts = members.barrier.timeouts
        # A little less than a barrier's timeout: a worker reports a missing peer before others miss that worker.
        self._limit = datetime.timedelta(seconds=0.9 * timeouts.barrier)
        assert members.store is not None  # through which the machines found each other
        store = PrefixStore(f"between/{next(members.numbers)}/{name}", members.store)
        patience = datetime.timedelta(seconds=max(timeouts.join, timeouts.barrier))
        host = members.hosts[members.machine]
        self._gloo = open_gloo(store, self._index[members.rank], len(ranks), host, patience, self._limit)
        self.order = list(range(len(machines))) if order is None else order
        """The order of the machines around the ring."""
        self.links: LinkMatrix | None = None
        """The measured links; None if they were not measured."""
        if topology in ("auto", "ring") and len(machines) > 2 and order is None:
            # With two machines all orders are the same, and all topologies cost the same.
            self._measure()
        self._chosen: dict[int, str] = {}
        """By bytes, the topology."""
        self._scratch = torch.empty(_AHEAD * _PIECE, dtype=torch.uint8)

    def _measure(self) -> None:
        members = self._members
        leads = [ranks[0] for ranks in members.machines]
        own: bytes = b""
        if members.rank in leads:
            own = measure(_Owners(self, leads)).encode()
        rows = members.gather(own)
        self.links = LinkMatrix.of([rows[lead] for lead in leads])
        self.order = best_order(self.links)

    def all_reduce(self, tensor: torch.Tensor, owners: Sequence[int]) -> int:
        """Leaves the sum over all machines in `tensor`, flat and contiguous; returns the bytes received."""
        ring = [owners[machine] for machine in self.order]
        topology = self._choose(tensor.nbytes)
        channel = _Owners(self, ring)
        if topology == "ring":
            self._ring(tensor, channel)
        else:
            algorithms.find(topology, "all_reduce")(channel, tensor, torch.Tensor.add_)
        return channel.received

    def _choose(self, size: int) -> str:
        if self.topology != "auto":
            return self.topology
        if self.links is None:
            return "ring"
        if size not in self._chosen:
            self._chosen[size] = best_topology(self.links, size)
        return self._chosen[size]

    def copy(self, tensor: torch.Tensor, source: int, takers: Sequence[int]) -> None:
        """Copies `source`'s values to `takers`."""
        channel = _Owners(self, [source, *takers])
        if channel.rank:
            channel.receive(0, tensor)
            return
        for sending in [channel.send(peer, tensor) for peer in range(1, channel.size)]:
            sending.wait()

    def _ring(self, tensor: torch.Tensor, channel: _Owners) -> None:
        """The topology `ring` in small messages, which are passed on as soon as they have come.

        In step s, part (rank − 1 − s) goes to the next one and part (rank − 2 − s) comes; half of the steps add.
        """
        size, rank = channel.size, channel.rank
        length = _PIECE // tensor.itemsize
        parts = [part.split(length) for part in split(tensor, size)]
        count = max(len(pieces) for pieces in parts)
        steps = 2 * (size - 1)
        before, after = (rank - 1) % size, (rank + 1) % size
        scratch = self._scratch.view(tensor.dtype).split(length)
        sending: deque[PendingSend] = deque()
        coming: deque[tuple[int, torch.Tensor, torch.Tensor, Any]] = deque()

        def piece(part: int, number: int) -> torch.Tensor | None:
            pieces = parts[part % size]
            return pieces[number] if number < len(pieces) and pieces[number].numel() else None

        for number in range(count):
            if (first := piece(rank - 1, number)) is not None:
                sending.append(channel.send(after, first))
        order = iter(range(steps * count))
        posted = 0
        while True:
            while len(coming) < _AHEAD and (turn := next(order, None)) is not None:
                step, number = divmod(turn, count)
                if (home := piece(rank - 2 - step, number)) is None:
                    continue
                target = home
                if step < size - 1:
                    target = scratch[posted % _AHEAD][: home.numel()]
                    posted += 1
                coming.append((step, home, target, channel.post(before, target)))
            if not coming:
                break
            step, home, target, work = coming.popleft()
            channel.wait(work, before, target)
            if target is not home:
                home.add_(target)
            if step + 1 < steps:
                sending.append(channel.send(after, home))
        for message in sending:
            message.wait()


class _Owners:
    """A channel between some of the workers, renumbered."""

    def __init__(self, between: InterMachineReduce, ranks: list[int]) -> None:
        self._between, self._ranks = between, ranks
        self.rank, self.size = ranks.index(between._members.rank), len(ranks)
        self.received = 0

    def send(self, peer: int, tensor: torch.Tensor) -> PendingSend:
        between, rank = self._between, self._ranks[peer]
        try:
            work = between._gloo.send([bytes_of(tensor)], between._index[rank], _TAG)
        except RuntimeError as error:
            self._blame(peer, error)
        return _Message(self, peer, work, tensor)

    def post(self, peer: int, tensor: torch.Tensor) -> Any:
        """Begins to receive."""
        between, rank = self._between, self._ranks[peer]
        try:
            return between._gloo.recv([bytes_of(tensor)], between._index[rank], _TAG)
        except RuntimeError as error:
            self._blame(peer, error)

    def wait(self, work: Any, peer: int, tensor: torch.Tensor) -> None:
        """Waits until a message has come."""
        try:
            work.wait(self._between._limit)
        except RuntimeError as error:
            self._blame(peer, error)
        self.received += tensor.nbytes

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        self.wait(self.post(peer, tensor), peer, tensor)

    def _blame(self, peer: int, error: RuntimeError) -> NoReturn:
        members, rank = self._between._members, self._ranks[peer]
        host = members.hosts[next(number for number, ranks in enumerate(members.machines) if rank in ranks)]
        text = str(error)
        if "imed out" in text or "imeout" in text:
            limit = self._between._limit.total_seconds()
            raise TeamTimeout(
                f"rank {members.rank} waited {limit:.1f} s for rank {rank} on {host} at an exchange of gradients",
                [rank],
            ) from None
        raise WorkerLost(
            f"rank {rank} on {host} died, or its connection was closed: {text.splitlines()[0]}", [rank]
        ) from None


class _Message:
    """A message that is being sent."""

    def __init__(self, owners: _Owners, peer: int, work: Any, tensor: torch.Tensor) -> None:
        self._owners, self._peer, self._work = owners, peer, work
        self._tensor = tensor  # whose memory is read until it has gone

    def wait(self) -> None:
        try:
            self._work.wait(self._owners._between._limit)
        except RuntimeError as error:
            self._owners._blame(self._peer, error)
