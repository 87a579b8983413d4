"""Admits workers that join a run which has begun, and takes an engine's requests that one leave."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import failpoints
from paceline.cluster.servers import Dismiss
from paceline.config import RunSpec
from paceline.errors import Mismatch, TeamTimeout
from paceline.server.journal import EntryKind, Journal
from paceline.server.memory import RunMemory
from paceline.server.messages import (
    BeginEpoch,
    BuffersCopied,
    CopyBuffers,
    FromWorker,
    Hello,
    PushGradient,
    RequestLease,
    Resume,
    RunFailed,
    SessionOpened,
    ShardHello,
    StepCancelled,
    WorkerGone,
)
from paceline.server.parts import send_parts
from paceline.server.session_link import SessionLink
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.server.shard_set import ShardSet
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
        shards: ShardSet,
        journal: Journal,
        admit: Callable[[Session], None],
        dismiss: Callable[[int], None],
    ) -> None:
        """text: the spec, encoded. admit: adds a new worker to the run. dismiss: asks a worker to leave."""
        self._listener, self._spec, self._text, self._memory = listener, spec, text, memory
        self._sessions, self._shards, self._journal = sessions, shards, journal
        self._admit, self._dismiss = admit, dismiss
        self._unknown: dict[int, UnixConnection[Any]] = {}
        """Connections whose first message has not arrived, by descriptor."""
        self.pending: list[Session] = []
        """Workers that wait for a copy of the model's buffers."""
        self._postponed: list[tuple[UnixConnection[Any], Any]] = []
        """Connections with first messages that came while the coordinator was in the middle of something."""
        self.came_back: list[int] = []
        """Numbers of the servers that are back after they were killed, until that is recorded."""
        for session in sessions.values():
            if isinstance(session.connection, SessionLink):
                session.connection.meet = self.meet
        sessions.epoll.register(listener.descriptor, select.EPOLLIN)

    def close(self) -> None:
        for connection in [*self._unknown.values(), *(session.connection for session in self.pending)]:
            connection.close()
        self._listener.close()

    def receive(self, descriptor: int) -> None:
        """Accepts a connection, or takes the first message of one."""
        if descriptor == self._listener.descriptor:
            connection = self._listener.accept(FromWorker, 0)
            if connection is not None:
                self._unknown[connection.descriptor] = connection
                self._sessions.epoll.register(connection.descriptor, select.EPOLLIN)
            return
        if descriptor not in self._unknown:
            return
        self._take(descriptor, self._handle)

    def _take(self, descriptor: int, handle: Callable[[UnixConnection[Any], Any], None]) -> None:
        """Passes on the first message of a connection."""
        connection = self._unknown.pop(descriptor)
        self._sessions.epoll.unregister(descriptor)
        try:
            message = connection.receive()
        except Exception:  # closed, or not a message of ours; neither concerns the run
            connection.close()
            return
        handle(connection, message)

    def _handle(self, connection: UnixConnection[Any], message: Any) -> None:
        if self._reconnect(connection, message):
            return
        if isinstance(message, Dismiss):
            self._journal.add(EntryKind.DISMISS, message.rank)
            self._dismiss(message.rank)
            connection.close()
        elif isinstance(message, Hello):
            self._greet(message, connection)
        else:
            connection.close()

    # -- after a server was killed -----------------------------------------------------------------------------------

    def meet(self, seconds: float) -> None:
        """Lets workers and servers connect again for so many seconds, in the middle of something; others wait."""
        poll = select.poll()
        for descriptor in (self._listener.descriptor, *self._unknown):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(max(0, int(seconds * 1e3))):
            if descriptor in self._unknown:
                self._take(descriptor, self._meet_one)
            else:
                self.receive(descriptor)

    def _meet_one(self, connection: UnixConnection[Any], message: Any) -> None:
        # What a worker may have to send again is only known once the journal is read.
        early = self._journal.replaying and not isinstance(message, ShardHello)
        if early or not self._reconnect(connection, message):
            self._postponed.append((connection, message))

    def receive_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for connection, message in postponed:
            self._handle(connection, message)

    def take_back(self) -> list[int]:
        came_back, self.came_back = self.came_back, []
        return came_back

    def _reconnect(self, connection: UnixConnection[Any], message: Any) -> bool:
        """Goes on with a worker or a server that has connected again; False if the message is about something else."""
        if isinstance(message, ShardHello):
            self._shards.attach(message, connection)
            if message.again:
                self.came_back.append(message.index)
        elif isinstance(message, Resume):
            session = self._sessions.get(message.rank)
            if session is not None and session.pid == message.pid:
                self._sessions.resume(session, connection, message)
            else:
                with contextlib.suppress(Closed):
                    why = f"rank {message.rank} is no part of the run any more"
                    connection.send(RunFailed("WorkerLost", why, [message.rank]))
                connection.close()
        elif isinstance(message, WorkerGone):
            session = self._sessions.get(message.rank)
            if session is not None and not self._sessions.is_attached(session):
                self._sessions.end_detached(session, left=message.left)
            for one in self.pending:
                if one.rank == message.rank and isinstance(one.connection, SessionLink):
                    one.connection.end(left=message.left)
            connection.close()
        else:
            return False
        return True

    # -- joining -----------------------------------------------------------------------------------------------------

    def _greet(self, message: Hello, connection: UnixConnection[Any]) -> None:
        """A worker joins, or asks once more since it had no answer when the server was killed."""
        for session in (*self._sessions.values(), *self.pending):
            link = session.connection
            if (session.rank, session.pid) == (message.rank, message.pid) and isinstance(link, SessionLink):
                if session.rank in self._sessions:
                    self._sessions.resume(session, connection, None)
                else:
                    link.attach(connection, None)
                return
        if self._journal.on:
            self._journal.add(EntryKind.JOIN, message.rank, msgspec.msgpack.encode(message))
        self.join(message, connection)

    def join(self, message: Hello, connection: UnixConnection[Any] | None) -> None:
        """connection: None while it is done again."""
        link: Any = connection
        relayed = len(self._spec.machines) > 1
        if self._journal.on or relayed:
            link = SessionLink(message.rank, message.pid, self._journal, connection, relayed=relayed)
            link.meet = self.meet
        self._add(Session(message.rank, message.pid, link, host=message.host, joined=True, fresh=True))

    def _add(self, session: Session) -> None:
        rank, capacity = session.rank, self._spec.capacity
        if not 0 <= rank < capacity:
            self._reject(session, f"rank {rank} cannot join: this run has room for ranks 0 to {capacity - 1}")
        elif rank in self._sessions or any(other.rank == rank for other in self.pending):
            self._reject(session, f"rank {rank} cannot join: there is a rank {rank} already")
        else:
            self.pending.append(session)
            waiting = next((other for other in self._sessions.values() if other.state in _WAITING), None)
            if waiting is not None or not self._spec.buffers or not self._sessions:
                self._admit_pending(waiting)

    def _reject(self, session: Session, why: str) -> None:
        with contextlib.suppress(Closed):
            session.connection.send(RunFailed("JoinError", why, [session.rank]))
        session.connection.close()

    def before(self, session: Session, message: Any) -> None:
        """Called before a worker's message is handled: if it waits for the reply, it can copy its buffers first."""
        if self.pending and isinstance(message, _CALLS):
            self._admit_pending(session)

    def admit_without_copy(self) -> None:
        """If no worker is left that could copy its buffers, the last copy is used."""
        if self.pending and not self._sessions:
            self._admit_pending(None)

    def _admit_pending(self, source: Session | None) -> None:
        if source is not None and self._spec.buffers and not self._copy_buffers(source):
            return
        for session in self.pending:
            self._admit(session)
        self.pending.clear()

    def _copy_buffers(self, session: Session) -> bool:
        self._sessions.send(session, CopyBuffers())
        try:
            answer = session.connection.receive_within(self._spec.timeouts.barrier)
        except Closed:
            return False  # the coordinator notices that, and another worker is asked
        if answer is None:
            late = "did not copy its model's buffers for a worker that joins"
            if self._journal.value(lambda: self._sessions.end(session, f"{late} and had to be evicted")):
                return False
            raise TeamTimeout(f"rank {session.rank} {late}", [session.rank])
        if not isinstance(answer, BuffersCopied):
            raise Mismatch(
                f"rank {session.rank} sent a {type(answer).__name__} instead of its model's buffers", [session.rank]
            )
        return True

    def send_run(self, session: Session) -> None:
        """Sends a new worker the run's spec and memory."""
        failpoints.hit("join.admitted")
        session.connection.patience_to_send(_PATIENCE)
        with contextlib.suppress(Closed):  # the coordinator notices that
            session.connection.send(SessionOpened(session.version, session.buffer), self._memory.descriptors)
            send_parts(session.connection, self._text)
