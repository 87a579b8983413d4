"""The server's door: it stays open while a run goes on, for workers who join it and engines that want one to leave."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import Any

from paceline.cluster.servers import Dismiss
from paceline.config import RunSpec
from paceline.errors import Mismatch, TeamTimeout
from paceline.server.memory import RunMemory
from paceline.server.messages import (
    BeginEpoch,
    BuffersCopied,
    CopyBuffers,
    FromWorker,
    Hello,
    PushGradient,
    RequestLease,
    RunFailed,
    SessionOpened,
    StepCancelled,
    send_parts,
)
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.transport.unix_connection import Closed, Listener, UnixConnection

_PATIENCE = 5.0
"""Seconds that the server waits for somebody to take what it is sent."""
_WAITING = (SessionState.PUSHED, SessionState.ASKING, SessionState.ENTERING)
"""In these states a worker hears what it is told at once."""
_CALLS = (PushGradient, StepCancelled, RequestLease, BeginEpoch)
"""After these it does."""


class Admission:
    """Hears strangers, and lets them in once they have been shown what they need."""

    def __init__(self, listener: Listener, spec: RunSpec, text: bytes, memory: RunMemory, sessions: Sessions) -> None:
        self._listener, self._spec, self._text, self._memory = listener, spec, text, memory
        self._sessions = sessions
        self._strangers: dict[int, UnixConnection[Any]] = {}
        self._arriving: list[Session] = []
        """Who has said hello, and waits until somebody shows what its model has besides parameters."""
        self._epoll: select.epoll | None = None
        self.session: Callable[[Session], None] = lambda _session: None
        """Gives a newcomer its place among the others."""
        self.dismiss: Callable[[int], None] = lambda _rank: None
        """Lets a worker know that it shall leave."""

    def open(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        epoll.register(self._listener.descriptor, select.EPOLLIN)

    def close(self) -> None:
        for connection in [*self._strangers.values(), *(session.connection for session in self._arriving)]:
            connection.close()
        self._listener.close()

    def hear(self, descriptor: int) -> None:
        """Something has happened at the door."""
        assert self._epoll is not None
        if descriptor == self._listener.descriptor:
            connection = self._listener.accept(FromWorker, 0)
            if connection is not None:
                self._strangers[connection.descriptor] = connection
                self._epoll.register(connection.descriptor, select.EPOLLIN)
            return
        if descriptor not in self._strangers:
            return
        connection = self._strangers.pop(descriptor)
        self._epoll.unregister(descriptor)
        try:
            message = connection.receive()
        except Exception:  # it has gone, or speaks another language; that changes nothing here
            connection.close()
            return
        if isinstance(message, Dismiss):
            self.dismiss(message.rank)
            connection.close()
        elif isinstance(message, Hello):
            self._greet(Session(message.rank, message.pid, connection, host=message.host, joined=True, fresh=True))
        else:
            connection.close()

    def _greet(self, session: Session) -> None:
        rank, capacity = session.rank, self._spec.capacity
        if not 0 <= rank < capacity:
            self._refuse(session, f"rank {rank} cannot join: this run has room for ranks 0 to {capacity - 1}")
        elif rank in self._sessions or any(other.rank == rank for other in self._arriving):
            self._refuse(session, f"rank {rank} cannot join: there is a rank {rank} already")
        else:
            self._arriving.append(session)
            waiting = next((other for other in self._sessions.values() if other.state in _WAITING), None)
            if waiting is not None or not self._spec.buffers or not self._sessions:
                self._admit(waiting)

    def _refuse(self, session: Session, why: str) -> None:
        with contextlib.suppress(Closed):
            session.connection.send(RunFailed("JoinError", why, [session.rank]))
        session.connection.close()

    def passing(self, session: Session, message: Any) -> None:
        """A worker has said something: if it waits for the answer, it may show its model to those who have come."""
        if self._arriving and isinstance(message, _CALLS):
            self._admit(session)

    def settle(self) -> None:
        """If nobody is left who could show anything, the newest that is known has to do."""
        if self._arriving and not self._sessions:
            self._admit(None)

    def _admit(self, shows: Session | None) -> None:
        if shows is not None and self._spec.buffers and not self._show(shows):
            return
        for session in self._arriving:
            self.session(session)
        self._arriving.clear()

    def _show(self, session: Session) -> bool:
        self._sessions.tell(session, CopyBuffers())
        try:
            answer = session.connection.receive_within(self._spec.timeouts.barrier)
        except Closed:
            return False  # its end will be heard, and another one asked
        if answer is None:
            raise TeamTimeout(f"rank {session.rank} did not show its model to one who joins", [session.rank])
        if not isinstance(answer, BuffersCopied):
            raise Mismatch(f"rank {session.rank} sent a {type(answer).__name__} instead of its model", [session.rank])
        return True

    def hand_over(self, session: Session) -> None:
        """Give a newcomer the plan and all memory."""
        session.connection.patience_to_send(_PATIENCE)
        with contextlib.suppress(Closed):  # its end will be heard
            session.connection.send(SessionOpened(session.version, session.buffer), self._memory.descriptors)
            send_parts(session.connection, self._text)
