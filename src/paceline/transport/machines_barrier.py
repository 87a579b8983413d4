"""Barriers of a team that is spread over machines.

    machine 0                          machine 1
    rank 0   rank 1                    rank 2   rank 3
       ╰─ barrier ╯                       ╰─ barrier ╯         in shared memory
          lead ───────── notes ───────────── lead              over the connection, each way
       ╭─ barrier ╮                       ╭─ barrier ╮         and now all see all notes
    rank 0   rank 1                    rank 2   rank 3

A worker that dies is noticed on its machine, and the machine's lead tells the others. A lead that dies closes its
connections. A member that finds an error sends it to all, so that all fail for the same reason.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import msgspec

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamError, TeamTimeout, WorkerLost, names
from paceline.transport.barrier import Barrier, BarrierKind
from paceline.transport.barrier_frames import SLOT, Failure, pack_notes, unpack_notes
from paceline.transport.memory import Memory
from paceline.transport.peer_connections import FrameKind, PeerConnections
from paceline.transport.step_counter import Watch

_STATE = struct.Struct("=qqq")  # bytes of a failure, who came last, number of the barrier
_TROUBLE = -1
"""The intent of a member that has an error for all."""
_PAGE = 4096
_SLICE = 0.1


class MachinesBarrier:
    """One member's part in the barriers of a team on several machines; has the interface of `Barrier`."""

    CAPACITY = Barrier.CAPACITY

    def __init__(
        self,
        rank: int,
        machines: Sequence[Sequence[int]],
        hosts: Sequence[str],
        local: Barrier,
        memory: Memory,
        connections: PeerConnections | None,
        say: Callable[[str], None],
    ) -> None:
        """memory: shared by the members of this machine, zeroed. connections: of a lead; None for others."""
        self.rank, self.size = rank, sum(map(len, machines))
        self.ranks: Sequence[int] = range(self.size)
        self._local, self._connections, self._say = local, connections, say
        self._machines, self._hosts = machines, hosts
        self._machine_of = {member: number for number, ranks in enumerate(machines) for member in ranks}
        self._here = list(machines[self._machine_of[rank]])
        self._timeouts = local.timeouts
        self._state = memory.bytes(0, _PAGE)
        slot = self.CAPACITY + _PAGE
        self._slots = [
            [memory.bytes(_PAGE + slot * (turn * self.size + peer), slot) for peer in range(self.size)]
            for turn in (0, 1)
        ]
        self._payloads = [[slot[SLOT.size :] for slot in slots] for slots in self._slots]
        self._count = 0
        self._carried: BarrierKind | None = None
        self.departed: set[int] = set()
        self._spare = False
        self.notes = self._payloads[0]
        """Everybody's note of the last barrier."""
        self.passive = [False] * self.size
        """By rank, True if it was passive at the last barrier."""
        self.last = rank
        """The rank that came last to the last barrier, as far as is known."""
        self.idle: Callable[[], None] | None = None
        """Called by the lead at every barrier."""

    @classmethod
    def memory_size(cls, size: int) -> int:
        return _PAGE + 2 * size * (cls.CAPACITY + _PAGE)

    # -- as Barrier has it -------------------------------------------------------------------------------------------

    @property
    def timeouts(self) -> Timeouts:
        return self._timeouts

    @timeouts.setter
    def timeouts(self, timeouts: Timeouts) -> None:
        self._timeouts = self._local.timeouts = timeouts

    @property
    def watch(self) -> Watch | None:
        return self._local.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._local.watch = watch

    @property
    def spare(self) -> bool:
        """True if the others can go on when one is lost."""
        return self._spare

    @spare.setter
    def spare(self, spare: bool) -> None:
        self._spare = self._local.spare = spare

    @property
    def closing(self) -> bool:
        return self._local.closing

    @closing.setter
    def closing(self, closing: bool) -> None:
        self._local.closing = closing

    @property
    def note(self) -> memoryview:
        """Where to write this member's note for the next barrier."""
        return self._payloads[(self._count + 1) & 1][self.rank]

    def length(self, rank: int) -> int:
        """The length of `rank`'s note at the last barrier; 0 if it did not take part."""
        if rank in self.departed:
            return 0
        return int(SLOT.unpack_from(self._slots[self._count & 1][rank])[1])

    def carry(self, intent: BarrierKind) -> None:
        """The last barrier, attended passively, counts as this member's own next one."""
        self._carried = intent

    def sign_in(self) -> None:
        self._local.sign_in()

    def sign_out(self) -> None:
        self._local.sign_out()
        if self._connections is not None:
            self._connections.send_all(FrameKind.BYE)

    def fail(self, reason: str) -> None:
        """Tells the others that this member has given up."""
        self._local.fail(reason)
        if self._connections is not None:
            self._tell(TeamError(f"rank {self.rank} gave up ({reason})", [self.rank]))

    def pid(self, rank: int) -> int:
        """The process of a member of this machine; 0 of another's."""
        return self._local.pid(self._here.index(rank)) if rank in self._here else 0

    def has_left(self, rank: int) -> bool:
        if rank in self._here:
            return self._local.has_left(self._here.index(rank))
        return rank in self.departed or (
            self._connections is not None and self._connections.connections[self._machine_of[rank]].left
        )

    def failed(self, rank: int) -> bool:
        return rank in self._here and self._local.failed(self._here.index(rank))

    def gone(self, rank: int) -> str | None:
        """Why `rank` will not come any more, or None while it may, as far as is known here."""
        if rank in self._here:
            return self._local.gone(self._here.index(rank))
        if self.has_left(rank):
            return "has left the team: its script has ended"
        if self._connections is not None and not self._connections.connections[self._machine_of[rank]].open:
            return "cannot be reached any more"
        return None

    def where(self, rank: int) -> str:
        """`rank 3 on 10.0.0.2`."""
        return f"rank {rank} on {self._hosts[self._machine_of[rank]]}"

    # -- barrier -----------------------------------------------------------------------------------------------------

    def wait(self, intent: BarrierKind, length: int = 0, trouble: TeamError | None = None) -> BarrierKind:
        """Waits for all members at the next barrier; returns its kind.

        trouble: an error of this member, which all members raise.
        """
        if self._was_carried(intent):
            return intent
        self._refuse_departed(intent)
        slots = self._bring(intent, length, trouble)
        try:
            self._local.come(intent)
        except TeamError as error:
            raise self._told(error, trouble) from None
        self.departed.update(self._here[index] for index in self._local.departed)
        if self._here[0] in self.departed and self.rank != self._here[0]:
            return self._without_lead(intent)
        self.last = self._here[self._local.last]
        if self._connections is not None:
            self._exchange(self._topic(slots))
        self._wait_for_lead(intent)
        size, last, number = _STATE.unpack_from(self._state)
        if size:
            raise msgspec.msgpack.decode(bytes(self._state[_STATE.size : _STATE.size + size]), type=Failure).error()
        assert number == self._count
        if last >= 0:
            self.last = last
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent, slots)

    def _was_carried(self, intent: BarrierKind) -> bool:
        """True if the last barrier counts as this one."""
        if self._carried is None:
            return False
        carried, self._carried = self._carried, None
        if carried is not intent:
            raise Mismatch(
                f"rank {self.rank} is at {intent.spoken} while the others are at {carried.spoken}: "
                "all workers must do the same"
            )
        return True

    def _bring(self, intent: BarrierKind, length: int, trouble: TeamError | None) -> list[memoryview]:
        """Begins the next barrier with this member's note; returns the slots of all members."""
        self._count += 1
        slots = self._slots[self._count & 1]
        if trouble is not None:
            text = msgspec.msgpack.encode(Failure.of(trouble))
            slots[self.rank][SLOT.size : SLOT.size + len(text)] = text
            length = len(text)
        SLOT.pack_into(slots[self.rank], 0, int(intent) if trouble is None else _TROUBLE, length, 0)
        return slots

    def _refuse_departed(self, intent: BarrierKind) -> None:
        if self.departed and intent is not BarrierKind.PASSIVE and not self._spare:
            gone = min(self.departed)
            raise self._told(
                WorkerLost(
                    f"{self.where(gone)} has left the team: its script has ended; "
                    f"rank {self.rank} needs it at {intent.spoken}",
                    [gone],
                ),
                None,
            )

    def _told(self, error: TeamError, trouble: TeamError | None) -> TeamError:
        """The error to raise here; the other machines are told of it."""
        self._tell(error)
        return trouble if trouble is not None and not isinstance(error, WorkerLost) else error

    def _tell(self, error: TeamError) -> None:
        if self._connections is not None:
            self._connections.send_all(FrameKind.FAILURE, msgspec.msgpack.encode(Failure.of(error)))
            self._connections.settle(1.0)

    def _wait_for_lead(self, intent: BarrierKind) -> None:
        """The second step on this machine; longer than the timeout, as the lead waits for others and reports them."""
        timeouts = self._timeouts
        self._local.timeouts = msgspec.structs.replace(timeouts, barrier=timeouts.barrier + 2 * self._grace, notice=1e9)
        try:
            self._local.come(intent)
        except TeamError as error:
            raise self._told(error, None) from None
        finally:
            self._local.timeouts = timeouts

    @property
    def _grace(self) -> float:
        """Extra seconds, so that the member closest to a missing one reports it first."""
        return 0.5 + 0.1 * min(self._timeouts.barrier, 15.0)

    def _without_lead(self, intent: BarrierKind) -> BarrierKind:
        """The barrier after the lead's script has ended: nothing is left to do at the end of this epoch."""
        self.departed.update(rank for rank in range(self.size) if rank != self.rank)
        self.passive = [True] * self.size
        return intent

    def _topic(self, slots: list[memoryview]) -> BarrierKind:
        """The kind of barrier that the members of this machine are at."""
        found = [SLOT.unpack_from(slots[rank])[0] for rank in self._here if rank not in self.departed]
        return BarrierKind(max([intent for intent in found if intent > 0], default=0))

    def _agree(self, intent: BarrierKind, slots: list[memoryview]) -> BarrierKind:
        topic = intent
        troubles = []
        for rank, slot in enumerate(slots):
            other, length, departed = SLOT.unpack_from(slot)
            if departed or rank in self.departed:
                self.departed.add(rank)
                other = 0
            self.passive[rank] = other == 0
            if other == _TROUBLE:
                text = bytes(slot[SLOT.size : SLOT.size + length])
                troubles.append(msgspec.msgpack.decode(text, type=Failure).error())
                continue
            if other in (topic, 0):
                continue
            if topic == 0:
                topic = BarrierKind(other)
                continue
            raise Mismatch(
                f"{self.where(rank)} is at {BarrierKind(other).spoken} while {self.where(self.rank)} is at "
                f"{topic.spoken}: all workers must do the same",
                [rank],
            )
        if troubles:
            # A member that lost a connection knows more than one that only waited.
            raise min(troubles, key=lambda error: not isinstance(error, WorkerLost))
        if topic is not BarrierKind.PASSIVE:
            self._refuse_departed(topic)
        return topic

    # -- the lead's part ---------------------------------------------------------------------------------------------

    def _exchange(self, topic: BarrierKind) -> None:
        """Sends this machine's notes to the others, and writes theirs into this machine's memory."""
        assert self._connections is not None
        last = -1
        failure: TeamError | None = None
        try:
            departed = dict.fromkeys(self.departed, 1)
            notes = pack_notes(self._count, self.last, self._here, self._slots[self._count & 1], departed)
            self._connections.send_all(FrameKind.NOTES, *notes)
            last = self._collect(topic)
        except TeamError as error:
            failure = error
            self._tell(error)
        if self.idle is not None:
            self.idle()
        text = b"" if failure is None else msgspec.msgpack.encode(Failure.of(failure))
        self._state[_STATE.size : _STATE.size + len(text)] = text
        _STATE.pack_into(self._state, 0, len(text), last, self._count)

    def _collect(self, topic: BarrierKind) -> int:
        """Waits for the notes of all other machines; returns the rank that came last, -1 if it is on this machine."""
        assert self._connections is not None
        waiting = {number for number in self._connections.connections if self._machines[number][0] not in self.departed}
        last, waited_for = -1, False
        start = time.monotonic()
        notice = self._timeouts.notice
        self._connections.move()
        while True:
            for number in sorted(waiting):
                came = self._take(number, topic)
                if came is not None:
                    waiting.discard(number)
                    last = came if waited_for else last
            behind = {
                number for number, connection in self._connections.connections.items() if connection.pending
            }  # machines that have not read ours yet
            if not waiting and not behind:
                return last
            waited_for = waited_for or bool(waiting)
            self._connections.move(_SLICE)
            waited = time.monotonic() - start
            late = waiting or behind
            missing = self._missing(late) if waited > min(notice, self._timeouts.barrier) else ""
            if waited >= self._timeouts.barrier + self._grace:
                ranks = [rank for number in sorted(late) for rank in self._machines[number]]
                raise TeamTimeout(
                    f"rank {self.rank} waited {waited:.1f} s for {missing} at {topic.spoken}; "
                    f"the timeout is {self._timeouts.barrier:g} s",
                    ranks,
                )
            if waited >= notice:
                self._say(
                    f"rank {self.rank} waits for {missing} at {topic.spoken}: {waited:.0f} s so far, "
                    f"the timeout is {self._timeouts.barrier:g} s"
                )
                notice *= 2

    def _missing(self, machines: set[int]) -> str:
        return " and ".join(f"{names(self._machines[number])} on {self._hosts[number]}" for number in sorted(machines))

    def _take(self, number: int, topic: BarrierKind) -> int | None:
        """Takes the notes of a machine, if they have come; returns the rank that came last there."""
        assert self._connections is not None
        connection = self._connections.connections[number]
        while connection.frames:
            kind, payload = connection.frames.popleft()
            if kind is FrameKind.FAILURE:
                raise msgspec.msgpack.decode(payload, type=Failure).error()
            if kind is FrameKind.NOTES:
                return self._unpack(number, payload)
        lead = self._machines[number][0]
        if connection.left or not connection.open:
            if self._spare or (connection.left and topic is BarrierKind.PASSIVE):
                self.departed.update(self._machines[number])
                for rank in self._machines[number]:
                    SLOT.pack_into(self._slots[self._count & 1][rank], 0, 0, 0, 1)
                return lead
            reason = (
                "has left the team: its script has ended" if connection.left else "died, or its connection was closed"
            )
            raise WorkerLost(f"{self.where(lead)} {reason}; rank {self.rank} needs it at {topic.spoken}", [lead])
        return None

    def _unpack(self, number: int, payload: memoryview) -> int:
        """Writes a machine's notes into their slots; returns the rank that came last there."""
        try:
            count, last, notes = unpack_notes(payload, self.CAPACITY)
        except ValueError:
            notes = []
        if not notes or any(note.rank not in self._machines[number] for note in notes):
            raise TeamError(f"what came from {self._hosts[number]} is not a frame of this team")
        if count != self._count:
            raise TeamError(f"{self._hosts[number]} is at barrier {count}, this machine at {self._count}")
        for note in notes:
            note.write(self._slots[self._count & 1][note.rank])
        return last
