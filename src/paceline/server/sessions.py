"""Where the workers sit at a server, and which version each of them holds."""

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
    """What a worker does, as far as the server knows."""

    COMPUTING = "computing"
    PUSHED = "an update"
    ASKING = "the end of an epoch"
    ENTERING = "the start of an epoch"
    DRAWING = "drawing the order of an epoch"
    MEETING = "a barrier or an exchange of values"


@dataclasses.dataclass(slots=True)
class Session:
    """One worker."""

    rank: int
    pid: int
    connection: UnixConnection[Any]
    host: str = ""
    """The address of its machine, if it is on another one."""
    version: int = 0
    buffer: int = 0
    state: SessionState = SessionState.COMPUTING
    since: float = 0.0
    """When it got into this state."""
    request: PushGradient | StepCancelled | RequestLease | BeginEpoch | None = None
    """What it waits for an answer to."""
    outcome: str = ""
    """Of its last push."""
    joined: bool = False
    """It has come while the run went on."""
    fresh: bool = False
    """It has, and has not trained on anything yet: nobody waits for it."""
    brought: tuple[int, bytes] | None = None
    """What it came to meet the others for, and with."""

    def into(self, state: SessionState) -> None:
        self.state, self.since = state, time.monotonic()


class VersionPool:
    """The buffers of versions: which are held, by how many, and which is free."""

    def __init__(self, buffers: int) -> None:
        self._holders = [0] * buffers
        self._free = list(range(buffers - 1, 0, -1))
        """Those that nobody holds, and that are not the newest version."""
        self._newest = 0
        self.version = 0
        """Of the newest."""
        self.most = 1
        """How many buffers were ever in use at once."""

    @property
    def newest(self) -> int:
        return self._newest

    def publish(self, buffer: int, version: int) -> None:
        """This is the newest version now."""
        self.version = version
        before, self._newest = self._newest, buffer
        if before != buffer and not self._holders[before]:
            self._free.append(before)

    def hold(self, buffer: int) -> None:
        self._holders[buffer] += 1

    def release(self, buffer: int) -> None:
        self._holders[buffer] -= 1
        if not self._holders[buffer] and buffer != self._newest:
            self._free.append(buffer)

    def take(self) -> int:
        """A buffer that nobody holds, and that is not the newest version: for the next one."""
        if not self._free:  # one more exists than can be held at once
            raise RuntimeError("all buffers of versions are held")
        buffer = self._free.pop()
        self.most = max(self.most, len(self._holders) - len(self._free))
        return buffer


class Sessions(dict[int, Session]):
    """All workers who are here, by rank, and the versions that they hold."""

    def __init__(self, sessions: dict[int, Session], capacity: int, replica: int = 1) -> None:
        """replica: processes that are one worker here."""
        super().__init__(sessions)
        self._replica = replica
        self.pool = VersionPool(capacity + 2)
        for session in sessions.values():
            self.pool.hold(session.buffer)
            session.into(SessionState.COMPUTING)

    def add(self, session: Session) -> None:
        """A worker has come; it begins with the newest version."""
        session.buffer, session.version = self.pool.newest, self.pool.version
        self.pool.hold(session.buffer)
        session.into(SessionState.COMPUTING)
        self[session.rank] = session

    @property
    def trained(self) -> list[int]:
        """Who has trained on something, or began with the run: whom others may wait for."""
        return [rank for rank, session in self.items() if not session.fresh]

    def named(self, ranks: list[int]) -> str:
        """How messages speak of these workers."""
        hosts = sorted({self[rank].host for rank in ranks if rank in self and self[rank].host})
        return f"{self.called(ranks)} on {' and '.join(hosts)}" if hosts else self.called(ranks)

    def called(self, ranks: list[int]) -> str:
        if self._replica == 1:
            return names(ranks)
        return " and ".join(f"the replica of {names(self.processes([rank]))}" for rank in ranks)

    def processes(self, ranks: list[int]) -> list[int]:
        """The ranks in the team of those whom the server has as these."""
        return [rank * self._replica + place for rank in ranks for place in range(self._replica)]

    def tell(self, session: Session, message: msgspec.Struct) -> None:
        try:
            session.connection.send(message)
        except Closed:
            return  # its end will be heard

    def renew(self, session: Session) -> None:
        """It takes the newest version, and lets go of the one that it has."""
        self.pool.release(session.buffer)
        session.buffer, session.version = self.pool.newest, self.pool.version
        self.pool.hold(session.buffer)

    def answer(self, session: Session, message: msgspec.Struct) -> None:
        """Let a worker go on that has waited for this."""
        session.into(SessionState.COMPUTING)
        session.request = None
        self.tell(session, message)
