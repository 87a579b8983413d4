"""Barriers of an elastic team over machines: all members send their notes to rank 0.

    rank 1 ── note ──►╮                                   ╭── all notes ──► rank 1
    rank 2 ── note ──►├ rank 0: who has come, who is gone ┼── all notes ──► rank 2
    rank 3 ── note ──►╯                                   ╰── all notes ──► rank 3

Every member has a connection of its own, so the death of any member is seen by its end. Rank 0 alone decides who is
gone, so all who are left agree, and a part of the team that is cut off cannot go on by itself. Without rank 0 the run
ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.errors import TeamError, TeamTimeout, WorkerLost, still_waits, waited_too_long
from paceline.transport.barrier import SLOT, Barrier, BarrierKind, evicted, pack_error, unpack_error
from paceline.transport.machines_barrier import DIED, MachinesBarrier, pack_notes
from paceline.transport.memory import Memory
from paceline.transport.peer_connections import FrameKind, PeerConnection, PeerConnections
from paceline.transport.step_counter import LEFT

_SLICE = 0.1
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
        """connections: of rank 0, to all others by rank; of another, to rank 0."""
        memory = Memory.create(self.memory_size(sum(map(len, machines))))
        super().__init__(rank, machines, hosts, local, memory, None, say)
        memory.close_descriptor()
        self._star = connections
        self._left: set[int] = set()
        """Departed members whose scripts have ended."""
        self._evicted: dict[int, str] = {}
        """Departed members that were too late, and what is said of each."""

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
        if self.rank:
            if not self._exchange_with_first(intent):
                return self._without_lead(intent)
        else:
            try:
                self._collect_notes(intent)
            except TeamError as error:
                self._send_failure(error)
                raise
        if self.idle is not None:
            self.idle()
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent)

    def _send_failure(self, error: TeamError) -> None:
        self._star.send_all(FrameKind.FAILURE, pack_error(error))
        self._star.settle(1.0)

    # -- other members' part -----------------------------------------------------------------------------------------

    def _exchange_with_first(self, topic: BarrierKind) -> bool:
        """Sends a note, and waits for all of them; False if rank 0 has left at the end of an epoch."""
        connection = self._star.connections[0]
        slots = self._slots[self._count & 1]
        connection.send(FrameKind.NOTES, *pack_notes(self._count, self.rank, [self.rank], slots, {}))
        start = time.monotonic()
        # Rank 0 waits as long for the others, and then goes on without those that are late, or names them.
        limit = self.timeouts.barrier + 2 * self._grace
        while True:
            while connection.frames:
                kind, payload = connection.frames.popleft()
                if kind is FrameKind.FAILURE:
                    raise unpack_error(payload)
                if kind is FrameKind.TABLE and self._read_table(payload, topic):
                    return True
            if connection.left and topic is BarrierKind.PASSIVE:
                return False
            if connection.left or not connection.open:
                how = LEFT if connection.left else "died, or it went on without this one"
                raise WorkerLost(
                    f"{self.where(0)}, to whom all come in an elastic run over machines, {how}; rank {self.rank} needs "
                    f"it at {topic.spoken}",
                    [0],
                )
            waited = time.monotonic() - start
            if waited >= limit:
                wait = (f"rank {self.rank}", waited, self.where(0), topic.spoken, self.timeouts.barrier)
                raise TeamTimeout(waited_too_long(*wait), [0])
            self._star.move(_SLICE)

    def _read_table(self, payload: memoryview, topic: BarrierKind) -> bool:
        """Writes the notes of all into their slots; False if they are of another barrier."""
        number, last, notes = self._notes_of(self.where(0), range(self.size), payload, [0])
        if number != self._count:
            return False
        self.last = last
        for note in notes:
            if note.departed and note.rank not in self.departed:
                self._depart(note.rank, note.departed, topic)
            note.write(self._slots[self._count & 1][note.rank])
        return True

    # -- rank 0's part -----------------------------------------------------------------------------------------------

    def _collect_notes(self, topic: BarrierKind) -> None:
        """Waits for the note or the end of every member, and sends all notes to all."""
        waiting = {rank: connection for rank, connection in self._star.connections.items() if rank not in self.departed}
        start, notice = time.monotonic(), self.timeouts.notice
        self.last = 0
        waited = 0.0
        self._star.move()
        while True:
            for rank, connection in list(waiting.items()):
                if self._came(rank, connection, topic):
                    del waiting[rank]
                    self.last = rank if waited else self.last
            if not waiting:
                break
            if waited >= self.timeouts.barrier:
                self._give_up(list(waiting), waited, topic)
                self.last = min(waiting)
                break
            if waited >= notice:
                late = self._called(list(waiting))
                self._say(still_waits("rank 0", waited, late, topic.spoken, self.timeouts.barrier))
                notice *= 2
            self._star.move(_SLICE)
            waited = time.monotonic() - start
        departed = {rank: self._how(rank) for rank in self.departed}
        slots = self._slots[self._count & 1]
        table = b"".join(pack_notes(self._count, self.last, range(self.size), slots, departed))
        for rank, connection in self._star.connections.items():
            if rank not in self.departed:
                connection.send(FrameKind.TABLE, table)
        self._star.settle(self.timeouts.barrier)

    def _came(self, rank: int, connection: PeerConnection, topic: BarrierKind) -> bool:
        """True if a member's note is here, or none will come."""
        while connection.frames:
            kind, payload = connection.frames.popleft()
            if kind is FrameKind.FAILURE:
                if not self.spare:
                    raise unpack_error(payload)
                self._depart(rank, _DIED, topic)
                return True
            if kind is FrameKind.NOTES:
                number, _, (note, *_) = self._notes_of(self.where(rank), [rank], payload, [rank])
                if number != self._count:
                    raise TeamError(f"{self.where(rank)} is at barrier {number}, rank 0 at {self._count}", [rank])
                note.write(self._slots[self._count & 1][rank])
                return True
        if connection.open and not connection.left:
            return False
        if not self.spare and not (connection.left and topic is BarrierKind.PASSIVE):
            raise WorkerLost(f"{self.where(rank)} {self.gone(rank)}; rank 0 needs it at {topic.spoken}", [rank])
        self._depart(rank, _LEFT if connection.left else _DIED, topic)
        return True

    def _give_up(self, late: list[int], waited: float, topic: BarrierKind) -> None:
        """Gives up members that have not come in time: their machines may be cut off."""
        if not self.spare:
            who = self._called(late)
            raise TeamTimeout(waited_too_long("rank 0", waited, who, topic.spoken, self.timeouts.barrier), late)
        for rank in late:
            self._depart(rank, _EVICTED, topic)
            self._star.connections[rank].close()

    def _how(self, rank: int) -> int:
        """How a member has departed."""
        return _LEFT if rank in self._left else _EVICTED if rank in self._evicted else _DIED

    def _depart(self, rank: int, how: int, topic: BarrierKind) -> None:
        """Goes on without a member. One that may still run is ended by the members of its machine, whose memory it has.

        One that is alone on its machine finds its connection closed.
        """
        self.departed.add(rank)
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
