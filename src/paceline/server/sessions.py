"""Workers' sessions with the coordinator: their connections, and the version that each of them holds."""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import msgspec

from paceline import failpoints
from paceline.errors import names
from paceline.server.eviction import end_connected
from paceline.server.flags import SharedFlags
from paceline.server.messages import BeginEpoch, EndWorker, Notice, PushGradient, RequestLease, Resume, StepCancelled
from paceline.server.session_link import Detached, SessionLink
from paceline.transport.unix_connection import Closed, UnixConnection


class SessionState(Enum):
    """A worker's state, as far as the server knows; the value completes "waits at" in messages."""

    COMPUTING = "computing"
    PUSHED = "an update"
    REQUESTING = "the end of an epoch"
    ENTERING = "the start of an epoch"
    DRAWING = "drawing the order of an epoch"
    BARRIER = "a barrier or an exchange of values"


@dataclasses.dataclass(slots=True)
class Session:
    """One worker's connection, and the state of its last request."""

    rank: int
    pid: int
    connection: UnixConnection[Any] | SessionLink
    host: str = ""
    """The address of its machine, if that is not the coordinator's."""
    version: int = 0
    buffer: int = 0
    """The buffer of the version that it holds."""
    state: SessionState = SessionState.COMPUTING
    since: float = 0.0
    """When it entered this state, by the monotonic clock."""
    request: PushGradient | StepCancelled | RequestLease | BeginEpoch | None = None
    """The request that it waits for a reply to."""
    outcome: str = ""
    """Of its last push."""
    joined: bool = False
    """True if it joined after the run began."""
    fresh: bool = False
    """True if it joined and has not trained yet: no other worker waits for it."""
    recalled: list[int] = dataclasses.field(default_factory=list)
    """Leases that it had fetched ahead and that others have got, until it is told."""
    evicted: str = ""
    """Why it was ended, as a verb of a message."""
    payload: tuple[int, bytes] | None = None
    """At a barrier: the barrier's kind and this worker's payload."""

    def take_recalled(self) -> list[int]:
        """The leases to tell it of."""
        recalled, self.recalled = self.recalled, []
        return recalled

    def enter(self, state: SessionState) -> None:
        self.state, self.since = state, time.monotonic()


class VersionPool:
    """The buffers of versions, with the number of workers that hold each."""

    def __init__(self, buffers: int) -> None:
        self._holders = [0] * buffers
        self._free = list(range(buffers - 1, 0, -1))
        """Buffers that no worker holds, except the newest version's."""
        self.newest = 0
        self.version = 0
        """Of the newest."""
        self.most = 1
        """Most buffers that were in use at once."""

    def publish(self, buffer: int, version: int) -> None:
        """Makes a buffer the newest version."""
        self.version = version
        before, self.newest = self.newest, buffer
        if before != buffer and not self._holders[before]:
            self._free.append(before)

    def hold(self, buffer: int) -> None:
        self._holders[buffer] += 1

    def release(self, buffer: int) -> None:
        self._holders[buffer] -= 1
        if not self._holders[buffer] and buffer != self.newest:
            self._free.append(buffer)

    def take(self) -> int:
        """A free buffer for the next version."""
        if not self._free:  # one more exists than can be held at once
            raise RuntimeError("all buffers of versions are held")
        buffer = self._free.pop()
        self.most = max(self.most, len(self._holders) - len(self._free))
        return buffer


class Sessions(dict[int, Session]):
    """The sessions of all present workers, by rank, and the versions that they hold."""

    def __init__(self, sessions: dict[int, Session], buffers: int, replica: int = 1) -> None:
        """replica: processes of one replica, which is one worker here."""
        super().__init__(sessions)
        self._replica = replica
        self.pool = VersionPool(buffers)
        self.epoll = select.epoll()
        """Of the sessions' connections, and those of workers that have no session yet."""
        self._by_descriptor: dict[int, Session] = {}
        self.spare: Callable[[], bool] = lambda: False
        """True if the run survives the loss of a worker."""
        self.say: Callable[[str], None] = lambda _text: None
        """Prints a line of the server's own."""
        self._changed = False
        """True if a worker has connected again since it was looked which connections can be read."""
        for session in sessions.values():
            self.pool.hold(session.buffer)
            session.since = time.monotonic()
            self._watch(session)

    def add(self, session: Session) -> None:
        """Adds a worker, which starts with the newest version."""
        session.buffer, session.version = self.pool.newest, self.pool.version
        self.pool.hold(session.buffer)
        session.enter(SessionState.COMPUTING)
        self._watch(session)
        self[session.rank] = session

    @property
    def attached(self) -> bool:
        """True if all workers are connected."""
        return all(map(self.is_attached, self.values()))

    @staticmethod
    def is_attached(session: Session) -> bool:
        """False if a worker has not connected again since the server was killed."""
        return not isinstance(session.connection, SessionLink) or session.connection.attached

    def resume(self, session: Session, connection: UnixConnection[Any], resume: Resume | None) -> None:
        """Goes on with a worker that has connected again."""
        assert isinstance(session.connection, SessionLink)
        self._forget(session)
        session.connection.attach(connection, resume)
        self._watch(session)
        self._changed = True
        if session.evicted:
            self.send(session, EndWorker())

    def detach(self, session: Session) -> None:
        """A worker's relay has ended its connection: the session waits for another."""
        self._forget(session)
        session.connection.close()
        self._watch(session)
        self._changed = True

    def end_detached(self, session: Session, *, left: bool) -> None:
        """A relay says that a worker has ended which has not connected again."""
        link = session.connection
        assert isinstance(link, SessionLink)
        self._forget(session)
        link.close()
        link.end(left=left)
        self._watch(session)
        self._changed = True

    def _forget(self, session: Session) -> None:
        self.epoll.unregister(session.connection.descriptor)
        del self._by_descriptor[session.connection.descriptor]

    def _watch(self, session: Session) -> None:
        if isinstance(session.connection, SessionLink):
            session.connection.detach = lambda: self.detach(session)
        self._by_descriptor[session.connection.descriptor] = session
        self.epoll.register(session.connection.descriptor, select.EPOLLIN)

    def end(self, session: Session, how: str) -> bool:
        """Ends a silent worker's process; False if the others need it, or if it cannot be ended.

        Its connection closes by that, unless the kernel cannot end it yet. On another machine its relay ends it.
        """
        if not self.spare():
            return False
        if session.host:
            self.send(session, EndWorker())
        elif not end_connected(session.pid, session.connection):
            return False
        session.evicted = how
        return True

    def has_left(self, session: Session, flags: SharedFlags) -> bool:
        """True if a worker whose connection has ended has left on purpose."""
        told = isinstance(session.connection, SessionLink) and session.connection.left
        return told or flags.has_left(session.rank, session.pid)

    def remove(self, session: Session) -> None:
        """Ends a worker's session; its version is still held."""
        self._forget(session)
        session.connection.close()
        del self[session.rank]

    def ready(self, seconds: float) -> Iterator[tuple[int, Session | None]]:
        """Descriptors that can be read, waited for so long, each with its session if it has one."""
        self._changed = False
        for descriptor, _ in self.epoll.poll(seconds):
            if self._changed:
                return  # a descriptor may be another's by now
            yield descriptor, self._by_descriptor.get(descriptor)

    def fail(self, message: msgspec.Struct, seconds: float) -> None:
        """Sends all workers a message that ends the run, and waits so long until they have left."""
        for session in self.values():
            self.send(session, message)
        # They raise it and leave; one that computes finds it at its next request.
        until = time.monotonic() + seconds
        while self and time.monotonic() < until:
            for descriptor, asking in self.ready(0.1):
                if asking is None:
                    self.epoll.unregister(descriptor)
                    continue
                try:
                    asking.connection.receive()
                    self.send(asking, message)
                except Closed:
                    self.remove(asking)
                except Detached:
                    continue

    def close(self) -> None:
        self.epoll.close()
        for session in self.values():
            session.connection.close()

    @property
    def trained(self) -> list[int]:
        """Ranks that others may wait for: all but those that joined and have not trained yet."""
        return [rank for rank, session in self.items() if not session.fresh]

    def names_and_hosts(self, ranks: list[int]) -> str:
        """These workers, for a message, with the other machines that they are on."""
        hosts = sorted({self[rank].host for rank in ranks if rank in self and self[rank].host})
        return f"{self.names(ranks)} on {' and '.join(hosts)}" if hosts else self.names(ranks)

    def names(self, ranks: list[int]) -> str:
        """These workers, for a message."""
        if self._replica == 1:
            return names(ranks)
        return " and ".join(f"the replica of {names(self.processes([rank]))}" for rank in ranks)

    def processes(self, ranks: list[int]) -> list[int]:
        """Ranks in the team of the processes of these workers."""
        return [rank * self._replica + place for rank in ranks for place in range(self._replica)]

    def send(self, session: Session, message: msgspec.Struct) -> None:
        try:
            session.connection.send(message)
        except Closed:
            return  # the coordinator notices that when it next receives

    def tell_lead(self, text: str) -> None:
        """Lets the lead say something about the training script, since it is the lead whose output a user reads."""
        lead = self.get(0)
        if lead is None:
            self.say(text)
        else:
            self.send(lead, Notice(text))

    def pull(self, session: Session) -> None:
        """Moves a worker from the version that it holds to the newest."""
        self.pool.release(session.buffer)
        session.buffer, session.version = self.pool.newest, self.pool.version
        self.pool.hold(session.buffer)

    def reply(self, session: Session, message: msgspec.Struct) -> None:
        """Answers the request that a worker waits for."""
        session.enter(SessionState.COMPUTING)
        session.request = None
        failpoints.hit("answer.begin")
        self.send(session, message)
        failpoints.hit("answer.sent")
