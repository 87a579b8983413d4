"""Steps that all members of a group take together: none begins step n+1 before all have come to step n.

Each member counts its steps in a word of shared memory. There is no other lock: data that a member wrote before a step
can be read by all after it, and stays unchanged until all have come to the next.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.config import Timeouts
from paceline.errors import TeamError, TeamTimeout, WorkerLost, names, still_waits, waited_too_long
from paceline.transport import fence
from paceline.transport.futex import FutexArray
from paceline.transport.memory import Memory

_STATUS = struct.Struct("=qq")  # pid, and one of the states below
_REASON = 240
_STATUS_STRIDE = 256
_HERE, _LEFT, _FAILED, _EVICTED = range(4)
LEFT = "has left the team: its script has ended"
"""Why a member that has signed out will not come any more."""
_SLICE = 0.1
"""Seconds that a member sleeps before it checks whether those it waits for still live."""
_HALTED = 1.0
"""Seconds: a member that has slept longer was halted itself, and does not count the time against the others."""
_SPINS = 4000
"""Looks before sleeping when there is a core for each member: about 200 microseconds."""
_BACKGROUND = 8
"""A background thread looks so many times less often."""
_YIELDS = 1000
"""Yields of the core before sleeping when there are more members than cores."""


class Watch(Protocol):
    """Knows which members live."""

    def lost(self, rank: int) -> str | None:
        """Why `rank` cannot come any more, or None while it can."""

    def end(self, rank: int, patience: float = 0.0) -> bool:
        """Ends a member for good, also one that is stopped; False if that is not allowed.

        patience: seconds in which it may end by itself.
        """


class Topic(Protocol):
    """The purpose of a step."""

    @property
    def spoken(self) -> str:
        """Its name in messages to users."""


class StepCounter:
    """One member's view of the steps that all take."""

    look: Callable[[], None] = staticmethod(lambda: None)
    """Called now and then while this member waits; may raise an error that ends the wait."""

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
        room = room or size
        self.rank, self.size, self.timeouts, self._say = rank, size, timeouts, say
        self._peers = [peer for peer in range(size) if peer != rank]
        self._words = FutexArray(memory.bytes(0, FutexArray.STRIDE * room), room)
        self._status = [
            memory.bytes(FutexArray.STRIDE * room + _STATUS_STRIDE * peer, _STATUS_STRIDE) for peer in range(room)
        ]
        self._count = 0
        self.limit: float | None = None
        """Seconds that this member waits at a step, if it is not the group's timeout."""
        self.watch: Watch | None = None
        self.ranks: Sequence[int] = range(room)
        """The members' ranks in the team, for messages; the members may be a part of it."""
        self.place = ""
        """Their host, for messages: ` on 10.0.0.2`; empty if all are on one."""
        self.closing = False
        """True if this process is ending: its waits give up."""
        self.crowd(size)
        self.last = rank
        """The member that came last to the last step, as far as this one saw."""
        self._slowest = list(self._peers)
        self._notice = timeouts.notice
        """Seconds after which members that are missing at this step are next reported."""
        self._halted = 0.0
        """Seconds of this step's wait in which this process was halted."""

    def crowd(self, workers: int) -> None:
        """Tells how many processes this machine runs, of which only some are members: whether each has a core."""
        self._crowded = workers > len(os.sched_getaffinity(0))
        self._spins = _YIELDS if self._crowded else _SPINS

    @staticmethod
    def fixed_size(size: int) -> int:
        """Bytes of words and states at the start of the memory, a whole number of pages."""
        return -(-(FutexArray.STRIDE + _STATUS_STRIDE) * size // 4096) * 4096

    # -- membership --------------------------------------------------------------------------------------------------

    def sign_in(self) -> None:
        """Writes this process's id where the others find it."""
        _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), _HERE)

    def sign_out(self) -> None:
        """Tells the others that this member will not come again; in a fork of it, does nothing."""
        if _STATUS.unpack_from(self._status[self.rank]) == (os.getpid(), _HERE):
            _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), _LEFT)

    @staticmethod
    def sign_out_absent(memory: Memory, rank: int, room: int) -> None:
        """Tells the members of a group with this room that `rank` will not come, if it has not signed in."""
        status = memory.bytes(FutexArray.STRIDE * room + _STATUS_STRIDE * rank, _STATUS_STRIDE)
        if _STATUS.unpack_from(status)[0] == 0:
            _STATUS.pack_into(status, 0, 0, _LEFT)

    @staticmethod
    def members(memory: Memory, room: int) -> list[int]:
        """Process ids of the members of a group with this room, by rank; 0 for a rank that has never come."""
        first = FutexArray.STRIDE * room
        return [
            _STATUS.unpack_from(memory.bytes(first + _STATUS_STRIDE * rank, _STATUS.size))[0] for rank in range(room)
        ]

    def fail(self, reason: str) -> None:
        """Tells the others that this member has given up, so that none waits for it or writes to it."""
        self._write_reason(self.rank, reason)
        _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), _FAILED)

    def evict(self, rank: int, reason: str, patience: float = 0.0) -> bool:
        """Ends another member, and tells the others why it does not come any more; False if it cannot be ended.

        A process that has ended writes nothing any more, so that the others may go on with all memory that it shared.
        patience: seconds in which it may end by itself.
        """
        # The reason comes first: another member may notice that the process has ended before this one goes on.
        self._write_reason(rank, reason)
        if self.watch is None or not self.watch.end(rank, patience):
            self._write_reason(rank, "")
            return False
        _STATUS.pack_into(self._status[rank], 0, self.pid(rank), _EVICTED)
        return True

    def admit(self, rank: int, pid: int) -> None:
        """Makes a process the member of this rank from the step after the next on; only one member may call it.

        To the others it has taken the next step already, so that they wait for it at the one after that.
        """
        self._write_reason(rank, "")
        _STATUS.pack_into(self._status[rank], 0, pid, _HERE)
        self._words.write(rank, (self._count + 1) & 0xFFFFFFFF)

    def expect(self, rank: int) -> None:
        """Waits for this rank, too, from the next step on."""
        if rank != self.rank and rank not in self._peers:
            self._peers.append(rank)
            self._slowest.append(rank)
            self.crowd(len(self._peers) + 1)

    @property
    def count(self) -> int:
        """Steps that this member has taken."""
        return self._count

    def begin_at(self, count: int) -> None:
        """Joins the others, which have taken so many steps."""
        self._count = count

    def pid(self, rank: int) -> int:
        return int(_STATUS.unpack_from(self._status[rank])[0])

    def has_left(self, rank: int) -> bool:
        return bool(_STATUS.unpack_from(self._status[rank])[1] in (_LEFT, _FAILED))

    def failed(self, rank: int) -> bool:
        return bool(_STATUS.unpack_from(self._status[rank])[1] == _FAILED)

    def gone(self, rank: int) -> str | None:
        """Why `rank` will not come any more, or None while it may."""
        self.look()
        state = _STATUS.unpack_from(self._status[rank])[1]
        if state == _FAILED:
            return f"gave up ({self._reason(rank)})"
        if state == _EVICTED:
            return self._reason(rank)
        if state == _LEFT:
            return LEFT
        lost = self.watch.lost(rank) if self.watch else None
        return lost and (self._reason(rank) or lost)

    def _reason(self, rank: int) -> str:
        return bytes(self._status[rank][_STATUS.size :]).partition(b"\0")[0].decode(errors="replace")

    def _write_reason(self, rank: int, reason: str) -> None:
        text = reason.encode()[: _REASON - 1]
        self._status[rank][_STATUS.size : _STATUS.size + len(text) + 1] = text + b"\0"

    def gone_soon(self, rank: int, seconds: float = 0.5) -> str | None:
        """As `gone`, for a member whose memory is gone already: the kernel frees that first."""
        until = time.monotonic() + seconds
        while (reason := self.gone(rank)) is None and time.monotonic() < until:
            time.sleep(0.005)
        return reason

    # -- steps -------------------------------------------------------------------------------------------------------

    def come(self, topic: Topic, spin: bool = True) -> None:
        """Takes the next step, and waits until all have taken it.

        spin: False for a background thread, which looks only briefly before it sleeps.
        """
        self._count += 1
        count = self._count & 0xFFFFFFFF
        words = self._words
        words.write(self.rank, count)
        before = (count - 1) & 0xFFFFFFFF
        values, step, yield_core = words.values, words.step, os.sched_yield
        self.last = self.rank
        since = 0.0
        # A member can be one step behind or ahead, never two, so "not here yet" is a single value.
        for peer in self._slowest:
            place = peer * step
            if values[place] == before:
                spins = self._spins if spin else self._spins // _BACKGROUND
                if self._crowded:
                    while spins and values[place] == before:
                        yield_core()
                        spins -= 1
                else:
                    while spins and values[place] == before:
                        spins -= 1
                if values[place] == before:
                    if not since:
                        since, self._notice, self._halted = time.monotonic(), self.timeouts.notice, 0.0
                    self._await(peer, before, topic, since)
                self.last = peer
        if fence.WEAK:
            fence.fence()
        if self.last != self.rank and self._slowest[0] != self.last:
            # A late member is likely late again: waiting for it first means waking once, not once per peer.
            self._slowest.remove(self.last)
            self._slowest.insert(0, self.last)

    def called(self, peers: Sequence[int]) -> str:
        """`rank 3`, or `rank 3 on 10.0.0.2`."""
        return names([self.ranks[peer] for peer in peers]) + self.place

    def missing(self) -> list[int]:
        """Members that have not come to the step in which this one waits."""
        before = (self._count - 1) & 0xFFFFFFFF
        return [peer for peer in self._peers if self._words.values[peer * self._words.step] == before]

    def excused(self, peer: int, topic: Topic) -> bool:
        """True if the step can do without `peer`, which has not come."""
        return False

    def evict_late(self, late: Sequence[int], topic: Topic) -> bool:
        """Ends members that have not come in time; False if the others cannot do without them."""
        return False

    def _await(self, peer: int, before: int, topic: Topic, since: float) -> None:
        words = self._words
        place = peer * words.step
        while words.values[place] == before:
            asleep = time.monotonic()
            words.sleep(peer, before, _SLICE)
            if words.values[place] != before:
                return
            now = time.monotonic()
            self._halted += now - asleep if now - asleep > _HALTED else 0.0
            waited = now - since - self._halted
            if self.closing:
                raise TeamError(
                    f"this process ended while it waited for {self.called(self.missing())} at {topic.spoken}"
                )
            if waited < _SLICE / 2:
                continue
            if self.excused(peer, topic):
                return
            self._check_alive(topic)
            late = self.missing()
            limit = self.timeouts.barrier if self.limit is None else self.limit
            wait = (f"rank {self.ranks[self.rank]}", waited, self.called(late), topic.spoken, limit) if late else None
            if waited >= limit:
                if wait and not self.evict_late(late, topic):
                    raise TeamTimeout(waited_too_long(*wait), [self.ranks[peer] for peer in late])
            elif waited >= self._notice:
                if wait:
                    self._say(still_waits(*wait))
                self._notice *= 2

    def _check_alive(self, topic: Topic) -> None:
        for peer in self.missing():
            reason = self.gone(peer)
            # It may have come before it ended: then its part counts.
            if reason is not None and peer in self.missing():
                kind = TeamError if reason.startswith("gave up") else WorkerLost
                raise kind(
                    f"{self.called([peer])} {reason}; rank {self.ranks[self.rank]} was waiting for it at "
                    f"{topic.spoken}",
                    [self.ranks[peer]],
                )
