"""All-reduce between machines of the sums that each has made in its shared memory.

A machine's flat buffers are divided among its workers. Where all machines have as many workers, those in the same place
own the same part on all of them and exchange it with each other: all at once, each byte once. Where they have not, the
buffers are cut at the borders of all machines' parts, and each segment is exchanged by its owners on the machines.

        machine 0    ├──── rank 0 ────┼──── rank 1 ────┤
        machine 1    ├─ rank 2 ─┼─ rank 3 ─┼─ rank 4 ──┤
        segments     ├──────────┼─────┼────┼───────────┤
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.cluster.membership import Members
from paceline.collectives import algorithms
from paceline.collectives.algorithms.messages import split
from paceline.collectives.gloo import open_gloo
from paceline.collectives.links import LinkMatrix, best_order, best_topology, measure
from paceline.errors import TeamError, TeamTimeout, WorkerLost
from paceline.transport.channel import PendingSend
from paceline.transport.peer_memory import bytes_of

_FOREVER = datetime.timedelta(days=365)
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
        self.waiting: dict[int, int] = {}
        """By operation, the rank of which a message is awaited now."""
        self.size = len(machines)
        self._leads = [ranks[0] for ranks in machines]
        self.order = list(range(len(machines))) if order is None else order
        """The order of the machines around the ring."""
        self.links: LinkMatrix | None = None
        """The measured links; None if they were not measured."""
        if topology in ("auto", "ring") and len(machines) > 2 and order is None:
            # With two machines all orders are the same, and all topologies cost the same.
            self._measure()
        self._chosen: dict[int, str] = {}
        """By bytes, the topology."""

    def _measure(self) -> None:
        members = self._members
        leads = [ranks[0] for ranks in members.machines]
        own: bytes = b""
        if members.rank in leads:
            own = measure(_Owners(self, leads)).encode()
        rows = members.gather(own)
        self.links = LinkMatrix.of([rows[lead] for lead in leads])
        self.order = best_order(self.links)

    def expect(self, tensor: torch.Tensor, owners: Sequence[int], number: int = 0, whole: int = 0) -> Awaited:
        """Begins to receive what an `all_reduce` of this tensor needs, as far as that is possible before it begins.

        A sender sends at once where the receiver waits already. `tensor` may be written until `all_reduce`.
        number: of the all-reduce, among those that run at the same time; whole: bytes of all of them together, by
        which the topology is chosen.
        """
        channel = _Owners(self, [owners[machine] for machine in self.order], number)
        topology = self._choose(whole or tensor.nbytes)
        coming: list[tuple[torch.Tensor, Any]] = []
        if topology == "pair":
            coming.append(channel.begin(1 - channel.rank, torch.empty_like(tensor)))
        elif topology == "ring":
            size, rank = channel.size, channel.rank
            parts = split(tensor, size)
            for step in range(2 * (size - 1)):
                home = parts[(rank - 2 - step) % size]
                # A whole sum comes only after this worker has sent its own part of it.
                target = torch.empty_like(home) if step < size - 1 else home
                coming.append(channel.begin((rank - 1) % size, target))
        return Awaited(topology, channel, coming)

    def all_reduce(self, tensor: torch.Tensor, awaited: Awaited) -> int:
        """Leaves the sum over all machines in `tensor`, flat and contiguous; returns the bytes received."""
        topology, channel, coming = awaited
        if topology == "pair":
            sending = channel.send(1 - channel.rank, tensor)
            other, work = coming[0]
            channel.wait(work, 1 - channel.rank, other)
            sending.wait()
            tensor.add_(other)  # the same bits at both: the sum of two numbers does not depend on their order
        elif topology == "ring":
            _ring(tensor, channel, coming)
        else:
            algorithms.find(topology, "all_reduce")(channel, tensor, torch.Tensor.add_)
        return channel.received

    def expect_shared(self, text: torch.Tensor) -> Awaited:
        """Begins to receive what a `share` of so many bytes needs."""
        channel = _Owners(self, self._leads, -1)
        peers = [peer for peer in range(channel.size) if peer != channel.rank]
        return Awaited("direct", channel, [channel.begin(peer, torch.empty_like(text)) for peer in peers])

    def share(self, text: torch.Tensor, awaited: Awaited) -> list[torch.Tensor]:
        """The bytes of all machines, each given by its first worker left; called by these."""
        _, channel, coming = awaited
        peers = [peer for peer in range(channel.size) if peer != channel.rank]
        sending = [channel.send(peer, text) for peer in peers]
        for peer, (target, work) in zip(peers, coming, strict=True):
            channel.wait(work, peer, target)
        for message in sending:
            message.wait()
        found = [target for target, _ in coming]
        return [*found[: channel.rank], text, *found[channel.rank :]]

    def _choose(self, size: int) -> str:
        if self.topology != "auto":
            return self.topology
        if self.links is None:
            return "pair" if self.size == 2 else "ring"
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

    @property
    def limit(self) -> float:
        """Seconds that an exchange may take once all workers have come to it."""
        return self._limit.total_seconds()

    def late(self, ranks: Sequence[int] = ()) -> TeamTimeout:
        """The error of an exchange that takes too long.

        ranks: for which it waits; by default those that it waits for now.
        """
        ranks = ranks or sorted(set(self.waiting.values()))
        whom = " and ".join(f"rank {rank} on {self.host_of(rank)}" for rank in ranks) or "workers of its machine"
        waited = f"rank {self._members.rank} waited {self.limit:.1f} s for {whom}"
        return TeamTimeout(f"{waited} at an exchange of gradients", ranks)

    def host_of(self, rank: int) -> str:
        members = self._members
        return members.hosts[next(number for number, ranks in enumerate(members.machines) if rank in ranks)]

    def abort(self) -> None:
        """Lets all operations fail, here and at the others that wait for this worker."""
        channel = _Owners(self, list(self._index))
        with contextlib.suppress(RuntimeError, TeamError):
            # gloo closes all connections after a wait that is too long.
            peer = (channel.rank + 1) % channel.size
            channel.begin(peer, torch.empty(1))[1].wait(datetime.timedelta(milliseconds=1))


def _ring(tensor: torch.Tensor, channel: _Owners, coming: list[tuple[torch.Tensor, Any]]) -> None:
    """The topology `ring`, whose messages are awaited before they come.

    In step s, part (rank − 1 − s) goes to the next one and part (rank − 2 − s) comes; half of the steps add.
    """
    size, rank = channel.size, channel.rank
    parts = split(tensor, size)
    before, after = (rank - 1) % size, (rank + 1) % size
    sending = [channel.send(after, parts[(rank - 1) % size])]
    for step, (target, work) in enumerate(coming):
        home = parts[(rank - 2 - step) % size]
        channel.wait(work, before, target)
        if step < size - 1:  # else it has come to its place
            home.add_(target)
        if step + 1 < len(coming):
            sending.append(channel.send(after, home))
    for message in sending:
        message.wait()


class Awaited(NamedTuple):
    """An all-reduce that may begin, and what it has begun to receive."""

    topology: str
    channel: _Owners
    coming: list[tuple[torch.Tensor, Any]]


class _Owners:
    """A channel between some of the workers, renumbered."""

    def __init__(self, between: InterMachineReduce, ranks: list[int], number: int | None = None) -> None:
        """number: of an operation among those that run at the same time, which another thread limits."""
        self._between, self._ranks = between, ranks
        self._tag = _TAG if number is None else _TAG + 2 + number
        self._limit = between._limit if number is None else _FOREVER
        self.rank, self.size = ranks.index(between._members.rank), len(ranks)
        self.received = 0

    def send(self, peer: int, tensor: torch.Tensor) -> PendingSend:
        between, rank = self._between, self._ranks[peer]
        try:
            work = between._gloo.send([bytes_of(tensor)], between._index[rank], self._tag)
        except RuntimeError as error:
            self._blame(peer, error)
        return _Message(self, peer, work, tensor)

    def begin(self, peer: int, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begins to receive; returns the tensor, which must be kept until the message has come."""
        between, rank = self._between, self._ranks[peer]
        try:
            return tensor, between._gloo.recv([bytes_of(tensor)], between._index[rank], self._tag)
        except RuntimeError as error:
            self._blame(peer, error)

    def wait(self, work: Any, peer: int, tensor: torch.Tensor) -> None:
        """Waits until a message has come."""
        self._between.waiting[self._tag] = self._ranks[peer]
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            self._blame(peer, error)
        self._between.waiting.pop(self._tag, None)
        self.received += tensor.nbytes

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        target, work = self.begin(peer, tensor)
        self.wait(work, peer, target)

    def _blame(self, peer: int, error: RuntimeError) -> NoReturn:
        between, rank = self._between, self._ranks[peer]
        text = str(error)
        if "imed out" in text or "imeout" in text:
            raise between.late([rank]) from None
        where = f"rank {rank} on {between.host_of(rank)}"
        raise WorkerLost(f"{where} died, or its connection was closed: {text.splitlines()[0]}", [rank]) from None


class _Message:
    """A message that is being sent."""

    def __init__(self, owners: _Owners, peer: int, work: Any, tensor: torch.Tensor) -> None:
        self._owners, self._peer, self._work = owners, peer, work
        self._tensor = tensor  # whose memory is read until it has gone

    def wait(self) -> None:
        try:
            self._work.wait(self._owners._limit)
        except RuntimeError as error:
            self._owners._blame(self._peer, error)
