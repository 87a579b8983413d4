"""Barriers of the members on one machine: all wait for each other, each with a note that all read.

A barrier is also a small all-gather, and finds members that are missing. Each barrier is one step of a `StepCounter`.
Notes lie in two alternating sets of slots, as no member can be at barrier n+1 before all have read those of n-1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

from paceline.config import Timeouts
from paceline.errors import Mismatch, WorkerLost
from paceline.transport.memory import Memory
from paceline.transport.step_counter import StepCounter, Topic

_HEADER = struct.Struct("=qq")  # intent, length of the note


class BarrierKind(IntEnum):
    """The purpose of a barrier. All members must come with the same kind, or passively."""

    PASSIVE = 0
    BARRIER = 1
    GATHER = 2
    EPOCH = 3
    UPDATE = 4
    REDUCE = 5
    CLIP = 6
    PUBLISH = 7
    ALLOCATE = 8
    STATISTICS = 9

    @property
    def spoken(self) -> str:
        return _SPOKEN[self]


_SPOKEN = {
    BarrierKind.PASSIVE: "the end of an epoch",
    BarrierKind.BARRIER: "a barrier",
    BarrierKind.GATHER: "an exchange of values",
    BarrierKind.EPOCH: "the start of an epoch",
    BarrierKind.UPDATE: "an update (optimizer.step)",
    BarrierKind.REDUCE: "the end of a backward pass",
    BarrierKind.CLIP: "clip_grad_norm_",
    BarrierKind.PUBLISH: "the end of an update",
    BarrierKind.ALLOCATE: "setup",
    BarrierKind.STATISTICS: "a synchronised batch norm",
}


class Barrier(StepCounter):
    """One member's part in all barriers of a team."""

    CAPACITY = 1 << 20
    """The largest note in bytes. Pages of a slot that were never written cost nothing."""

    def __init__(self, memory: Memory, rank: int, size: int, timeouts: Timeouts, say: Callable[[str], None]) -> None:
        super().__init__(memory, rank, size, timeouts, say)
        start = self.fixed_size(size)
        slot = self.CAPACITY + 4096
        self._slots = [
            [memory.bytes(start + slot * (parity * size + peer), slot) for peer in range(size)] for parity in (0, 1)
        ]
        self._payloads = [[slot[_HEADER.size :] for slot in slots] for slots in self._slots]
        self._carried: BarrierKind | None = None
        self.departed: set[int] = set()
        """Members that have left, and that this one no longer needs."""
        self.spare = False
        """True if the others can go on when one is lost."""
        self.notes = self._payloads[0]
        """Everybody's note of the last barrier."""
        self.passive: list[bool] = [False] * size
        """By rank, True if it was passive at the last barrier."""

    @classmethod
    def memory_size(cls, size: int) -> int:
        return cls.fixed_size(size) + 2 * size * (cls.CAPACITY + 4096)

    @property
    def note(self) -> memoryview:
        """Where to write this member's note for the next barrier."""
        return self._payloads[(self._count + 1) & 1][self.rank]

    def wait(self, intent: BarrierKind, length: int = 0) -> BarrierKind:
        """Waits for all members at the next barrier; returns its kind.

        A passive member may find that the others are at a barrier which its own script will reach, too: it calls
        `carry`, and its next barrier of that kind is the one just held.
        """
        if self._carried is not None:
            carried, self._carried = self._carried, None
            if carried is not intent:
                raise Mismatch(
                    f"{self.called([self.rank])} is at {intent.spoken} while the others are at {carried.spoken}: "
                    "all workers must do the same"
                )
            return intent
        if self.departed and intent is not BarrierKind.PASSIVE and not self.spare:
            gone = min(self.departed)
            raise WorkerLost(
                f"{self.called([gone])} has left the team: its script has ended; "
                f"rank {self.ranks[self.rank]} needs it at {intent.spoken}",
                [self.ranks[gone]],
            )
        slots = self._slots[(self._count + 1) & 1]
        _HEADER.pack_into(slots[self.rank], 0, intent, length)
        self.come(intent)
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent, slots)

    def excused(self, peer: int, topic: Topic) -> bool:
        """True if `peer` is not needed: its script may end with the epoch."""
        excused = self.gone(peer) is not None if self.spare else topic is BarrierKind.PASSIVE and self.has_left(peer)
        if excused:
            self.departed.add(peer)
        return excused

    def carry(self, intent: BarrierKind) -> None:
        """The last barrier, attended passively, counts as this member's own next one."""
        self._carried = intent

    def length(self, rank: int) -> int:
        """The length of `rank`'s note at the last barrier; 0 if it did not take part."""
        if rank in self.departed:
            return 0
        return int(_HEADER.unpack_from(self._slots[self._count & 1][rank])[1])

    def _agree(self, intent: BarrierKind, slots: list[memoryview]) -> BarrierKind:
        topic = intent
        for rank, slot in enumerate(slots):
            other = 0 if rank in self.departed else _HEADER.unpack_from(slot)[0]
            self.passive[rank] = other == 0
            if other in (topic, 0):
                continue
            if topic == 0:
                topic = BarrierKind(other)
                continue
            raise Mismatch(
                f"{self.called([rank])} is at {BarrierKind(other).spoken} while {self.called([self.rank])} is at "
                f"{topic.spoken}: all workers must do the same",
                [self.ranks[rank]],
            )
        return topic
