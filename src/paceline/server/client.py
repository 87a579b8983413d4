"""A worker's session with the coordinator."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.config import RunSpec, Timeouts
from paceline.errors import FORK, JoinError, ServerLost, TeamError, TeamTimeout, UsageError, error_from
from paceline.server.flags import SharedFlags
from paceline.server.memory import MEMORIES, RunMemory
from paceline.server.messages import (
    BuffersCopied,
    CopyBuffers,
    EnterBarrier,
    Hello,
    LeaveTeam,
    Ready,
    ReduceShare,
    RunFailed,
    SessionOpened,
    ShareReduced,
    ToWorker,
    receive_parts,
    send_parts,
)
from paceline.transport.unix_connection import Closed, UnixConnection, connect

_MARGIN = 5.0
"""Seconds by which a worker waits longer than the server, which can name the worker that is late."""
_SOON = 2.0
"""Seconds in which a running server accepts a connection."""
_LINGER = 0.0005
"""Seconds to poll for a reply before sleeping until it comes."""
_LOOK = 0.5
"""Seconds between checks whether the server is alive, during an injected delay."""


class ServerClient:
    """Sends requests to the coordinator, and waits for their replies."""

    shared = False
    """True if several workers share one model and this session."""

    def __init__(self, address: str, rank: int, timeouts: Timeouts, *, late: bool = False) -> None:
        """late: True if the server must be running already."""
        self._rank, self._timeouts = rank, timeouts
        try:
            self._connection: UnixConnection[Any] = connect(address, ToWorker, _SOON if late else timeouts.join)
        except JoinError:
            if late:
                raise JoinError(f"rank {rank} cannot join: the run has ended, or its server has") from None
            raise
        self._connection.patience(timeouts.barrier + _MARGIN)
        self.reduce: Callable[[ReduceShare], None] = lambda _message: None
        """Sums this worker's part of its group's gradient, on request."""
        self.copy: Callable[[], None] = lambda: None
        """Copies the model's buffers to shared memory, on request."""
        self._closed = self._detached = False

    def attach(self, flags: SharedFlags) -> None:
        """Takes the flags that reach a worker before messages do."""
        self._flags, self._min_version = flags, flags.min_version
        self._place = self._rank * flags.min_version.step

    def from_first(self, payload: bytes) -> bytes:
        """The payload of the first worker of this session, which is this one."""
        return payload

    @property
    def present(self) -> int:
        """Workers that are present."""
        return self._flags.present

    @property
    def dismissed(self) -> bool:
        """True if this worker is asked to leave."""
        return self._flags.dismissed(self._rank)

    def join(self) -> tuple[SessionOpened, RunSpec, RunMemory]:
        """Joins a run that has begun."""
        late = JoinError(f"rank {self._rank} was not let in within {self._timeouts.join:g} s", [self._rank])
        try:
            self._connection.patience(self._timeouts.join)
            self._connection.send(Hello(self._rank, os.getpid(), joins=True))
            answer, descriptors = self._connection.receive_with_descriptors(MEMORIES)
            if isinstance(answer, RunFailed):
                raise _error(answer)
            text = receive_parts(self._connection, self._timeouts.join)
            self._connection.patience(self._timeouts.barrier + _MARGIN)
        except (Closed, TimeoutError, BlockingIOError):
            raise late from None
        if not isinstance(answer, SessionOpened) or text is None:
            raise late
        return answer, msgspec.msgpack.decode(text, type=RunSpec), RunMemory.inherited(descriptors)

    def open(self, spec: RunSpec, memory: RunMemory, pids: list[int]) -> None:
        """Opens this worker's session; the lead also sends the run's spec and memory.

        pids: the processes of the lead's machine, by rank.
        """
        if self._rank:
            self._connection.send(Hello(self._rank, os.getpid()))
            return
        self._connection.send(Hello(self._rank, os.getpid(), True, pids), memory.descriptors)
        send_parts(self._connection, msgspec.msgpack.encode(spec))

    def wait_until_ready(self, look: Callable[[], None] = lambda: None) -> None:
        """look: called now and then; may raise an error that ends the wait."""
        until = time.monotonic() + self._timeouts.join
        try:
            while (answer := self._connection.receive_within(min(_LOOK, self._timeouts.join))) is None:
                if time.monotonic() >= until:
                    break
                look()
        except Closed:
            raise ServerLost("the server died while it started") from None
        if isinstance(answer, RunFailed):
            raise _error(answer)
        if not isinstance(answer, Ready):
            raise JoinError(f"the server was not ready within {self._timeouts.join:g} s")

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message that has no reply; a fork of the worker has nothing to say."""
        if self._detached:
            return
        try:
            self._connection.send(message)
        except Closed:
            raise self._lost() from None

    def call(self, message: msgspec.Struct) -> Any:
        """Sends a request, and waits for its reply."""
        self.send(message)
        return self._receive_reply()

    def call_in_parts(self, data: bytes) -> Any:
        """Sends a request that may be longer than a message, and waits for its reply."""
        send_parts(self, data)
        return self._receive_reply()

    def exchange(self, kind: int, data: bytes) -> dict[int, bytes]:
        """Enters a barrier with a payload; returns all workers' payloads, by rank."""
        self.send(EnterBarrier(kind))
        self.call_in_parts(data)
        try:
            text = receive_parts(self._connection, self._timeouts.barrier)
        except Closed:
            raise self._lost() from None
        return msgspec.msgpack.decode(text or b"", type=dict[int, bytes])

    def _receive_reply(self) -> Any:
        if self._detached:
            raise UsageError(FORK)
        while True:
            self._connection.linger(_LINGER)
            try:
                answer = self._connection.receive()
            except Closed:
                raise self._lost() from None
            except TimeoutError:
                waited = self._timeouts.barrier + _MARGIN
                raise TeamTimeout(f"the server did not answer rank {self._rank} in {waited:g} s") from None
            if isinstance(answer, ReduceShare):
                self.reduce(answer)
                self.send(ShareReduced())
            elif isinstance(answer, CopyBuffers):
                self.copy()
                self.send(BuffersCopied())
            elif isinstance(answer, RunFailed):
                raise _error(answer)
            else:
                return answer

    def _lost(self) -> TeamError:
        # It may have sent the reason before it ended.
        try:
            while (answer := self._connection.receive_within(0)) is not None:
                if isinstance(answer, RunFailed):
                    return _error(answer)
        except Closed:
            pass
        return ServerLost("the server, which holds the parameters, died")

    def cancelled(self, version: int) -> bool:
        """True if a gradient of this version can no longer be used."""
        return bool(self._min_version.values[self._place] > version)

    def cancelled_at(self) -> float:
        """When this worker was last cancelled, by the clock that all processes of a machine share."""
        return self._min_version.stamped(self._rank)

    def sleep(self, seconds: float, version: int | None) -> bool:
        """Sleeps, or until a gradient of this version can no longer be used; True if that was so."""
        until = time.perf_counter() + seconds
        flags, place = self._min_version, self._place
        while (left := until - time.perf_counter()) > 0:
            seen = flags.values[place]
            if version is not None and seen > version:
                return True
            flags.sleep(self._rank, seen, min(left, _LOOK))
            if left > _LOOK and not self._connection.open:
                raise self._lost()
        return version is not None and bool(flags.values[place] > version)

    def detach(self) -> None:
        """In a fork of the worker: closes the fork's end of the connection, which is the worker's."""
        self._closed = self._detached = True
        self._connection.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Closed):
                self._connection.send(LeaveTeam())
            self._connection.close()


def _error(failed: RunFailed) -> TeamError:
    return error_from(failed.kind, failed.message, failed.ranks)
