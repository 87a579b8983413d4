"""Watches for workers that wait too long, or for each other."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamTimeout, still_waits, waited_too_long
from paceline.server.messages import KeepWaiting
from paceline.server.sessions import Session, Sessions, SessionState

TICK = 0.5
"""Seconds between checks."""
_BUSY = (SessionState.COMPUTING, SessionState.DRAWING)
"""States in which a worker waits for no other."""


class WaitMonitor:
    """Reports workers that wait long, and raises an error if it is too long or can never end."""

    def __init__(
        self,
        sessions: Sessions,
        limits: Timeouts,
        resolve: Callable[[], bool],
        lose: Callable[[Session], None],
        say: Callable[[str], None],
    ) -> None:
        """resolve: lets workers go on that wait for each other; returns False if none can.

        lose: goes on without a worker that was ended.
        """
        self._sessions, self._limits, self._resolve, self._lose, self._say = sessions, limits, resolve, lose, say
        self._next = time.monotonic() + TICK
        self._all_waited = False
        """True if all workers waited at the last check."""
        self._notices: dict[int, float] = {}
        """By rank, seconds of waiting after which it is reported again."""

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def check(self) -> None:
        """Evicts workers that are silent for too long while others wait.

        Raises TeamTimeout if one that cannot be spared is, Mismatch if all wait for each other.
        """
        now = time.monotonic()
        if now - self._next > TICK:  # this process was halted, or waited itself: the workers are not late by that
            for session in self._sessions.values():
                session.since += now - self._next
        self._next = now + TICK
        self._evict_silent(now)
        late = [session.rank for session in self._sessions.values() if session.state in _BUSY]
        most = self._limits.barrier * (2 if self._sessions.spare() else 1)
        for session in self._sessions.values() if late else ():
            if session.state is SessionState.COMPUTING:
                continue
            waited, limits = now - session.since, self._limits
            who, others = self._sessions.names([session.rank]), self._sessions.names_and_hosts(late)
            wait = (who, waited, others, session.state.value, limits.barrier)
            if waited >= most:
                raise TeamTimeout(waited_too_long(*wait), self._sessions.processes(late))
            if waited < limits.notice:
                self._notices.pop(session.rank, None)
            elif waited >= self._notices.get(session.rank, 0.0):
                self._notices[session.rank] = 2 * waited
                self._say(still_waits(*wait))
        self._check_deadlock()

    def _evict_silent(self, now: float) -> None:
        """Ends workers that have done nothing for longer than the timeout, if another has waited as long."""
        limit = self._limits.barrier
        waiting = [session for session in self._sessions.values() if session.state is not SessionState.COMPUTING]
        if not self._sessions.spare() or not any(now - session.since >= limit for session in waiting):
            return
        silent = [one for one in self._sessions.values() if one.state in _BUSY and now - one.since >= limit]
        ended = 0
        for session in silent:
            if self._sessions.end(session, f"did nothing for {limit:g} s while others waited and had to be evicted"):
                self._lose(session)
                ended += 1
        for session in self._sessions.values():
            if session.state not in _BUSY:
                session.since = now if ended else session.since  # the others have as long from now on
                self._sessions.send(session, KeepWaiting())

    def _check_deadlock(self) -> None:
        """Raises Mismatch if all workers wait for each other: their scripts differ."""
        stuck = bool(self._sessions) and all(session.state not in _BUSY for session in self._sessions.values())
        before, self._all_waited = self._all_waited, stuck
        # At the first check a closed connection may not have been read yet.
        if not (stuck and before) or self._resolve():
            return
        where: dict[str, list[int]] = {}
        for rank in sorted(self._sessions):
            where.setdefault(self._sessions[rank].state.value, []).append(rank)
        parts = [f"{self._sessions.names_and_hosts(ranks)} for {state}" for state, ranks in where.items()]
        raise Mismatch(
            f"nobody can go on: all wait, {', '.join(parts)}; all workers must do the same", list(self._sessions)
        )
