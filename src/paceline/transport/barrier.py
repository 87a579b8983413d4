"""Barriers of the members on one machine: all wait for each other, each with a note that all read.

A barrier is also a small all-gather, and finds members that are missing. Each barrier is one step of a `StepCounter`.
Notes lie in two alternating sets of slots, as no member can be at barrier n+1 before all have read those of n-1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Self

import msgspec

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamError, WorkerLost, error_from
from paceline.transport.memory import Memory
from paceline.transport.step_counter import LEFT, StepCounter, Topic

SLOT = struct.Struct("=qqq")  # intent, length of the note, whether and how its writer has departed
TROUBLE = -1
"""The intent of a member that has an error for all."""
_PAGE = 4096


class BarrierKind(IntEnum):
    """The purpose of a barrier. All members must come with the same kind, or passively."""

    spoken: str
    """Its name in messages to users."""

    def __new__(cls, number: int, spoken: str = "") -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.spoken = number, spoken
        return kind

    PASSIVE = 0, "the end of an epoch"
    BARRIER = 1, "a barrier"
    GATHER = 2, "an exchange of values"
    EPOCH = 3, "the start of an epoch"
    UPDATE = 4, "an update (optimizer.step)"
    REDUCE = 5, "a look at the team's gradient"
    CLIP = 6, "clip_grad_norm_"
    PUBLISH = 7, "the end of an update"
    ALLOCATE = 8, "setup"
    STATISTICS = 9, "a synchronised batch norm"
    COUNT = 10, "the start of a backward pass"
    STREAM = 11, "the end of its stream"
    EVALUATE = 12, "the start of an evaluation of a split model"
    ADMIT = 13, "the admission of a worker"
    COMMIT = 14, "a change of parameters by the script"


class BarrierNotes:
    """The notes of all members in shared memory, and one member's knowledge of the others."""

    CAPACITY = 1 << 20
    """The largest note in bytes. Pages of a slot that were never written cost nothing."""

    rank: int
    ranks: Sequence[int]
    spare: bool
    """True if the others can go on when one is lost."""
    explain: Callable[[], None] = staticmethod(lambda: None)
    """Called if members have come for different things; may raise an error that says why."""
    _count: int

    def _place_notes(self, memory: Memory, start: int, size: int, room: int | None = None) -> None:
        """room: members that there is room for, if more than `size` may come."""
        self._memory, self._start, self._room = memory, start, room or size
        self._slots: list[list[memoryview]] = [[], []]
        self._heads: list[list[memoryview]] = [[], []]
        """The fields of `SLOT`, which are quicker to read so than to unpack."""
        self._payloads: list[list[memoryview]] = [[], []]
        self._carried: BarrierKind | None = None
        self.departed: set[int] = set()
        """Members that have left, and that this one no longer needs."""
        self.notes = self._payloads[0]
        """Everybody's note of the last barrier."""
        self.passive: list[bool] = []
        """By rank, True if it was passive at the last barrier."""
        self.widen(size)

    def widen(self, size: int) -> None:
        """Reads the notes of all ranks below this from now on."""
        length = self.CAPACITY + _PAGE
        for peer in range(len(self.passive), size):
            for parity in (0, 1):
                slot = self._memory.bytes(self._start + length * (parity * self._room + peer), length)
                self._slots[parity].append(slot)
                self._heads[parity].append(slot[: SLOT.size].cast("q"))
                self._payloads[parity].append(slot[SLOT.size :])
            self.passive.append(False)

    @classmethod
    def _notes_size(cls, size: int) -> int:
        return 2 * size * (cls.CAPACITY + _PAGE)

    @property
    def evicted(self) -> set[int]:
        """Members that were too late, if it is not certain that one of their machine has ended them."""
        return set()

    def where(self, rank: int) -> str:
        """`rank 3`, or `rank 3 on 10.0.0.2`."""
        raise NotImplementedError

    @property
    def note(self) -> memoryview:
        """Where to write this member's note for the next barrier."""
        return self._payloads[(self._count + 1) & 1][self.rank]

    def length(self, rank: int) -> int:
        """The length of `rank`'s note at the last barrier; 0 if it did not take part."""
        if rank in self.departed:
            return 0
        return self._heads[self._count & 1][rank][1]

    def carry(self, intent: BarrierKind) -> None:
        """The last barrier, attended passively, counts as this member's own next one."""
        self._carried = intent

    def _check_carried(self, intent: BarrierKind) -> None:
        """The last barrier counts as this one, so it must be of the same kind."""
        carried, self._carried = self._carried, None
        if carried is not None and carried is not intent:
            raise Mismatch(
                f"{self._own_name} is at {intent.spoken} while the others are at {carried.spoken}: "
                "all workers must do the same"
            )

    @property
    def _own_name(self) -> str:
        return self.where(self.rank)

    def _refuse_departed(self, intent: BarrierKind) -> None:
        if self.departed and intent is not BarrierKind.PASSIVE and not self.spare:
            gone = min(self.departed)
            raise WorkerLost(
                f"{self.where(gone)} {LEFT}; rank {self.ranks[self.rank]} needs it at {intent.spoken}",
                [self.ranks[gone]],
            )

    def _agree(self, intent: BarrierKind) -> BarrierKind:
        """The kind of barrier that all members are at; raises an error that one of them has for all."""
        topic = intent
        trouble: TeamError | None = None
        for rank, head in enumerate(self._heads[self._count & 1]):
            other = head[0]
            if head[2] or rank in self.departed:
                self.departed.add(rank)
                other = 0
            self.passive[rank] = other == 0
            if other in (topic, 0):
                continue
            if other == TROUBLE:
                error = unpack_error(self._payloads[self._count & 1][rank][: head[1]])
                # A member that lost a connection knows more than one that only waited.
                if trouble is None or (isinstance(error, WorkerLost) and not isinstance(trouble, WorkerLost)):
                    trouble = error
            elif topic == 0 or (topic, other) == (BarrierKind.UPDATE, BarrierKind.REDUCE):
                topic = BarrierKind(other)
            elif (topic, other) == (BarrierKind.REDUCE, BarrierKind.UPDATE):
                continue  # a member that has not looked at the gradient; its update comes after it
            else:
                self.explain()
                raise Mismatch(
                    f"{self.where(rank)} is at {BarrierKind(other).spoken} while {self.where(self.rank)} is at "
                    f"{topic.spoken}: all workers must do the same",
                    [self.ranks[rank]],
                )
        if trouble is not None:
            raise trouble
        return topic


class Barrier(BarrierNotes, StepCounter):
    """One member's part in all barriers of a team."""

    def __init__(
        self,
        memory: Memory,
        rank: int,
        size: int,
        timeouts: Timeouts,
        say: Callable[[str], None],
        room: int | None = None,
    ) -> None:
        """room: members that the memory has room for, if more than `size` may come."""
        super().__init__(memory, rank, size, timeouts, say, room)
        self._place_notes(memory, self.fixed_size(room or size), size, room)
        self.spare = False

    @classmethod
    def memory_size(cls, size: int) -> int:
        return cls.fixed_size(size) + cls._notes_size(size)

    def where(self, rank: int) -> str:
        return self.called([rank])

    def wait(self, intent: BarrierKind, length: int = 0) -> BarrierKind:
        """Waits for all members at the next barrier; returns its kind.

        A passive member may find that the others are at a barrier which its own script will reach, too: it calls
        `carry`, and its next barrier of that kind is the one just held.
        """
        if self._carried is not None:
            self._check_carried(intent)
            return intent
        if self.departed:
            self._refuse_departed(intent)
        turn = (self._count + 1) & 1
        head = self._heads[turn][self.rank]
        head[0], head[1] = intent, length
        self.come(intent)
        self.notes = self._payloads[turn]
        return self._agree(intent)

    def excused(self, peer: int, topic: Topic) -> bool:
        """True if `peer` is not needed: its script may end with the epoch."""
        excused = self.gone(peer) is not None if self.spare else topic is BarrierKind.PASSIVE and self.has_left(peer)
        if excused and peer in self.missing():  # else it has come before it ended, and its part counts
            self.departed.add(peer)
        return excused

    def evict_late(self, late: Sequence[int], topic: Topic) -> bool:
        return self.spare and all(self.evict(peer, evicted(topic, self.timeouts.barrier)) for peer in late)


def evicted(topic: Topic, limit: float) -> str:
    """Why a member that was late at a barrier does not come any more, as a verb of a message."""
    return f"did not come to {topic.spoken} within {limit:g} s and had to be evicted"


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    message: str
    ranks: list[int]


def pack_error(error: TeamError) -> bytes:
    """An error, for the other members."""
    return msgspec.msgpack.encode(_Failure(type(error).__name__, str(error)[:2000], list(error.ranks)))


def unpack_error(text: bytes | memoryview) -> TeamError:
    failure = msgspec.msgpack.decode(text, type=_Failure)
    return error_from(failure.kind, failure.message, failure.ranks)
