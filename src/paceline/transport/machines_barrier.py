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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from paceline.config import Timeouts
from paceline.errors import TeamError, TeamTimeout, WorkerLost, names, still_waits, waited_too_long
from paceline.transport.barrier import SLOT, TROUBLE, Barrier, BarrierKind, BarrierNotes, pack_error, unpack_error
from paceline.transport.memory import Memory
from paceline.transport.peer_connections import FrameKind, PeerConnections
from paceline.transport.step_counter import LEFT

_FRAME = struct.Struct("!qqq")  # number of the barrier, the rank that came last, how many ranks
_RANK = struct.Struct("!qqqq")  # rank, intent, length, whether and how it has departed
_STATE = struct.Struct("=qqq")  # bytes of a failure, who came last, number of the barrier
DIED = "died, or its connection was closed"
_PAGE = 4096
_SLICE = 0.1


class Note(NamedTuple):
    """One member's note on the network."""

    rank: int
    intent: int
    departed: int
    """0 for a member that takes part."""
    payload: memoryview

    def write(self, slot: memoryview) -> None:
        """Writes it into its slot, where the members of this machine read it."""
        length = len(self.payload)
        SLOT.pack_into(slot, 0, self.intent, length, self.departed)
        if length:
            slot[SLOT.size : SLOT.size + length] = self.payload


def pack_notes(
    number: int, last: int, ranks: Sequence[int], slots: Sequence[memoryview], departed: Mapping[int, int]
) -> list[bytes | memoryview]:
    """The notes of these ranks at one barrier. last: the rank that came last. departed: ranks without a note."""
    parts: list[bytes | memoryview] = [_FRAME.pack(number, last, len(ranks))]
    for rank in ranks:
        intent, length, state = (0, 0, departed[rank]) if rank in departed else SLOT.unpack_from(slots[rank])
        parts.append(_RANK.pack(rank, intent, length, state))
        if length:
            parts.append(slots[rank][SLOT.size : SLOT.size + length])
    return parts


def unpack_notes(payload: memoryview, capacity: int) -> tuple[int, int, list[Note]]:
    """The number of the barrier, the rank that came last, and the notes; ValueError if it is no such frame."""
    try:
        number, last, count = _FRAME.unpack_from(payload)
        offset, notes = _FRAME.size, []
        for _ in range(count):
            rank, intent, length, departed = _RANK.unpack_from(payload, offset)
            offset += _RANK.size
            if not 0 <= length <= min(capacity, len(payload) - offset):
                raise ValueError("a note of another length")
            notes.append(Note(rank, intent, departed, payload[offset : offset + length]))
            offset += length
    except struct.error as error:
        raise ValueError(str(error)) from None
    return number, last, notes


def unpack_number(payload: memoryview | bytes) -> int:
    """The number of the barrier of a frame of notes."""
    return int(_FRAME.unpack_from(payload)[0])


class MachinesBarrier(BarrierNotes):
    """One member's part in the barriers of a team on several machines; has the interface of `Barrier`."""

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
        """The members' ranks in the team, for messages."""
        self._local, self._connections, self._say = local, connections, say
        self._machines, self._hosts = machines, hosts
        self._machine_of = {member: number for number, ranks in enumerate(machines) for member in ranks}
        self._here = list(machines[self._machine_of[rank]])
        self._state = memory.bytes(0, _PAGE)
        self._place_notes(memory, _PAGE, self.size)
        self._count = 0
        self.last = rank
        """The rank that came last to the last barrier, as far as is known."""
        self.idle: Callable[[], None] | None = None
        """Called by the lead at every barrier."""

    @classmethod
    def memory_size(cls, size: int) -> int:
        return _PAGE + cls._notes_size(size)

    # -- as Barrier has it -------------------------------------------------------------------------------------------

    @property
    def timeouts(self) -> Timeouts:
        return self._local.timeouts

    @timeouts.setter
    def timeouts(self, timeouts: Timeouts) -> None:
        self._local.timeouts = timeouts

    @property
    def spare(self) -> bool:
        return self._local.spare

    @spare.setter
    def spare(self, spare: bool) -> None:
        self._local.spare = spare

    def sign_out(self) -> None:
        self._local.sign_out()
        if self._connections is not None:
            self._tell_deaths()
            self._connections.send_all(FrameKind.BYE)

    def _tell_deaths(self) -> None:
        """A lead that leaves since another worker of its machine has died tells who that was."""
        watch = self._local.watch
        if watch is None or self.spare:
            return
        here = [place for place in range(self._local.size) if not self._local.has_left(place)]
        lost = [(self._here[place], how) for place in here if (how := watch.lost(place)) is not None]
        if lost:
            text = " and ".join(f"{self.where(rank)} {how}" for rank, how in lost)
            self._tell(WorkerLost(text, [self.ranks[rank] for rank, _ in lost]))

    def fail(self, reason: str) -> None:
        """Tells the others that this member has given up."""
        self._local.fail(reason)
        if self._connections is not None:
            self._tell(TeamError(f"{self._own_name} gave up ({reason})", [self.ranks[self.rank]]))

    def pid(self, rank: int) -> int:
        """The process of a member of this machine; 0 of another's."""
        return self._local.pid(self._here.index(rank)) if rank in self._here else 0

    def has_left(self, rank: int) -> bool:
        if rank in self._here:
            return self._local.has_left(self._here.index(rank))
        return rank in self.departed or (
            self._connections is not None and self._connections.connections[self._machine_of[rank]].left
        )

    def gone(self, rank: int) -> str | None:
        """Why `rank` will not come any more, or None while it may, as far as is known here."""
        if rank in self._here:
            return self._local.gone(self._here.index(rank))
        if self.has_left(rank):
            return LEFT
        if self._connections is not None and not self._connections.connections[self._machine_of[rank]].open:
            return "cannot be reached any more"
        return None

    def where(self, rank: int) -> str:
        return f"rank {self.ranks[rank]} on {self._hosts[self._machine_of[rank]]}"

    @property
    def _own_name(self) -> str:
        return f"rank {self.ranks[self.rank]}"

    # -- barrier -----------------------------------------------------------------------------------------------------

    def wait(self, intent: BarrierKind, length: int = 0, trouble: TeamError | None = None) -> BarrierKind:
        """Waits for all members at the next barrier; returns its kind.

        trouble: an error of this member, which all members raise.
        """
        if self._carried is not None:
            self._check_carried(intent)
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
            raise unpack_error(self._state[_STATE.size : _STATE.size + size])
        assert number == self._count
        if last >= 0:
            self.last = last
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent)

    def _bring(self, intent: BarrierKind, length: int, trouble: TeamError | None) -> list[memoryview]:
        """Begins the next barrier with this member's note; returns the slots of all members."""
        self._count += 1
        slots = self._slots[self._count & 1]
        if trouble is not None:
            text = pack_error(trouble)
            slots[self.rank][SLOT.size : SLOT.size + len(text)] = text
            length = len(text)
        SLOT.pack_into(slots[self.rank], 0, int(intent) if trouble is None else TROUBLE, length, 0)
        return slots

    def _refuse_departed(self, intent: BarrierKind) -> None:
        try:
            super()._refuse_departed(intent)
        except WorkerLost as error:
            self._tell(error)
            raise

    def _told(self, error: TeamError, trouble: TeamError | None) -> TeamError:
        """The error to raise here; the other machines are told of it."""
        self._tell(error)
        return trouble if trouble is not None and not isinstance(error, WorkerLost) else error

    def _tell(self, error: TeamError) -> None:
        if self._connections is not None:
            self._connections.send_all(FrameKind.FAILURE, pack_error(error))
            self._connections.settle(1.0)

    def _wait_for_lead(self, intent: BarrierKind) -> None:
        """The second step on this machine; longer than the timeout, as the lead waits for others and reports them."""
        timeouts = self.timeouts
        self.timeouts = msgspec.structs.replace(timeouts, barrier=timeouts.barrier + 2 * self._grace, notice=1e9)
        try:
            self._local.come(intent)
        except TeamError as error:
            raise self._told(error, None) from None
        finally:
            self.timeouts = timeouts

    @property
    def _grace(self) -> float:
        """Extra seconds, so that the member closest to a missing one reports it first."""
        return 0.5 + 0.1 * min(self.timeouts.barrier, 15.0)

    def _without_lead(self, intent: BarrierKind) -> BarrierKind:
        """The barrier after the lead's script has ended: nothing is left to do at the end of this epoch."""
        self.departed.update(rank for rank in range(self.size) if rank != self.rank)
        self.passive = [True] * self.size
        return intent

    def _topic(self, slots: list[memoryview]) -> BarrierKind:
        """The kind of barrier that the members of this machine are at."""
        found = [SLOT.unpack_from(slots[rank])[0] for rank in self._here if rank not in self.departed]
        return BarrierKind(max([intent for intent in found if intent > 0], default=0))

    def _agree(self, intent: BarrierKind) -> BarrierKind:
        topic = super()._agree(intent)
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
        text = b"" if failure is None else pack_error(failure)
        self._state[_STATE.size : _STATE.size + len(text)] = text
        _STATE.pack_into(self._state, 0, len(text), last, self._count)

    def _collect(self, topic: BarrierKind) -> int:
        """Waits for the notes of all other machines; returns the rank that came last, -1 if it is on this machine."""
        assert self._connections is not None
        waiting = {number for number in self._connections.connections if self._machines[number][0] not in self.departed}
        last, waited_for = -1, False
        start = time.monotonic()
        notice, limit = self.timeouts.notice, self.timeouts.barrier
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
            if waited < min(notice, limit):
                continue
            wait = (self._own_name, waited, self._missing(late), topic.spoken, limit)
            if waited >= limit + self._grace:
                ranks = [self.ranks[rank] for number in sorted(late) for rank in self._machines[number]]
                raise TeamTimeout(waited_too_long(*wait), ranks)
            if waited >= notice:
                self._say(still_waits(*wait))
                notice *= 2

    def _missing(self, machines: set[int]) -> str:
        ranks = {number: [self.ranks[rank] for rank in self._machines[number]] for number in sorted(machines)}
        return " and ".join(f"{names(there)} on {self._hosts[number]}" for number, there in ranks.items())

    def _take(self, number: int, topic: BarrierKind) -> int | None:
        """Takes the notes of a machine, if they have come; returns the rank that came last there."""
        assert self._connections is not None
        connection = self._connections.connections[number]
        while connection.frames:
            kind, payload = connection.frames.popleft()
            if kind is FrameKind.FAILURE:
                raise unpack_error(payload)
            if kind is FrameKind.NOTES:
                return self._unpack(number, payload)
        lead = self._machines[number][0]
        if connection.left or not connection.open:
            if self.spare or (connection.left and topic is BarrierKind.PASSIVE):
                self.departed.update(self._machines[number])
                for rank in self._machines[number]:
                    SLOT.pack_into(self._slots[self._count & 1][rank], 0, 0, 0, 1)
                return lead
            reason = LEFT if connection.left else DIED
            needs = f"{self._own_name} needs it at {topic.spoken}"
            raise WorkerLost(f"{self.where(lead)} {reason}; {needs}", [self.ranks[lead]])
        return None

    def _unpack(self, number: int, payload: memoryview) -> int:
        """Writes a machine's notes into their slots; returns the rank that came last there."""
        count, last, notes = self._notes_of(self._hosts[number], self._machines[number], payload)
        if count != self._count:
            raise TeamError(f"{self._hosts[number]} is at barrier {count}, this machine at {self._count}")
        for note in notes:
            note.write(self._slots[self._count & 1][note.rank])
        return last

    def _notes_of(
        self, sender: str, allowed: Sequence[int], payload: memoryview, ranks: Sequence[int] = ()
    ) -> tuple[int, int, list[Note]]:
        """The notes of a frame, if all are of the allowed ranks. ranks: named by the error if they are not."""
        try:
            number, last, notes = unpack_notes(payload, self.CAPACITY)
        except ValueError:
            notes = []
        if not notes or any(note.rank not in allowed for note in notes):
            raise TeamError(f"what came from {sender} is not a frame of this team", ranks)
        return number, last, notes
