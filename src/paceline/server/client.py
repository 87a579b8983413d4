"""A worker's session with the coordinator."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import failpoints
from paceline.cluster.run_state import RunState
from paceline.config import RunSpec, Timeouts
from paceline.errors import FORK, JoinError, ServerLost, TeamError, TeamTimeout, UsageError, error_from
from paceline.server.flags import SharedFlags
from paceline.server.memory import MEMORIES, RunMemory
from paceline.server.messages import (
    TO_RELAY,
    UNCOUNTED,
    BuffersCopied,
    CopyBuffers,
    EnterBarrier,
    GatherKept,
    Hello,
    KeepWaiting,
    LeaveTeam,
    Left,
    Notes,
    Notice,
    Ready,
    ReduceShare,
    RequestLeft,
    Resume,
    Resumed,
    RunFailed,
    SessionOpened,
    ShareReduced,
    ToWorker,
)
from paceline.server.parts import PART, receive_parts, send_parts
from paceline.transport.unix_connection import Closed, UnixConnection, connect

_LAST = 1.0
"""Seconds for which a lead that leaves waits for the server to close its connection."""
_MARGIN = 5.0
"""Seconds by which a worker waits longer than the server, which can name the worker that is late."""
_SOON = 2.0
"""Seconds in which a running server accepts a connection."""
_BACK = 15.0
"""Seconds in which a server that was killed is back, if it comes back."""
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
        self._address, self._rank, self._timeouts = address, rank, timeouts
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
        self.say: Callable[[str], None] = lambda _text: None
        """Prints a line of the server's about the training script."""
        self.relayed = False
        """True if the server is reached through the relay of this worker's machine."""
        self._attempts = 0
        """How often it has gone on with a session."""
        self._gather: GatherKept | None = None
        """The last request of this kind, which a relay that is killed forgets."""
        self._closed = self._detached = False
        self._state: RunState | None = None
        self._received = 0
        """Messages of the server that were received."""
        self._sent = 0
        """Messages that were sent to it."""
        self._unanswered: list[msgspec.Struct] = []
        """The last of them, which it may not have: those since its last answer."""
        self._read: list[Any] = []
        """Messages of a server that was killed, which were read when it was found to be gone."""

    def attach(self, flags: SharedFlags, state: RunState, machines: int) -> None:
        """Takes the flags that reach a worker before messages do, and the words about a run over so many machines."""
        self._state, self.relayed = state, machines > 1
        self._flags, self._min_version = flags, flags.min_version
        self._place = self._rank * flags.min_version.step

    def from_first(self, payload: bytes) -> bytes:
        """The payload of the first worker of this session, which is this one."""
        return payload

    def from_replica(self, payload: bytes) -> list[bytes]:
        """The payloads of all workers of this session."""
        return [payload]

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
        until = time.monotonic() + self._timeouts.join
        failpoints.hit("join.begin")
        while True:
            try:
                return self._join(until)
            except (Closed, TimeoutError, BlockingIOError):
                if time.monotonic() >= until:
                    raise self._late() from None
            self._connection.close()  # the server was killed, and may come back
            self._connection = connect(self._address, ToWorker, min(_BACK, until - time.monotonic()))

    def _late(self) -> JoinError:
        return JoinError(f"rank {self._rank} was not let in within {self._timeouts.join:g} s", [self._rank])

    def _join(self, until: float) -> tuple[SessionOpened, RunSpec, RunMemory]:
        left = max(0.01, until - time.monotonic())
        self._connection.patience(left)
        self._connection.send(Hello(self._rank, os.getpid(), joins=True))
        failpoints.hit("join.sent")
        answer, descriptors = self._connection.receive_with_descriptors(MEMORIES)
        if isinstance(answer, RunFailed):
            raise _error(answer)
        text = receive_parts(self._connection, left)
        self._received = 1 + max(1, -(-len(text or b"") // PART))
        self._connection.patience(self._timeouts.barrier + _MARGIN)
        if not isinstance(answer, SessionOpened) or text is None:
            raise self._late()
        failpoints.hit("join.done")
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
            who = "relay of this machine" if self.relayed else "server"
            raise ServerLost(f"the {who} died while {'the run' if self.relayed else 'it'} started") from None
        if isinstance(answer, RunFailed):
            raise _error(answer)
        if not isinstance(answer, Ready):
            raise JoinError(f"the server was not ready within {self._timeouts.join:g} s")

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message that has no reply; a fork of the worker has nothing to say."""
        if self._detached:
            return
        if isinstance(message, GatherKept):
            self._gather = message
        if not isinstance(message, TO_RELAY):
            self._sent += 1
            self._unanswered.append(message)
        try:
            self._connection.send(message)
        except Closed:
            self._read_rest()
            self._resume()

    def call(self, message: msgspec.Struct) -> Any:
        """Sends a request, and waits for its reply."""
        self.send(message)
        failpoints.hit("request.sent")
        return self._receive_reply()

    def call_in_parts(self, data: bytes) -> Any:
        """Sends a request that may be longer than a message, and waits for its reply."""
        send_parts(self, data)
        return self._receive_reply()

    @property
    def marked(self) -> int:
        """One more than the version that was last marked for a snapshot; 0 before the first."""
        return self._flags.marked

    @property
    def gathered(self) -> int:
        """As `SharedFlags.gathered`."""
        return self._flags.gathered

    def left(self) -> tuple[Left, Notes, dict[str, Any]]:
        """By loader, which samples were left of its epoch at that version; by rank, notes from other machines.

        And the policy's values.
        """
        self.call(RequestLeft())
        text = receive_parts(self, self._timeouts.barrier)
        return msgspec.msgpack.decode(text or b"", type=tuple[Left, Notes, dict[str, Any]])

    def exchange(self, kind: int, data: bytes) -> dict[int, bytes]:
        """Enters a barrier with a payload; returns all workers' payloads, by rank."""
        self.send(EnterBarrier(kind))
        self.call_in_parts(data)
        text = receive_parts(self, self._timeouts.barrier)
        return msgspec.msgpack.decode(text or b"", type=dict[int, bytes])

    def _receive_reply(self) -> Any:
        if self._detached:
            raise UsageError(FORK)
        while True:
            try:
                answer = self._next(_receive)
            except TimeoutError:
                waited = self._timeouts.barrier + _MARGIN
                raise TeamTimeout(f"the server did not answer rank {self._rank} in {waited:g} s") from None
            if isinstance(answer, ReduceShare):
                self.reduce(answer)
                self.send(ShareReduced())
            elif isinstance(answer, CopyBuffers):
                self.copy()
                self.send(BuffersCopied())
            elif isinstance(answer, Notice):
                self.say(answer.text)
            elif isinstance(answer, KeepWaiting):
                continue
            elif isinstance(answer, RunFailed):
                raise _error(answer)
            else:
                self._unanswered.clear()
                return answer

    def receive_within(self, seconds: float) -> Any:
        """The next message of an answer in parts; None if there is none in time."""
        return self._next(lambda connection: connection.receive_within(seconds))

    def _next(self, receive: Callable[[UnixConnection[Any]], Any]) -> Any:
        """The next message, if need be of a server that was killed and is back."""
        while True:
            if self._read:
                return self._read.pop(0)
            try:
                message = receive(self._connection)
            except Closed:
                self._read_rest()
                if not self._read:
                    self._resume()
                continue
            self._received += not isinstance(message, UNCOUNTED)
            return message

    # -- when the server is killed -----------------------------------------------------------------------------------

    def _read_rest(self) -> None:
        """Reads what a server that is gone had sent before."""
        for _ in range(2):  # the first error may only say that the server has not read all
            with contextlib.suppress(Closed):
                while (message := self._connection.receive_within(0)) is not None:
                    self._received += not isinstance(message, UNCOUNTED)
                    self._read.append(message)

    def _resume(self) -> None:
        """Goes on with a server that was killed, once it is back: sends again what it has not received."""
        until = time.monotonic() + self._timeouts.join
        while self._comes_back() and time.monotonic() < until:
            self._connection.close()
            try:
                connection: UnixConnection[Any] = connect(self._address, ToWorker, _LOOK, self._comes_back)
            except JoinError:
                if self.relayed and self._state is not None:
                    self._state.relayed = False  # nobody listens for it, who would start it again
                continue
            self._connection = connection
            with contextlib.suppress(Closed):
                connection.patience(self._timeouts.barrier + _MARGIN)
                self._attempts += 1
                connection.send(Resume(self._rank, os.getpid(), self._received, self._attempts))
                answer = connection.receive_within(until - time.monotonic())
                if isinstance(answer, RunFailed):
                    raise _error(answer)
                if isinstance(answer, Resumed):
                    missing = self._sent - answer.received
                    for message in self._unanswered[-missing:] if missing else ():
                        connection.send(message)
                    if self._gather is not None:
                        connection.send(self._gather)
                    return
        raise self._lost()

    def _comes_back(self) -> bool:
        """True if the server, or the relay on the way to it, is started again if it was killed."""
        state = self._state
        return state is not None and (state.relayed if self.relayed else state.live)

    def _lost(self) -> TeamError:
        self._read_rest()  # it may have sent the reason before it ended
        for message in self._read:
            if isinstance(message, RunFailed):
                return _error(message)
        if self.relayed and not (self._state is not None and self._state.relay_ended):
            return ServerLost(f"the relay of its machine, through which rank {self._rank} reaches the server, died")
        return ServerLost(ServerLost.UNTOLD)

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
            if left > _LOOK and not self._connection.open and not self._comes_back():
                raise self._lost()
        return version is not None and bool(flags.values[place] > version)

    def detach(self) -> None:
        """In a fork of the worker: closes the fork's end of the connection, which is the worker's."""
        self._closed = self._detached = True
        self._connection.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._state is not None:
                self._flags.leave(self._rank, os.getpid())
            with contextlib.suppress(Closed):
                self._connection.send(LeaveTeam())
                until = time.monotonic() + _LAST
                while self._rank == 0 and (said := self._connection.receive_within(until - time.monotonic())):
                    if isinstance(said, Notice):  # the server may have sent it while the lead left
                        self.say(said.text)
            self._connection.close()


def _receive(connection: UnixConnection[Any]) -> Any:
    connection.linger(_LINGER)
    return connection.receive()


def _error(failed: RunFailed) -> TeamError:
    return error_from(failed.kind, failed.message, failed.ranks)
