"""Meetings: all members come, each brings a note, everybody reads all notes.

A meeting is at once a barrier, a small all-gather, and the place where it shows that somebody is missing. Members count
their meetings; a member's word in shared memory says how many it has come to. Notes lie in two alternating sets of
slots: nobody can come to meeting n+1 before all have read meeting n-1, so one word per member is all the locking
there is.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamTimeout, WorkerLost, names
from paceline.transport.futex import Words
from paceline.transport.memory import Memory

_HEADER = struct.Struct("=qq")  # intent, length of the note
_STATUS = struct.Struct("=qq")  # pid, whether it has left
_STATUS_STRIDE = 64
_SLICE = 0.1
"""How long a sleeper sleeps before it looks whether those it waits for still live."""
_SPINS = 4000
"""How often to look before sleeping when there is a core for everybody: some two hundred microseconds at most."""
_YIELDS = 1000
"""How often to give the core away before sleeping when there are more members than cores."""


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


class Watch(Protocol):
    """Knows which members live."""

    def lost(self, rank: int) -> str | None:
        """Why `rank` can not come any more, or None while it can."""


@dataclasses.dataclass(slots=True)
class _Waiting:
    """One member's wait in one meeting, for however many others."""

    since: float
    notice: float
    """When next to say for whom."""


class Meeting:
    """One member's chair at all meetings of a team."""

    CAPACITY = 1 << 20
    """The largest note in bytes. Pages of a slot that were never written cost nothing."""

    def __init__(self, memory: Memory, rank: int, size: int, timeouts: Timeouts, say: Callable[[str], None]) -> None:
        self.rank, self.size, self.timeouts, self._say = rank, size, timeouts, say
        self._peers = [peer for peer in range(size) if peer != rank]
        self._words = Words(memory.bytes(0, Words.STRIDE * size), size)
        self._status = [memory.bytes(Words.STRIDE * size + _STATUS_STRIDE * peer, _STATUS.size) for peer in range(size)]
        start = (Words.STRIDE + _STATUS_STRIDE) * size
        start = -(-start // 4096) * 4096
        slot = self.CAPACITY + 4096
        self._slots = [
            [memory.bytes(start + slot * (parity * size + peer), slot) for peer in range(size)] for parity in (0, 1)
        ]
        self._payloads = [[slot[_HEADER.size :] for slot in slots] for slots in self._slots]
        self._count = 0
        self._carried: Intent | None = None
        self._departed: set[int] = set()
        """Who has left for good while this member had nothing more to do with them."""
        self.watch: Watch | None = None
        self._crowded = size > len(os.sched_getaffinity(0))
        self._spins = _YIELDS if self._crowded else _SPINS
        self.notes = self._payloads[0]
        """Everybody's note of the last meeting."""
        self.passive: list[bool] = [False] * size
        """Who came to the last meeting only to help."""
        self.last = rank
        """Who came last to the last meeting, as far as this member saw."""
        self._slowest = list(self._peers)

    @classmethod
    def memory_size(cls, size: int) -> int:
        fixed = (Words.STRIDE + _STATUS_STRIDE) * size
        return fixed + 4096 + 2 * size * (cls.CAPACITY + 4096)

    # -- who is here -------------------------------------------------------------------------------------------------

    def sign_in(self) -> None:
        """Leave this process's id where the others find it."""
        _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), 0)

    def sign_out(self) -> None:
        """Tell the others that this member will not come again."""
        _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), 1)

    def pid(self, rank: int) -> int:
        return int(_STATUS.unpack_from(self._status[rank])[0])

    def has_left(self, rank: int) -> bool:
        return bool(_STATUS.unpack_from(self._status[rank])[1])

    # -- meeting -----------------------------------------------------------------------------------------------------

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
        if self._departed and intent is not Intent.PASSIVE:
            gone = min(self._departed)
            raise WorkerLost(
                f"rank {gone} has left the team: its script has ended; rank {self.rank} needs it at {intent.spoken}",
                [gone],
            )
        self._count += 1
        count = self._count & 0xFFFFFFFF
        slots = self._slots[self._count & 1]
        _HEADER.pack_into(slots[self.rank], 0, intent, length)
        words = self._words
        words.write(self.rank, count)
        before = (count - 1) & 0xFFFFFFFF
        values, step, yield_core = words.values, words.step, os.sched_yield
        self.last = self.rank
        waiting: _Waiting | None = None
        # A member can be one meeting behind or ahead, never two, so "not here yet" is a single value.
        for peer in self._slowest:
            place = peer * step
            if values[place] == before:
                spins = self._spins
                if self._crowded:
                    while spins and values[place] == before:
                        yield_core()
                        spins -= 1
                else:
                    while spins and values[place] == before:
                        spins -= 1
                if values[place] == before:
                    waiting = waiting or _Waiting(time.monotonic(), self.timeouts.notice)
                    self._await(peer, before, intent, waiting)
                self.last = peer
        if self.last != self.rank and self._slowest[0] != self.last:
            # Whoever was late is likely late again: waiting for it first means waking once, not once per peer.
            self._slowest.remove(self.last)
            self._slowest.insert(0, self.last)
        self.notes = self._payloads[self._count & 1]
        return self._agree(intent, slots)

    def carry(self, intent: Intent) -> None:
        """The last meeting, attended passively, counts as this member's own next one."""
        self._carried = intent

    def length(self, rank: int) -> int:
        """The length of `rank`'s note at the last meeting."""
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

    def missing(self) -> list[int]:
        """Who has not come to the meeting that this member waits in."""
        before = (self._count - 1) & 0xFFFFFFFF
        return [peer for peer in self._peers if self._words.values[peer * self._words.step] == before]

    def _await(self, peer: int, before: int, intent: Intent, waiting: _Waiting) -> None:
        words = self._words
        place = peer * words.step
        while words.values[place] == before:
            words.sleep(peer, before, _SLICE)
            if words.values[place] != before:
                return
            waited = time.monotonic() - waiting.since
            if waited < _SLICE / 2:
                continue
            if intent is Intent.PASSIVE and self.has_left(peer):
                # Nothing is asked of it any more: an epoch may well end with somebody's script.
                self._departed.add(peer)
                return
            self._check_alive(intent)
            if waited >= self.timeouts.meeting:
                late = self.missing()
                if late:
                    raise TeamTimeout(
                        f"rank {self.rank} waited {waited:.1f} s for {names(late)} at {intent.spoken}; "
                        f"the timeout is {self.timeouts.meeting:g} s",
                        late,
                    )
            elif waited >= waiting.notice:
                late = self.missing()
                if late:
                    self._say(
                        f"rank {self.rank} waits for {names(late)} at {intent.spoken}: {waited:.0f} s so far, "
                        f"the timeout is {self.timeouts.meeting:g} s"
                    )
                waiting.notice *= 2

    def _check_alive(self, intent: Intent) -> None:
        for peer in self.missing():
            if self.has_left(peer):
                reason: str | None = "has left the team: its script has ended"
            else:
                reason = self.watch.lost(peer) if self.watch else None
            # It may have come, and only then ended: what it brought counts.
            if reason is not None and peer in self.missing():
                raise WorkerLost(
                    f"rank {peer} {reason}; rank {self.rank} was waiting for it at {intent.spoken}", [peer]
                )
