"""Barriers of an elastic team over machines: all members send their notes to one of them, the hub.

    rank 1 ── note ──►╮                                    ╭── all notes ──► rank 1
    rank 2 ── note ──►├ the hub: who has come, who is gone ┼── all notes ──► rank 2
    rank 3 ── note ──►╯                                    ╰── all notes ──► rank 3

Every member has a connection to every other, so the death of any member is seen by its end. The hub alone decides who
is gone, so all who are left agree. It goes on only with a majority of the machines (`majority`).

The hub is rank 0. A member that has lost the hub follows the lowest rank that it reaches: it sends it the last table of
notes that it has read, and its note. That rank becomes the hub when it has lost the old one, too. Members are at most
one barrier apart: the new hub sends its own last table to one that has not read it, and takes over that of one that is
ahead, before it makes the next one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

from paceline.errors import TeamError, TeamTimeout, WorkerLost, still_waits, waited_too_long
from paceline.transport.barrier import SLOT, Barrier, BarrierKind, evicted, pack_error, unpack_error
from paceline.transport.machines_barrier import DIED, MachinesBarrier, pack_notes, unpack_number
from paceline.transport.majority import Membership
from paceline.transport.memory import Memory
from paceline.transport.peer_connections import FrameKind, PeerConnection, PeerConnections
from paceline.transport.step_counter import LEFT

_SLICE = 0.1
_FOLLOW = struct.Struct("!q")  # the number of the last barrier of which the sender has read the table
_PATIENT = 0.5
"""Seconds of a wait before it is looked whether hosts are silent."""
_SIGNS = 5
"""Signs of life of a hub that waits for others, within the timeout."""
_DIED, _LEFT, _EVICTED = 1, 2, 3
"""How a member has departed."""


class ElasticBarrier(MachinesBarrier):
    """One member's part in the barriers of an elastic team over machines."""

    def __init__(
        self,
        rank: int,
        machines: Sequence[Sequence[int]],
        hosts: Sequence[str],
        local: Barrier,
        connections: PeerConnections,
        say: Callable[[str], None],
    ) -> None:
        """connections: to all others, by rank."""
        memory = Memory.create(self.memory_size(sum(map(len, machines))))
        super().__init__(rank, machines, hosts, local, memory, None, say)
        memory.close_descriptor()
        self._star = connections
        self._left: set[int] = set()
        """Departed members whose scripts have ended."""
        self._evicted: dict[int, str] = {}
        """Departed members that were too late, and what is said of each."""
        self.hub = 0
        """The member to which all notes go."""
        self._lost_hubs: dict[int, int] = {}
        """Hubs before this one that did not answer this member, and how they were lost."""
        self._table: memoryview | bytes = b""
        """The notes of all members at the last barrier."""
        self._members = self._committed = Membership(frozenset(self.ranks), 0)

    # -- as Barrier has it -------------------------------------------------------------------------------------------

    def sign_out(self) -> None:
        self._local.sign_out()
        self._star.send_all(FrameKind.BYE)

    def fail(self, reason: str) -> None:
        self._local.fail(reason)
        self._send_failure(TeamError(f"rank {self.rank} gave up ({reason})", [self.rank]))

    def has_left(self, rank: int) -> bool:
        return rank in self._left or (rank in self._star.connections and self._star.connections[rank].left)

    @property
    def home(self) -> int:
        """The hub's machine."""
        return self._machine_of[self.hub]

    @property
    def evicted(self) -> set[int]:
        """Members that were too late."""
        return set(self._evicted)

    def gone(self, rank: int) -> str | None:
        if self.has_left(rank):
            return LEFT
        if rank in self._evicted:
            return self._evicted[rank]
        connection = self._star.connections.get(rank)
        if rank in self.departed or (connection is not None and not connection.open):
            return DIED
        return None

    # -- barrier -----------------------------------------------------------------------------------------------------

    def wait(self, intent: BarrierKind, length: int = 0, trouble: TeamError | None = None) -> BarrierKind:
        if self._carried is not None:
            self._check_carried(intent)
            return intent
        self._refuse_departed(intent)
        self._bring(intent, length, trouble)
        while self.hub != self.rank:
            if self._exchange_with_hub(intent):
                break
            if not self.spare:
                return self._without_lead(intent)
            self._follow_next()
        else:
            try:
                self._collect_notes(intent)
            except TeamError as error:
                self._send_failure(error)
                raise
        self._committed = self._members
        left = frozenset(rank for rank in self.ranks if rank not in self.departed)
        self._members = Membership(left, self.home)
        if self.idle is not None:
            self.idle()
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent)

    def _send_failure(self, error: TeamError) -> None:
        self._star.send_all(FrameKind.FAILURE, pack_error(error))
        self._star.settle(1.0)

    # -- other members' part -----------------------------------------------------------------------------------------

    def _exchange_with_hub(self, topic: BarrierKind) -> bool:
        """Sends a note, and waits for all of them; False if the hub is lost, and can be."""
        connection = self._star.connections[self.hub]
        slots = self._slots[self._count & 1]
        connection.send(FrameKind.NOTES, *pack_notes(self._count, self.rank, [self.rank], slots, {}))
        start = time.monotonic()
        # The hub sends a sign of life while it waits for the others, and then goes on without those that are late.
        limit = self.timeouts.barrier + 2 * self._grace
        while True:
            while connection.frames:
                kind, payload = connection.frames.popleft()
                if kind is FrameKind.FAILURE:
                    raise unpack_error(payload)
                if kind is FrameKind.TABLE and self._read_table(payload, topic):
                    return True
                if kind is FrameKind.WAITING:
                    start = time.monotonic()
            if time.monotonic() - start > _PATIENT:
                self._star.close_silent(self.timeouts.barrier)
            if connection.left or not connection.open:
                self._lost_hubs[self.hub] = _LEFT if connection.left else _DIED
                if self.spare or (connection.left and topic is BarrierKind.PASSIVE):
                    return False
                how = LEFT if connection.left else "died, or it went on without this one"
                raise WorkerLost(
                    f"{self.where(self.hub)}, to whom all come in an elastic run over machines, {how}; rank "
                    f"{self.rank} needs it at {topic.spoken}",
                    [self.hub],
                )
            waited = time.monotonic() - start
            if waited >= limit:
                if self.spare:
                    self._lost_hubs[self.hub] = _EVICTED
                    return False
                wait = (f"rank {self.rank}", waited, self.where(self.hub), topic.spoken, self.timeouts.barrier)
                raise TeamTimeout(waited_too_long(*wait), [self.hub])
            self._star.move(_SLICE)

    def _follow_next(self) -> None:
        """Gives the hub up, for good, and follows the lowest rank that can be reached, which may be this one."""
        if self._lost_hubs[self.hub] != _LEFT:
            self._star.connections[self.hub].close()
        self.hub = min(
            rank
            for rank in self._members.ranks
            if rank == self.rank or (rank not in self._lost_hubs and self._reaches(rank))
        )
        if self.hub != self.rank:
            self._star.connections[self.hub].send(FrameKind.FOLLOW, _FOLLOW.pack(self._count - 1), self._table)

    def _reaches(self, rank: int) -> bool:
        connection = self._star.connections[rank]
        return connection.open and not connection.left

    def _read_table(self, payload: memoryview | bytes, topic: BarrierKind) -> bool:
        """Writes the notes of all into their slots; False if they are of another barrier."""
        number, last, notes = self._notes_of(self.where(self.hub), range(self.size), memoryview(payload), [self.hub])
        if number != self._count:
            return False
        self.last, self._table = last, payload
        for note in notes:
            if note.departed and note.rank not in self.departed:
                self._depart(note.rank, note.departed, topic)
            note.write(self._slots[self._count & 1][note.rank])
        return True

    # -- the hub's part ----------------------------------------------------------------------------------------------

    def _collect_notes(self, topic: BarrierKind) -> None:
        """Waits for the note or the end of every member, and sends all notes to all."""
        gone = self._wait_for_all(topic)
        if gone is None:
            return
        self._demand_majority(gone)
        for rank, how in gone.items():
            self._depart(rank, how, topic)
        departed = {rank: self._how(rank) for rank in self.departed}
        slots = self._slots[self._count & 1]
        self._table = b"".join(pack_notes(self._count, self.last, range(self.size), slots, departed))
        for rank, connection in self._star.connections.items():
            if rank not in self.departed:
                connection.send(FrameKind.TABLE, self._table)
        self._star.settle(self.timeouts.barrier)

    def _wait_for_all(self, topic: BarrierKind) -> dict[int, int] | None:
        """Waits for all notes; returns who was lost, and how.

        None if all is decided: the table of this barrier, of the hub before, is here.
        """
        waiting = {rank: connection for rank, connection in self._star.connections.items() if rank not in self.departed}
        gone = {rank: how for rank, how in self._lost_hubs.items() if waiting.pop(rank, None) is not None}
        blamed = self.last = min(gone, default=self.rank)
        start, notice = time.monotonic(), self.timeouts.notice
        interval = sign = self.timeouts.barrier / _SIGNS
        waited = 0.0
        self._star.move()
        while True:
            for rank, connection in list(waiting.items()):
                came = self._came(rank, connection, topic)
                if self._table_is_here:
                    return None
                if came is not None:
                    del waiting[rank]
                    self.last = rank if waited and blamed == self.rank else self.last
                    gone |= {rank: came} if came else {}
            if not waiting:
                return gone
            if waited >= self.timeouts.barrier:
                self._refuse_late(list(waiting), waited, topic)
                gone |= dict.fromkeys(waiting, _EVICTED)
                self.last = min(gone)
                return gone
            if waited >= notice:
                late = self._called(list(waiting))
                self._say(still_waits(f"rank {self.rank}", waited, late, topic.spoken, self.timeouts.barrier))
                notice *= 2
            if waited >= _PATIENT:
                self._star.close_silent(self.timeouts.barrier)
            if waited >= sign:
                self._star.send_all(FrameKind.WAITING)
                sign += interval
            self._star.move(_SLICE)
            waited = time.monotonic() - start

    def _came(self, rank: int, connection: PeerConnection, topic: BarrierKind) -> int | None:
        """0 if a member's note is here, how it was lost if none will come, None if one may."""
        while connection.frames:
            kind, payload = connection.frames.popleft()
            if kind is FrameKind.FAILURE:
                if not self.spare:
                    raise unpack_error(payload)
                return _DIED
            if kind is FrameKind.FOLLOW:
                self._catch_up(rank, connection, payload, topic)
                if self._table_is_here:
                    return None
            if kind is FrameKind.NOTES:
                number, _, (note, *_) = self._notes_of(self.where(rank), [rank], payload, [rank])
                if number == self._count - 1:
                    continue  # it has got the table of that one
                if number != self._count:
                    raise TeamError(
                        f"{self.where(rank)} is at barrier {number}, rank {self.rank} at {self._count}", [rank]
                    )
                note.write(self._slots[self._count & 1][rank])
                return 0
        if connection.open and not connection.left:
            return None
        if not self.spare and not (connection.left and topic is BarrierKind.PASSIVE):
            raise WorkerLost(
                f"{self.where(rank)} {self.gone(rank)}; rank {self.rank} needs it at {topic.spoken}", [rank]
            )
        return _LEFT if connection.left else _DIED

    @property
    def _table_is_here(self) -> bool:
        """True if the notes of all members at this barrier are known."""
        return len(self._table) > 0 and unpack_number(self._table) == self._count

    def _catch_up(self, rank: int, connection: PeerConnection, payload: memoryview, topic: BarrierKind) -> None:
        """Brings a member that follows this one, and this one, to the same barrier."""
        (number,) = _FOLLOW.unpack_from(payload)
        if number == self._count - 2:
            connection.send(FrameKind.TABLE, self._table)
        elif number == self._count:
            self._read_table(payload[_FOLLOW.size :], topic)
        elif number != self._count - 1:
            raise TeamError(f"{self.where(rank)} is at barrier {number + 1}, rank {self.rank} at {self._count}", [rank])

    def _demand_majority(self, gone: dict[int, int]) -> None:
        """Refuses to go on without a majority of the machines: the others may go on without this part of the team."""
        if not gone:
            return
        present = [rank for rank in self.ranks if rank not in self.departed and rank not in gone]
        left = self._left.union(rank for rank, how in gone.items() if how == _LEFT)
        count, machines, suffices = self._committed.votes(present, left, self._machine_of)
        if not suffices:
            raise WorkerLost(
                f"{self.where(self.rank)} has lost {self._called(list(gone))}, and reaches {count} of the run's "
                f"{machines} machines: only a majority goes on, so that there are never two runs",
                sorted(gone),
            )

    def _refuse_late(self, late: list[int], waited: float, topic: BarrierKind) -> None:
        """Raises an error if members that have not come in time cannot be spared: their machines may be cut off."""
        if not self.spare:
            who = self._called(late)
            raise TeamTimeout(
                waited_too_long(f"rank {self.rank}", waited, who, topic.spoken, self.timeouts.barrier), late
            )

    def _how(self, rank: int) -> int:
        """How a member has departed."""
        return _LEFT if rank in self._left else _EVICTED if rank in self._evicted else _DIED

    def _depart(self, rank: int, how: int, topic: BarrierKind) -> None:
        """Goes on without a member. One that may still run is ended by the members of its machine, whose memory it has.

        One that is alone on its machine finds its connections closed.
        """
        self.departed.add(rank)
        if how != _LEFT:
            self._star.connections[rank].close()
        if how == _LEFT:
            self._left.add(rank)
        elif how == _EVICTED:
            self._evicted[rank] = evicted(topic, self.timeouts.barrier)
        if how != _LEFT and rank in self._here:
            place, patience = self._here.index(rank), 0.0 if how == _EVICTED else self.timeouts.stop
            if not self._local.evict(place, self.gone(rank) or DIED, patience):
                raise TeamError(f"{self.where(rank)} does not come any more, and cannot be ended", [rank])
        SLOT.pack_into(self._slots[self._count & 1][rank], 0, 0, 0, how)

    def _called(self, ranks: list[int]) -> str:
        return " and ".join(self.where(rank) for rank in sorted(ranks))
