"""Workers' sessions with the coordinator, and the version that each of them holds."""

from __future__ import annotations

import dataclasses
import time
from enum import Enum
from typing import Any

import msgspec

from paceline.errors import names
from paceline.server.messages import BeginEpoch, PushGradient, RequestLease, StepCancelled
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
    connection: UnixConnection[Any]
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
    payload: tuple[int, bytes] | None = None
    """At a barrier: the barrier's kind and this worker's payload."""

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
        for session in sessions.values():
            self.pool.hold(session.buffer)
            session.enter(SessionState.COMPUTING)

    def add(self, session: Session) -> None:
        """Adds a worker, which starts with the newest version."""
        session.buffer, session.version = self.pool.newest, self.pool.version
        self.pool.hold(session.buffer)
        session.enter(SessionState.COMPUTING)
        self[session.rank] = session

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

    def pull(self, session: Session) -> None:
        """Moves a worker from the version that it holds to the newest."""
        self.pool.release(session.buffer)
        session.buffer, session.version = self.pool.newest, self.pool.version
        self.pool.hold(session.buffer)

    def reply(self, session: Session, message: msgspec.Struct) -> None:
        """Answers the request that a worker waits for."""
        session.enter(SessionState.COMPUTING)
        session.request = None
        self.send(session, message)
