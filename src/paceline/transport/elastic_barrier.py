"""Barriers of an elastic team that is spread over machines: all members bring their notes to rank 0.

    rank 1 ── note ──►╮                                   ╭── all notes ──► rank 1
    rank 2 ── note ──►├ rank 0: who has come, who is gone ┼── all notes ──► rank 2
    rank 3 ── note ──►╯                                   ╰── all notes ──► rank 3

Every member has a connection of its own, so the death of one is seen by its end, whoever it was on its machine. One
decides who is gone, so all who are left know the same, and a part of the team that is cut off can not go on by itself.
That one is rank 0: without it the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from paceline.errors import TeamError, TeamTimeout, WorkerLost
from paceline.transport.barrier import Barrier, BarrierKind
from paceline.transport.machines_barrier import FRAME, RANK, SLOT, Failure, MachinesBarrier
from paceline.transport.memory import Memory
from paceline.transport.peer_connections import FrameKind, PeerConnection, PeerConnections

_SLICE = 0.1
_DIED, _LEFT = 1, 2
"""How one has departed."""


class ElasticBarrier(MachinesBarrier):
    """One member's chair at the barriers of an elastic team over machines."""

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
        """Of those who have departed, whose scripts have ended."""

    # -- as Barrier has it -------------------------------------------------------------------------------------------

    def sign_out(self) -> None:
        self._local.sign_out()
        self._star.send_all(FrameKind.BYE)

    def fail(self, reason: str) -> None:
        self._local.fail(reason)
        self._shout(TeamError(f"rank {self.rank} gave up ({reason})", [self.rank]))

    def has_left(self, rank: int) -> bool:
        return rank in self._left or (rank in self._star.connections and self._star.connections[rank].left)

    def gone(self, rank: int) -> str | None:
        if self.has_left(rank):
            return "has left the team: its script has ended"
        connection = self._star.connections.get(rank)
        if rank in self.departed or (connection is not None and not connection.open):
            return "died, or its connection was closed"
        return None

    # -- barrier -----------------------------------------------------------------------------------------------------

    def wait(self, intent: BarrierKind, length: int = 0, trouble: TeamError | None = None) -> BarrierKind:
        if self._was_carried(intent):
            return intent
        self._refuse_departed(intent)
        slots = self._bring(intent, length, trouble)
        if self.rank:
            if not self._attend(intent):
                return self._without_lead(intent)
        else:
            try:
                self._preside(intent)
            except TeamError as error:
                self._shout(error)
                raise
        if self.idle is not None:
            self.idle()
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent, slots)

    def _shout(self, error: TeamError) -> None:
        self._star.send_all(FrameKind.FAILURE, msgspec.msgpack.encode(Failure.of(error)))
        self._star.settle(1.0)

    # -- one member's part -------------------------------------------------------------------------------------------

    def _attend(self, topic: BarrierKind) -> bool:
        """Bring a note, and wait for all of them; False if rank 0 has left and nothing is asked of it any more."""
        connection = self._star.connections[0]
        slot = self._slots[self._count & 1][self.rank]
        intent, length, _ = SLOT.unpack_from(slot)
        head = FRAME.pack(self._count, self.rank, 1) + RANK.pack(self.rank, intent, length, 0)
        connection.send(FrameKind.NOTES, head, slot[SLOT.size : SLOT.size + length])
        start = time.monotonic()
        # Rank 0 waits as long for the others, and then goes on without those who are late, or says who they are.
        limit = self._timeouts.barrier + 2 * self._grace
        while True:
            while connection.frames:
                kind, payload = connection.frames.popleft()
                if kind is FrameKind.FAILURE:
                    raise msgspec.msgpack.decode(payload, type=Failure).error()
                if kind is FrameKind.TABLE and FRAME.unpack_from(payload)[0] == self._count:
                    self._read_table(payload)
                    return True
            if connection.left and topic is BarrierKind.PASSIVE:
                return False
            if connection.left or not connection.open:
                how = (
                    "has left the team: its script has ended"
                    if connection.left
                    else "died, or it went on without this one"
                )
                raise WorkerLost(
                    f"{self.where(0)}, to whom all come in an elastic run over machines, {how}; rank {self.rank} needs "
                    f"it at {topic.spoken}",
                    [0],
                )
            waited = time.monotonic() - start
            if waited >= limit or self._local.closing:
                raise TeamTimeout(
                    f"rank {self.rank} waited {waited:.1f} s for {self.where(0)} at {topic.spoken}; the timeout is "
                    f"{self._timeouts.barrier:g} s",
                    [0],
                )
            self._star.move(_SLICE)

    def _read_table(self, payload: memoryview) -> None:
        _, self.last, count = FRAME.unpack_from(payload)
        offset = FRAME.size
        for _ in range(count):
            rank, intent, length, departed = RANK.unpack_from(payload, offset)
            offset += RANK.size
            if departed:
                self.departed.add(rank)
            if departed == _LEFT:
                self._left.add(rank)
            slot = self._slots[self._count & 1][rank]
            SLOT.pack_into(slot, 0, intent, length, departed)
            slot[SLOT.size : SLOT.size + length] = payload[offset : offset + length]
            offset += length

    # -- rank 0's part -----------------------------------------------------------------------------------------------

    def _preside(self, topic: BarrierKind) -> None:
        """Wait for everybody's note, or end, and give all notes to all."""
        waiting = {rank: connection for rank, connection in self._star.connections.items() if rank not in self.departed}
        start, notice = time.monotonic(), self._timeouts.notice
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
            if waited >= self._timeouts.barrier:
                self._give_up(list(waiting), waited, topic)
                break
            if waited >= notice:
                self._say(
                    f"rank 0 waits for {self._called(list(waiting))} at {topic.spoken}: {waited:.0f} s so far, "
                    f"the timeout is {self._timeouts.barrier:g} s"
                )
                notice *= 2
            self._star.move(_SLICE)
            waited = time.monotonic() - start
        table = self._table()
        for rank, connection in self._star.connections.items():
            if rank not in self.departed:
                connection.send(FrameKind.TABLE, *table)
        self._star.settle(self._timeouts.barrier)

    def _came(self, rank: int, connection: PeerConnection, topic: BarrierKind) -> bool:
        """Whether a member's note is here, or it is known that none will come."""
        while connection.frames:
            kind, payload = connection.frames.popleft()
            if kind is FrameKind.FAILURE:
                if not self._spare:
                    raise msgspec.msgpack.decode(payload, type=Failure).error()
                self._depart(rank, _DIED)
                return True
            if kind is FrameKind.NOTES:
                self._take_note(rank, payload)
                return True
        if connection.open and not connection.left:
            return False
        if not self._spare and not (connection.left and topic is BarrierKind.PASSIVE):
            raise WorkerLost(f"{self.where(rank)} {self.gone(rank)}; rank 0 needs it at {topic.spoken}", [rank])
        self._depart(rank, _LEFT if connection.left else _DIED)
        return True

    def _take_note(self, rank: int, payload: memoryview) -> None:
        count = FRAME.unpack_from(payload)[0]
        sender, intent, length, _ = RANK.unpack_from(payload, FRAME.size)
        start = FRAME.size + RANK.size
        if sender != rank or length != len(payload) - start or length > self.CAPACITY:
            raise TeamError(f"what came from {self.where(rank)} is not a frame of this team", [rank])
        if count != self._count:
            raise TeamError(f"{self.where(rank)} is at barrier {count}, rank 0 at {self._count}", [rank])
        slot = self._slots[self._count & 1][rank]
        SLOT.pack_into(slot, 0, intent, length, 0)
        slot[SLOT.size : SLOT.size + length] = payload[start:]

    def _give_up(self, late: list[int], waited: float, topic: BarrierKind) -> None:
        """These have not come in time, and are not known to be dead: their machines may be cut off."""
        who = self._called(late)
        if not self._spare:
            raise TeamTimeout(
                f"rank 0 waited {waited:.1f} s for {who} at {topic.spoken}; the timeout is "
                f"{self._timeouts.barrier:g} s",
                late,
            )
        self._say(f"{who} did not come to {topic.spoken} within {self._timeouts.barrier:g} s and are given up")
        for rank in late:
            self._depart(rank, _DIED)
            self._star.connections[rank].close()

    def _depart(self, rank: int, how: int) -> None:
        self.departed.add(rank)
        if how == _LEFT:
            self._left.add(rank)
        SLOT.pack_into(self._slots[self._count & 1][rank], 0, 0, 0, how)

    def _table(self) -> list[bytes | memoryview]:
        parts: list[bytes | memoryview] = [FRAME.pack(self._count, self.last, self.size)]
        for rank, slot in enumerate(self._slots[self._count & 1]):
            intent, length, departed = SLOT.unpack_from(slot)
            if rank in self.departed:
                intent, length, departed = 0, 0, _LEFT if rank in self._left else _DIED
            parts += [RANK.pack(rank, intent, length, departed), slot[SLOT.size : SLOT.size + length]]
        return parts

    def _called(self, ranks: list[int]) -> str:
        return " and ".join(self.where(rank) for rank in sorted(ranks))
