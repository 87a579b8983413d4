"""The members of a team: how they join, on one machine or on several, and how they detect that one has died."""

from __future__ import annotations

import itertools
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from paceline import failpoints
from paceline.cluster.peer_store import PeerStore
from paceline.cluster.process import end_process
from paceline.cluster.process_set import machine
from paceline.cluster.rendezvous import MemberList, exchange_ports, find_members, open_store
from paceline.cluster.team_join import JoinClient
from paceline.config import Launch, Place, Timeouts, capacity
from paceline.errors import FORK, JoinError, Mismatch, TeamTimeout, UsageError, WorkerLost, names
from paceline.events.forwarding import FIRST_MACHINE
from paceline.transport import Barrier, BarrierKind, ElasticBarrier, MachinesBarrier, Memory, StepCounter
from paceline.transport.keys import Secret, key_of_run
from paceline.transport.peer_connections import FrameKind, PeerConnections, compare_clocks, connect

__all__ = ["LivenessMonitor", "Members", "current", "join_team", "machine"]


class LivenessMonitor:
    """Detects the death of other members through pidfds, which are ready to read once the process has died."""

    def __init__(self, barrier: StepCounter) -> None:
        self._descriptors: dict[int, int] = {}
        self._gone: set[int] = set()
        for rank in range(barrier.size):
            if rank == barrier.rank:
                continue
            self.watch(rank, barrier.pid(rank))
        self.close = weakref.finalize(self, _close, self._descriptors)
        """Closes the pidfds; nobody counts as lost from then on."""

    def watch(self, rank: int, pid: int) -> None:
        """From now on this process is the member of this rank."""
        if rank in self._descriptors:
            os.close(self._descriptors.pop(rank))
        self._gone.discard(rank)
        try:
            self._descriptors[rank] = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):  # the latter for no process at all
            self._gone.add(rank)

    def lost(self, rank: int) -> str | None:
        """How this member was lost, as a verb of a message; None while it lives."""
        if not self.close.alive:
            return None
        if rank in self._descriptors:
            poll = select.poll()
            poll.register(self._descriptors[rank], select.POLLIN)
            if poll.poll(0):
                self._gone.add(rank)
        return "died" if rank in self._gone else None

    def end(self, rank: int, patience: float = 0.0) -> bool:
        """Ends a member for good, also one that is stopped; False if that is not allowed.

        patience: seconds in which it may end by itself.
        """
        return rank in self._gone or (self.close.alive and end_process(self._descriptors[rank], patience))


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


class Members:
    """This process as a member of the team: its barriers, and memory shared with the others."""

    def __init__(
        self,
        rank: int,
        size: int,
        barrier: Barrier | MachinesBarrier,
        liveness: LivenessMonitor,
        store: Store | None,
        *,
        roster: MemberList | None = None,
        local: Members | None = None,
        connections: PeerConnections | None = None,
        room: int | None = None,
    ) -> None:
        """room: members that there may be, if more than `size` may come."""
        self.rank, self.size, self.room = rank, size, room or size
        self.barrier = barrier
        self.machines = roster.machines if roster else [list(range(size))]
        """The ranks on each machine; rank 0's machine is the first."""
        self.hosts = roster.hosts if roster else ["127.0.0.1"]
        """Per machine, the address at which the others reach it."""
        self.machine = roster.machine_of(rank) if roster else 0
        """The number of this machine."""
        self.local = local or self
        """The members of this machine alone, numbered from 0; the team itself if all are on one machine."""
        self.connections = connections
        """Connections of a machine's lead to the leads of the others; in an elastic team, of every worker to all."""
        self.secret: Secret | None = None
        """What both ends of a connection between machines prove to know."""
        self.ahead = 0.0
        """Seconds by which the clock of rank 0's machine is ahead of this one's, if there are connections."""
        self.exit_report: Callable[[], None] | None = None
        """What is left to do over the connections once this lead has left."""
        self.numbers = itertools.count()
        """Numbers of the objects found through the store: all members make the same ones in the same order."""
        self.store = store  # rank 0 may host it, for as long as the team lasts
        self._liveness = liveness
        self._process = os.getpid()
        self.kept: list[int] | None = None
        """Descriptors of all shared memory, for workers that join later; None if none can."""
        self.joining: JoinClient | None = None
        """Of a worker that is not a member yet: its barriers concern it alone, and its memory is `given`."""
        self.given: list[int] = []

    @property
    def home(self) -> int:
        """The machine where the run's events are: rank 0's, unless it was lost and all notes go to another."""
        barrier = self.barrier
        return barrier.home if isinstance(barrier, ElasticBarrier) else FIRST_MACHINE

    def share(self, size: int, *, keep: bool = False) -> Memory:
        """New memory that all members of this machine map; all must call this, with the same size.

        keep: its descriptor stays open, so that it can be passed on.
        """
        if self.local is not self:
            return self.local.share(size, keep=keep)
        if self.joining is not None:
            given = self._take_given(size)
            if not keep:
                given.close_descriptor()
            return given
        if self.size == 1 and self.kept is None:
            return Memory.create(size)
        barrier = self.barrier
        memory = None
        if self.rank == 0:
            memory = Memory.create(size)
            barrier.note[:8] = memory.descriptor.to_bytes(8, "little")
        barrier.wait(BarrierKind.ALLOCATE, 8)
        descriptor = int.from_bytes(barrier.notes[0][:8], "little")
        if memory is None:
            memory = Memory.of(barrier.pid(0), descriptor)
        barrier.wait(BarrierKind.ALLOCATE)
        if self.kept is not None:
            self.kept.append(os.dup(memory.descriptor))
        if not keep:
            memory.close_descriptor()
        return memory

    def _take_given(self, size: int) -> Memory:
        memory = Memory.inherited(self.given.pop(0)) if self.given else None
        if memory is None or memory.size != Memory.rounded(size):
            raise Mismatch(
                f"rank {self.rank} cannot join: its model or optimizer is not the one that the run trains", [self.rank]
            )
        assert self.kept is not None
        self.kept.append(os.dup(memory.descriptor))
        return memory

    def grow(self, size: int) -> None:
        """Ranks below this can be members from now on."""
        if size > self.size:
            self.size, self.machines = size, [list(range(size))]
            self.barrier.widen(size)

    def enter(self, count: int, gone: set[int]) -> None:
        """Makes a worker that joins a member, after so many barriers of the others; gone: ranks that are not there."""
        barrier = self.barrier
        assert isinstance(barrier, Barrier)
        vars(barrier).pop("wait", None)
        barrier.begin_at(count)
        barrier.departed, barrier.spare = set(gone), True
        for rank in set(range(self.size)) - gone - {self.rank}:
            self.watch(rank, barrier.pid(rank))
        barrier.watch = self._liveness
        barrier.sign_in()
        self.joining = None

    def watch(self, rank: int, pid: int) -> None:
        """This process is the member of this rank from now on."""
        assert isinstance(self.barrier, Barrier)
        self._liveness.watch(rank, pid)
        self.barrier.expect(rank)

    def mirror(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the lead's values of these tensors to every member."""
        if self.joining is not None:
            return
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            payload = b""
            if self.rank == 0:
                payload = bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            value = self.gather(payload, BarrierKind.ALLOCATE)[0]
            if self.rank != 0:
                with torch.no_grad():
                    tensor.copy_(torch.frombuffer(bytearray(value), dtype=tensor.dtype).view(tensor.shape))

    def gather(self, payload: bytes, intent: BarrierKind = BarrierKind.GATHER) -> list[bytes]:
        """All payloads, by rank, each of any length. Passive members have none."""
        if self.size == 1:
            return [payload]
        if self.joining is not None:
            return [payload if rank == self.rank else b"" for rank in range(max(self.size, self.rank + 1))]
        barrier = self.barrier
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        start = 0
        left = 1
        while left:
            piece = payload[start : start + barrier.CAPACITY - 8]
            start += len(piece)
            barrier.note[:8] = (len(payload) - start).to_bytes(8, "little")
            barrier.note[8 : 8 + len(piece)] = piece
            barrier.wait(intent, 8 + len(piece))
            left = 0
            for rank, note in enumerate(barrier.notes):
                length = barrier.length(rank)
                if length > 8:
                    parts[rank].append(bytes(note[8:length]))
                if length >= 8:
                    left = max(left, int.from_bytes(note[:8], "little"))
        return [b"".join(part) for part in parts]

    def detach(self) -> None:
        """This process is a fork of a member: it must not come to a barrier in its place."""

        def refuse(*_: object) -> BarrierKind:
            raise UsageError(FORK)

        for members in (self, self.local):
            vars(members.barrier)["wait"] = refuse

    def leave(self) -> None:
        """Tell the others that this member leaves the team."""
        global _current
        if os.getpid() != self._process:  # a fork of a member is not a member
            return
        self.barrier.sign_out()
        if self.connections is not None:
            if self.exit_report is not None:
                self.exit_report()
            self.connections.send_all(FrameKind.END)
            self.connections.settle(1.0)
        if _current is self:
            _current = None

    def wait_until_left(self, seconds: float = 10.0) -> None:
        """Wait until all others have left or died, at most for so many seconds."""
        until = time.monotonic() + seconds
        if self.local is not self:
            self.local.wait_until_left(seconds)
        for rank in range(self.size) if self.local is self else ():
            while rank != self.rank and time.monotonic() < until:
                if self.barrier.has_left(rank) or self._liveness.lost(rank):
                    break
                time.sleep(0.02)
        if self.connections is not None:
            while time.monotonic() < until and not all(
                connection.ended for connection in self.connections.connections.values()
            ):
                self.connections.move(0.05)


_current: Members | None = None


def current() -> Members | None:
    """The team that this process has joined, if any."""
    return _current


def join_team(
    place: Place, launch: Launch, timeouts: Timeouts, say: Callable[[str], None], *, elastic: bool = False
) -> Members:
    """Join the team with its other members; returns the same object when called again.

    elastic: the members must be able to agree on who is left after a loss, also over several machines.
    """
    global _current
    if _current is None:
        failpoints.enter(f"worker{place.rank}")
        if launch.joins is not None and elastic:
            _current = _join_running(place.rank, launch.joins, timeouts, say)
        elif launch.joins is not None:  # a worker that joins a running team is alone: the server knows the others
            _current = _join_local(0, 1, Memory.create(Barrier.memory_size(1)), timeouts, say)
            _current.rank = place.rank
        elif launch.control is not None or place.world_size == 1:
            room = capacity(place.world_size)
            size = Barrier.memory_size(room)
            memory = Memory.create(size) if launch.control is None else Memory.inherited(launch.control)
            _current = _join_local(place.rank, place.world_size, memory, timeouts, say, elastic=elastic, room=room)
        else:
            store = open_store(place, timeouts)
            key = key_of_run(launch.key)
            roster, store = find_members(place, store, machine(), key, timeouts)
            secret = Secret.of(key, roster.token)
            _current = _join_machines(place, roster, secret, store, timeouts, say, elastic=elastic)
    return _current


def _join_local(
    rank: int,
    size: int,
    memory: Memory,
    timeouts: Timeouts,
    say: Callable[[str], None],
    *,
    store: Store | None = None,
    ranks: Sequence[int] | None = None,
    elastic: bool = False,
    room: int | None = None,
) -> Members:
    """Join the members of this machine.

    room: members that the memory has room for, if more than `size` may come.
    """
    patience = Timeouts(join=timeouts.join, barrier=timeouts.join, notice=timeouts.notice)
    barrier = Barrier(memory, rank, size, patience, say, room)
    barrier.ranks = ranks or barrier.ranks
    barrier.sign_in()
    try:
        barrier.wait(BarrierKind.BARRIER)
    except TeamTimeout as error:
        raise JoinError(f"{error}; raise it with --timeout if they only need longer", error.ranks) from None
    except WorkerLost as error:
        raise JoinError(
            f"{names(error.ranks)} ended without paceline.join(), and the team needs all {size} workers; let every "
            "worker join",
            error.ranks,
        ) from None
    barrier.timeouts = timeouts
    barrier.watch = liveness = LivenessMonitor(barrier)
    # All wait until everyone has opened its pidfds: a process id must not be reused in between.
    barrier.wait(BarrierKind.BARRIER)
    members = Members(rank, size, barrier, liveness, store, room=room if elastic else None)
    if elastic:
        members.kept = [os.dup(memory.descriptor)]
    memory.close_descriptor()
    return members


def _join_running(rank: int, address: str, timeouts: Timeouts, say: Callable[[str], None]) -> Members:
    """The team of a worker that joins it later, and is no member yet."""
    client = JoinClient(address, rank, timeouts.join + timeouts.barrier)
    team, (control, *given) = client.memory()
    memory = Memory.inherited(control)
    barrier = Barrier(memory, rank, max(team.size, rank + 1), timeouts, say, team.room)
    vars(barrier)["wait"] = lambda intent, _length=0: intent
    members = Members(rank, team.size, barrier, LivenessMonitor(barrier), None, room=team.room)
    members.joining, members.given, members.kept = client, given, [memory.descriptor]
    return members


def _join_machines(
    place: Place,
    roster: MemberList,
    secret: Secret,
    store: Store,
    timeouts: Timeouts,
    say: Callable[[str], None],
    *,
    elastic: bool,
) -> Members:
    """Join the members of this machine, then, if there are several machines, those of the others."""
    number = roster.machine_of(place.rank)
    here = roster.machines[number]
    memory = _control_memory(place, number, here, store, timeouts)
    local = _join_local(here.index(place.rank), len(here), memory, timeouts, say, store=store, ranks=here)
    if len(roster.machines) == 1:
        return local
    assert isinstance(local.barrier, Barrier)
    local.barrier.place = f" on {roster.hosts[number]}"
    barrier: MachinesBarrier
    ways, patience = exchange_ports(store, timeouts), (timeouts.join, timeouts.barrier)
    connections, at = None, place.rank if elastic else number
    if elastic:
        hosts = [roster.hosts[roster.machine_of(rank)] for rank in range(place.world_size)]
        connections = connect(place.rank, hosts, secret, *ways, patience)
        barrier = ElasticBarrier(place.rank, roster.machines, roster.hosts, local.barrier, connections, say)
        store = PeerStore(connections, barrier, timeouts.join)
    else:
        wide = local.share(MachinesBarrier.memory_size(place.world_size))
        if place.rank == here[0]:
            connections = connect(number, roster.hosts, secret, *ways, patience)
        barrier = MachinesBarrier(place.rank, roster.machines, roster.hosts, local.barrier, wide, connections, say)
    # The leads may have to wait for each other until the last machine has joined.
    barrier.timeouts = msgspec.structs.replace(timeouts, barrier=timeouts.join)
    barrier.wait(BarrierKind.BARRIER)
    ahead = 0.0 if connections is None else compare_clocks(connections, at, timeouts.join)
    barrier.wait(BarrierKind.BARRIER)
    barrier.timeouts = timeouts
    members = Members(
        place.rank,
        place.world_size,
        barrier,
        local._liveness,
        store,
        roster=roster,
        local=local,
        connections=connections,
    )
    members.ahead, members.secret = ahead, secret
    return members


def _control_memory(place: Place, number: int, here: list[int], store: Store, timeouts: Timeouts) -> Memory:
    """The shared memory of the barrier of this machine."""
    lead = here[0]
    if place.rank == lead:
        memory = Memory.create(Barrier.memory_size(len(here)))
        store.set(f"control/{number}", f"{os.getpid()} {memory.descriptor}")
        return memory
    try:
        pid, descriptor = store.get(f"control/{number}").decode().split()
        return Memory.of(int(pid), int(descriptor))
    except DistStoreError as error:
        raise JoinError(f"rank {place.rank} got no answer from rank {lead} in {timeouts.join:g} s: {error}") from None
    except OSError as error:
        raise JoinError(f"rank {place.rank} cannot map the memory of rank {lead}: {error}") from None
