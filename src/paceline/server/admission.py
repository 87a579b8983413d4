"""Admits workers that join a run which has begun, and takes an engine's requests that one leave."""

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
"""Seconds that the server waits for a new worker to receive what it is sent."""
_WAITING = (SessionState.PUSHED, SessionState.REQUESTING, SessionState.ENTERING)
"""States in which a worker receives messages at once."""
_CALLS = (PushGradient, StepCancelled, RequestLease, BeginEpoch)
"""Messages after which a worker is in one of them."""


class Admission:
    """Holds new workers until a present one has copied its model's buffers for them, then admits them."""

    def __init__(
        self,
        listener: Listener,
        spec: RunSpec,
        text: bytes,
        memory: RunMemory,
        sessions: Sessions,
        epoll: select.epoll,
        admit: Callable[[Session], None],
        dismiss: Callable[[int], None],
    ) -> None:
        """text: the spec, encoded. admit: adds a new worker to the run. dismiss: asks a worker to leave."""
        self._listener, self._spec, self._text, self._memory = listener, spec, text, memory
        self._sessions, self._epoll, self._admit, self._dismiss = sessions, epoll, admit, dismiss
        self._unknown: dict[int, UnixConnection[Any]] = {}
        """Connections whose first message has not arrived, by descriptor."""
        self._pending: list[Session] = []
        """Workers that wait for a copy of the model's buffers."""
        epoll.register(listener.descriptor, select.EPOLLIN)

    def close(self) -> None:
        for connection in [*self._unknown.values(), *(session.connection for session in self._pending)]:
            connection.close()
        self._listener.close()

    def receive(self, descriptor: int) -> None:
        """Accepts a connection, or takes the first message of one."""
        if descriptor == self._listener.descriptor:
            connection = self._listener.accept(FromWorker, 0)
            if connection is not None:
                self._unknown[connection.descriptor] = connection
                self._epoll.register(connection.descriptor, select.EPOLLIN)
            return
        if descriptor not in self._unknown:
            return
        connection = self._unknown.pop(descriptor)
        self._epoll.unregister(descriptor)
        try:
            message = connection.receive()
        except Exception:  # closed, or not a message of ours; neither concerns the run
            connection.close()
            return
        if isinstance(message, Dismiss):
            self._dismiss(message.rank)
            connection.close()
        elif isinstance(message, Hello):
            self._add(Session(message.rank, message.pid, connection, host=message.host, joined=True, fresh=True))
        else:
            connection.close()

    def _add(self, session: Session) -> None:
        rank, capacity = session.rank, self._spec.capacity
        if not 0 <= rank < capacity:
            self._reject(session, f"rank {rank} cannot join: this run has room for ranks 0 to {capacity - 1}")
        elif rank in self._sessions or any(other.rank == rank for other in self._pending):
            self._reject(session, f"rank {rank} cannot join: there is a rank {rank} already")
        else:
            self._pending.append(session)
            waiting = next((other for other in self._sessions.values() if other.state in _WAITING), None)
            if waiting is not None or not self._spec.buffers or not self._sessions:
                self._admit_pending(waiting)

    def _reject(self, session: Session, why: str) -> None:
        with contextlib.suppress(Closed):
            session.connection.send(RunFailed("JoinError", why, [session.rank]))
        session.connection.close()

    def before(self, session: Session, message: Any) -> None:
        """Called before a worker's message is handled: if it waits for the reply, it can copy its buffers first."""
        if self._pending and isinstance(message, _CALLS):
            self._admit_pending(session)

    def admit_without_copy(self) -> None:
        """If no worker is left that could copy its buffers, the last copy is used."""
        if self._pending and not self._sessions:
            self._admit_pending(None)

    def _admit_pending(self, source: Session | None) -> None:
        if source is not None and self._spec.buffers and not self._copy_buffers(source):
            return
        for session in self._pending:
            self._admit(session)
        self._pending.clear()

    def _copy_buffers(self, session: Session) -> bool:
        self._sessions.send(session, CopyBuffers())
        try:
            answer = session.connection.receive_within(self._spec.timeouts.barrier)
        except Closed:
            return False  # the coordinator notices that, and another worker is asked
        if answer is None:
            raise TeamTimeout(
                f"rank {session.rank} did not copy its model's buffers for a worker that joins", [session.rank]
            )
        if not isinstance(answer, BuffersCopied):
            raise Mismatch(
                f"rank {session.rank} sent a {type(answer).__name__} instead of its model's buffers", [session.rank]
            )
        return True

    def send_run(self, session: Session) -> None:
        """Sends a new worker the run's spec and memory."""
        session.connection.patience_to_send(_PATIENCE)
        with contextlib.suppress(Closed):  # the coordinator notices that
            session.connection.send(SessionOpened(session.version, session.buffer), self._memory.descriptors)
            send_parts(session.connection, self._text)
