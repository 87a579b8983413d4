"""Going in step: nobody begins step n+1 before all members have come to step n.

Members count their steps; a member's word in shared memory says how many it has taken. That one word per member is all
the locking there is: what a member wrote before a step can be read by all after it, and stays untouched until all have
come to the next.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.config import Timeouts
from paceline.errors import TeamError, TeamTimeout, WorkerLost, names
from paceline.transport.futex import FutexArray
from paceline.transport.memory import Memory

_STATUS = struct.Struct("=qq")  # pid, and one of the states below
_REASON = 240
_STATUS_STRIDE = 256
_HERE, _LEFT, _FAILED = range(3)
_SLICE = 0.1
"""How long a sleeper sleeps before it looks whether those it waits for still live."""
_SPINS = 4000
"""How often to look before sleeping when there is a core for everybody: some two hundred microseconds at most."""
_BACKGROUND = 8
"""A thread in the background looks so many times less often."""
_YIELDS = 1000
"""How often to give the core away before sleeping when there are more members than cores."""


class Watch(Protocol):
    """Knows which members live."""

    def lost(self, rank: int) -> str | None:
        """Why `rank` can not come any more, or None while it can."""


class Topic(Protocol):
    """What members come together for."""

    @property
    def spoken(self) -> str:
        """As it is called in a message to people."""


@dataclasses.dataclass(slots=True)
class _Waiting:
    """One member's wait in one step, for however many others."""

    since: float
    notice: float
    """When next to say for whom."""


class StepCounter:
    """One member's view of the steps that all take."""

    def __init__(self, memory: Memory, rank: int, size: int, timeouts: Timeouts, say: Callable[[str], None]) -> None:
        self.rank, self.size, self.timeouts, self._say = rank, size, timeouts, say
        self._peers = [peer for peer in range(size) if peer != rank]
        self._words = FutexArray(memory.bytes(0, FutexArray.STRIDE * size), size)
        self._status = [
            memory.bytes(FutexArray.STRIDE * size + _STATUS_STRIDE * peer, _STATUS_STRIDE) for peer in range(size)
        ]
        self._count = 0
        self.watch: Watch | None = None
        self.ranks: Sequence[int] = range(size)
        """What the members are called where people read it: their ranks in the team, of which these may be a part."""
        self.place = ""
        """Where they are, if that must be said: ` on 10.0.0.2`."""
        self.closing = False
        """This process is ending: whoever still waits in it gives up."""
        self._crowded = size > len(os.sched_getaffinity(0))
        self._spins = _YIELDS if self._crowded else _SPINS
        self.last = rank
        """Who came last to the last step, as far as this member saw."""
        self._slowest = list(self._peers)

    def crowd(self, workers: int) -> None:
        """There are so many on this machine, of whom only some are members here: a core for each, or not."""
        self._crowded = workers > len(os.sched_getaffinity(0))
        self._spins = _YIELDS if self._crowded else _SPINS

    @staticmethod
    def fixed_size(size: int) -> int:
        """Bytes at the start of the memory that words and states take, up to a whole page."""
        return -(-(FutexArray.STRIDE + _STATUS_STRIDE) * size // 4096) * 4096

    # -- who is here -------------------------------------------------------------------------------------------------

    def sign_in(self) -> None:
        """Leave this process's id where the others find it."""
        _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), _HERE)

    def sign_out(self) -> None:
        """Tell the others that this member will not come again."""
        if _STATUS.unpack_from(self._status[self.rank])[1] == _HERE:
            _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), _LEFT)

    def fail(self, reason: str) -> None:
        """Tell the others that this member gave up in the middle, so that nobody waits for it or writes to it."""
        text = reason.encode()[: _REASON - 1]
        self._status[self.rank][_STATUS.size : _STATUS.size + len(text) + 1] = text + b"\0"
        _STATUS.pack_into(self._status[self.rank], 0, os.getpid(), _FAILED)

    def pid(self, rank: int) -> int:
        return int(_STATUS.unpack_from(self._status[rank])[0])

    def has_left(self, rank: int) -> bool:
        return bool(_STATUS.unpack_from(self._status[rank])[1])

    def failed(self, rank: int) -> bool:
        return bool(_STATUS.unpack_from(self._status[rank])[1] == _FAILED)

    def gone(self, rank: int) -> str | None:
        """Why `rank` will not come any more, or None while it may."""
        state = _STATUS.unpack_from(self._status[rank])[1]
        if state == _FAILED:
            reason = bytes(self._status[rank][_STATUS.size :]).partition(b"\0")[0].decode(errors="replace")
            return f"gave up ({reason})"
        if state == _LEFT:
            return "has left the team: its script has ended"
        return self.watch.lost(rank) if self.watch else None

    def gone_soon(self, rank: int, seconds: float = 0.5) -> str | None:
        """As `gone`, of somebody whose memory is not there any more: the kernel takes that away first."""
        until = time.monotonic() + seconds
        while (reason := self.gone(rank)) is None and time.monotonic() < until:
            time.sleep(0.005)
        return reason

    # -- steps -------------------------------------------------------------------------------------------------------

    def come(self, topic: Topic, spin: bool = True) -> None:
        """Take the next step and wait until all have taken it.

        spin: look for a while before sleeping; a thread in the background does so only briefly: it holds up the rest.
        """
        self._count += 1
        count = self._count & 0xFFFFFFFF
        words = self._words
        words.write(self.rank, count)
        before = (count - 1) & 0xFFFFFFFF
        values, step, yield_core = words.values, words.step, os.sched_yield
        self.last = self.rank
        waiting: _Waiting | None = None
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
                    waiting = waiting or _Waiting(time.monotonic(), self.timeouts.notice)
                    self._await(peer, before, topic, waiting)
                self.last = peer
        if self.last != self.rank and self._slowest[0] != self.last:
            # Whoever was late is likely late again: waiting for it first means waking once, not once per peer.
            self._slowest.remove(self.last)
            self._slowest.insert(0, self.last)

    def called(self, peers: Sequence[int]) -> str:
        """`rank 3`, or `rank 3 on 10.0.0.2`."""
        return names([self.ranks[peer] for peer in peers]) + self.place

    def missing(self) -> list[int]:
        """Who has not come to the step that this member waits in."""
        before = (self._count - 1) & 0xFFFFFFFF
        return [peer for peer in self._peers if self._words.values[peer * self._words.step] == before]

    def excused(self, peer: int, topic: Topic) -> bool:
        """Whether the step can do without `peer`, who has not come."""
        return False

    def _await(self, peer: int, before: int, topic: Topic, waiting: _Waiting) -> None:
        words = self._words
        place = peer * words.step
        while words.values[place] == before:
            words.sleep(peer, before, _SLICE)
            if words.values[place] != before:
                return
            waited = time.monotonic() - waiting.since
            if self.closing:
                raise TeamError(
                    f"this process ended while it waited for {self.called(self.missing())} at {topic.spoken}"
                )
            if waited < _SLICE / 2:
                continue
            if self.excused(peer, topic):
                return
            self._check_alive(topic)
            if waited >= self.timeouts.barrier:
                late = self.missing()
                if late:
                    raise TeamTimeout(
                        f"rank {self.ranks[self.rank]} waited {waited:.1f} s for {self.called(late)} at "
                        f"{topic.spoken}; the timeout is {self.timeouts.barrier:g} s",
                        [self.ranks[peer] for peer in late],
                    )
            elif waited >= waiting.notice:
                late = self.missing()
                if late:
                    self._say(
                        f"rank {self.ranks[self.rank]} waits for {self.called(late)} at {topic.spoken}: "
                        f"{waited:.0f} s so far, "
                        f"the timeout is {self.timeouts.barrier:g} s"
                    )
                waiting.notice *= 2

    def _check_alive(self, topic: Topic) -> None:
        for peer in self.missing():
            reason = self.gone(peer)
            # It may have come, and only then ended: what it brought counts.
            if reason is not None and peer in self.missing():
                kind = TeamError if reason.startswith("gave up") else WorkerLost
                raise kind(
                    f"{self.called([peer])} {reason}; rank {self.ranks[self.rank]} was waiting for it at "
                    f"{topic.spoken}",
                    [self.ranks[peer]],
                )
