"""Meetings: all members come, each brings a note, everybody reads all notes.

A meeting is at once a barrier, a small all-gather, and the place where it shows that somebody is missing. Each
meeting is one step that all take; notes lie in two alternating sets of slots, as nobody can come to meeting n+1 before
all have read meeting n-1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

from paceline.config import Timeouts
from paceline.errors import Mismatch, WorkerLost
from paceline.transport.memory import Memory
from paceline.transport.steps import Steps, Topic

_HEADER = struct.Struct("=qq")  # intent, length of the note


class Intent(IntEnum):
    """What a member comes to a meeting for. All must come for the same, or be passive."""

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
    Intent.PASSIVE: "the end of an epoch",
    Intent.BARRIER: "a barrier",
    Intent.GATHER: "an exchange of values",
    Intent.EPOCH: "the start of an epoch",
    Intent.UPDATE: "an update (optimizer.step)",
    Intent.REDUCE: "the end of a backward pass",
    Intent.CLIP: "clip_grad_norm_",
    Intent.PUBLISH: "the end of an update",
    Intent.ALLOCATE: "setup",
    Intent.STATISTICS: "a synchronised batch norm",
}


class Meeting(Steps):
    """One member's chair at all meetings of a team."""

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
        self._carried: Intent | None = None
        self._departed: set[int] = set()
        """Who has left for good while this member had nothing more to do with them."""
        self.spare = False
        """Whether the others can go on when one is lost."""
        self.notes = self._payloads[0]
        """Everybody's note of the last meeting."""
        self.passive: list[bool] = [False] * size
        """Who came to the last meeting only to help."""

    @property
    def departed(self) -> frozenset[int]:
        """Who was not at the last meeting because it has died or left."""
        return frozenset(self._departed)

    @classmethod
    def memory_size(cls, size: int) -> int:
        return cls.fixed_size(size) + 2 * size * (cls.CAPACITY + 4096)

    @property
    def note(self) -> memoryview:
        """Where to write this member's note for the next meeting."""
        return self._payloads[(self._count + 1) & 1][self.rank]

    def meet(self, intent: Intent, length: int = 0) -> Intent:
        """Come to the next meeting and wait for all; returns what it was about.

        A passive member may find that the others came for something that it must do itself: it says so with
        `carry`, and then its own next meeting of that kind is the one just held.
        """
        if self._carried is not None:
            carried, self._carried = self._carried, None
            if carried is not intent:
                raise Mismatch(
                    f"rank {self.rank} is at {intent.spoken} while the others are at {carried.spoken}: "
                    "all workers must do the same"
                )
            return intent
        if self._departed and intent is not Intent.PASSIVE and not self.spare:
            gone = min(self._departed)
            raise WorkerLost(
                f"rank {gone} has left the team: its script has ended; rank {self.rank} needs it at {intent.spoken}",
                [gone],
            )
        slots = self._slots[(self._count + 1) & 1]
        _HEADER.pack_into(slots[self.rank], 0, intent, length)
        self.come(intent)
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent, slots)

    def excused(self, peer: int, topic: Topic) -> bool:
        """An epoch may well end with somebody's script: nothing is asked of it any more."""
        excused = self.gone(peer) is not None if self.spare else topic is Intent.PASSIVE and self.has_left(peer)
        if excused:
            self._departed.add(peer)
        return excused

    def carry(self, intent: Intent) -> None:
        """The last meeting, attended passively, counts as this member's own next one."""
        self._carried = intent

    def length(self, rank: int) -> int:
        """The length of `rank`'s note at the last meeting; 0 of somebody who was not there."""
        if rank in self._departed:
            return 0
        return int(_HEADER.unpack_from(self._slots[self._count & 1][rank])[1])

    def _agree(self, intent: Intent, slots: list[memoryview]) -> Intent:
        topic = intent
        for rank, slot in enumerate(slots):
            other = 0 if rank in self._departed else _HEADER.unpack_from(slot)[0]
            self.passive[rank] = other == 0
            if other in (topic, 0):
                continue
            if topic == 0:
                topic = Intent(other)
                continue
            raise Mismatch(
                f"rank {rank} is at {Intent(other).spoken} while rank {self.rank} is at {topic.spoken}: "
                "all workers must do the same",
                [rank],
            )
        return topic
