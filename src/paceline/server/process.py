"""A server, in a process of its own or in a thread of a worker."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline import failpoints
from paceline.cluster.process import is_alive
from paceline.config import RunSpec
from paceline.errors import JoinError
from paceline.events.recorder import Recorder, ReplicaRecorder
from paceline.server.coordinator import Coordinator
from paceline.server.journal import Journal
from paceline.server.journaled_recorder import JournaledRecorder, events_written
from paceline.server.memory import MEMORIES, RunMemory
from paceline.server.messages import FromWorker, Hello, Ready, RunFailed, ShardAnswer, ShardHello, ToShard
from paceline.server.parts import receive_parts, send_parts
from paceline.server.record import read_spec
from paceline.server.recovery import keep_state, read_state, rebuilt, restore
from paceline.server.session_link import SessionLink
from paceline.server.sessions import Session
from paceline.server.shard import Shard
from paceline.server.shard_set import ShardSet
from paceline.transport.unix_connection import Closed, Listener, UnixConnection, connect, deserted

_LOOK = 0.5
"""Seconds between checks whether the processes that have not connected are alive."""


def serve(
    address: str, index: int, patience: float, say: Callable[[str], None], descriptors: Sequence[int] = ()
) -> None:
    """Runs a server until the run is over; descriptors: of the run's memory, if the server was killed before."""
    failpoints.enter(f"server{index}")
    if descriptors:
        memory = RunMemory.inherited(descriptors)
        if index == 0:
            _serve_again(Listener(address), memory, say)
        else:
            _serve_shard_again(memory, index, patience, address)
    elif index == 0:
        _serve_first(Listener(address), patience, say)
    else:
        _serve_further(connect(address, ToShard, patience), index, patience, address)


class _PendingJoins:
    """Connections of the workers and servers that have arrived, until all have."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.shards: dict[int, UnixConnection[Any]] = {}
        """Connections to the other servers, by number."""
        self.spec: RunSpec | None = None
        self.text = b""
        """The spec, encoded."""
        self.descriptors: list[int] = []
        self._pids: list[int] = []

    @property
    def complete(self) -> bool:
        spec = self.spec
        return spec is not None and len(self.sessions) == spec.workers and len(self.shards) == len(spec.servers) - 1

    def add(self, connection: UnixConnection[Any], patience: float) -> None:
        hello, received = connection.receive_with_descriptors(MEMORIES)
        if isinstance(hello, ShardHello):
            self.shards[hello.index] = connection
        elif isinstance(hello, Hello):
            self.sessions[hello.rank] = Session(hello.rank, hello.pid, connection, host=hello.host)
            if hello.spec:
                self.text, self.descriptors = receive_parts(connection, patience) or b"", received
                self.spec, self._pids = msgspec.msgpack.decode(self.text, type=RunSpec), hello.pids

    def add_dead_workers(self) -> None:
        """Give each worker that died before it connected a session with a closed connection.

        The coordinator then handles its end like that of any other worker.
        """
        for rank, pid in enumerate(self._pids):
            if pid and rank not in self.sessions and not is_alive(pid):
                self.sessions[rank] = Session(rank, pid, deserted(FromWorker))


def _gather(listener: Listener, patience: float) -> _PendingJoins:
    until = time.monotonic() + patience
    pending = _PendingJoins()
    while not pending.complete:
        connection = listener.accept(FromWorker, max(0.0, min(_LOOK, until - time.monotonic())))
        if connection is not None:
            with contextlib.suppress(Closed):
                pending.add(connection, patience)
            continue
        pending.add_dead_workers()
        if time.monotonic() >= until:
            raise JoinError(f"not all workers and servers came together within {patience:g} s")
    return pending


def _serve_first(listener: Listener, patience: float, say: Callable[[str], None]) -> None:
    pending = _gather(listener, patience)
    sessions, others, spec = pending.sessions, dict(sorted(pending.shards.items())), pending.spec
    assert spec is not None
    for connection in others.values():
        connection.send(Ready(), pending.descriptors)
        send_parts(connection, pending.text)
    memory = RunMemory.inherited(pending.descriptors)
    try:
        shard = Shard(spec, 0, memory)
        for index, connection in others.items():
            answer = connection.receive_within(patience)
            if not isinstance(answer, ShardAnswer):
                raise JoinError(f"server {index} could not start: {getattr(answer, 'message', 'no answer')}")
    except Exception as error:
        for session in sessions.values():
            with contextlib.suppress(Closed):
                session.connection.send(
                    RunFailed("JoinError", f"the server could not start: {type(error).__name__}: {error}", [])
                )
        raise
    run = shard.run
    kept = run.state.kept and not spec.places and run.write_spec(pending.text)
    journal = Journal(run.head, run.halves, run.state.give_up) if kept else Journal()
    relayed = len(spec.machines) > 1
    for session in sessions.values() if kept or relayed else ():
        assert isinstance(session.connection, UnixConnection)
        session.connection = SessionLink(session.rank, session.pid, journal, session.connection, relayed=relayed)
    recorder = _recorder(spec)
    if kept:
        recorder = JournaledRecorder(recorder, journal, run.events)
    shards = ShardSet(shard, others, spec.timeouts.barrier, journal, spec.timeouts.join, _remote(spec))
    coordinator = Coordinator(spec, sessions, shards, memory, listener, pending.text, say, journal, recorder)
    kept = kept and not keep_state(coordinator, journal, recorder)
    for session in sessions.values():
        with contextlib.suppress(Closed):  # the coordinator notices that
            session.connection.send(Ready())
    run.state.live = kept
    _coordinate(coordinator, shards, memory)


def _serve_again(listener: Listener, memory: RunMemory, say: Callable[[str], None]) -> None:
    """Goes on with the run of a first server that was killed."""
    text = read_spec(memory.record)
    spec = msgspec.msgpack.decode(text, type=RunSpec)
    shard = Shard(spec, 0, memory)
    run = shard.run
    journal = Journal(run.head, run.halves, run.state.give_up)
    state = read_state(journal)
    sessions = [rebuilt(one, journal, memory.descriptors) for one in state.sessions]
    folder = None if spec.folder is None else Path(spec.folder)
    written = events_written(folder, -1, run.events)
    recorder = JournaledRecorder(_recorder(spec), journal, run.events, written)
    shards = ShardSet(shard, {}, spec.timeouts.barrier, journal, spec.timeouts.join, _remote(spec))
    present = {session.rank: session for session in sessions}
    coordinator = Coordinator(spec, present, shards, memory, listener, text, say, journal, recorder)
    restore(coordinator, state)
    recorder.resume()
    coordinator.known[1].extend(rebuilt(one, journal, memory.descriptors) for one in state.pending)
    _coordinate(coordinator, shards, memory)


def _remote(spec: RunSpec) -> list[int]:
    """Numbers of the servers on other machines than the first one's."""
    return [index for index, machine in enumerate(spec.servers) if machine != spec.servers[0]]


def _recorder(spec: RunSpec) -> Recorder:
    folder = None if spec.folder is None else Path(spec.folder)
    limit = spec.record_limit
    return Recorder(folder, -1, limit) if spec.replica == 1 else ReplicaRecorder(folder, -1, spec.replica, limit)


def _coordinate(coordinator: Coordinator, shards: ShardSet, memory: RunMemory) -> None:
    try:
        coordinator.run()
    finally:
        shards.close()
        memory.close_descriptors()


def _serve_further(connection: UnixConnection[Any], index: int, patience: float, address: str) -> None:
    try:
        connection.send(ShardHello(index, os.getpid()))
        _, descriptors = connection.receive_with_descriptors(MEMORIES)
        text = receive_parts(connection, patience) or b""
        spec = msgspec.msgpack.decode(text, type=RunSpec)
    except Closed:
        connection.close()
        return  # the first server has ended, and so does this one
    memory = RunMemory.inherited(descriptors)
    try:
        shard = Shard(spec, index, memory)
        if index in _remote(spec) and not shard.run.write_spec(text):
            shard.run.state.give_up()
        connection.send(ShardAnswer())
    except Exception as error:
        with contextlib.suppress(Closed):
            connection.send(RunFailed("ServerLost", f"{type(error).__name__}: {error}", []))
        raise
    finally:
        memory.close_descriptors()
    _serve_shard(connection, shard, index in _remote(spec), patience, address)


def _serve_shard(connection: UnixConnection[Any], shard: Shard, relayed: bool, patience: float, address: str) -> None:
    """Handles the requests of the first server until the run is over, also of one that was started again."""

    def comes_back() -> bool:
        """True if the first server, or this machine's relay to it, is started again."""
        state = shard.run.state
        return state.relayed if relayed else state.live

    while True:
        try:
            while True:
                connection.send(ShardAnswer(shard.handle(connection.receive())))
        except Closed:
            connection.close()
            if not comes_back():
                return  # the first server has ended, and so does this one
        except Exception as error:
            with contextlib.suppress(Closed):
                connection.send(RunFailed("ServerLost", f"{type(error).__name__}: {error}", []))
            connection.close()
            raise
        try:
            connection = connect(address, ToShard, _LOOK if relayed else patience, comes_back)
        except JoinError:
            if comes_back() and not relayed:
                raise
            return
        with contextlib.suppress(Closed):
            connection.send(shard.hello())


def _serve_shard_again(memory: RunMemory, index: int, patience: float, address: str) -> None:
    """Goes on with the shard of a server that was killed."""
    spec = msgspec.msgpack.decode(read_spec(memory.record), type=RunSpec)
    shard = Shard(spec, index, memory)
    memory.close_descriptors()
    relayed, state = index in _remote(spec), shard.run.state
    connection: UnixConnection[Any] = connect(
        address, ToShard, patience, lambda: state.relayed if relayed else state.live
    )
    with contextlib.suppress(Closed):
        connection.send(shard.hello(again=True))
    _serve_shard(connection, shard, relayed, patience, address)


def serve_in_thread(address: str, index: int, patience: float, say: Callable[[str], None]) -> threading.Thread:
    """Runs a server in a thread of a worker."""

    def run() -> None:
        try:
            serve(address, index, patience, say)
        except Exception as error:
            say(f"the server in this worker failed: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name=f"paceline server {index}", daemon=True)
    thread.start()
    return thread
