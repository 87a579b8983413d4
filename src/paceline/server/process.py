"""What runs in a server: a process of its own, or a thread of a worker."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.config import Groups, parse_strategy
from paceline.errors import JoinError, TeamError
from paceline.parameters.hyperparameters import SLOT, Hyperparameters
from paceline.server.coordinator import Coordinator
from paceline.server.flags import SharedFlags
from paceline.server.messages import (
    MEMORIES,
    AddGradient,
    ApplyUpdate,
    FromWorker,
    Hello,
    MeasureDistance,
    Ready,
    ReloadState,
    RunFailed,
    RunSpec,
    ShardAnswer,
    ShardHello,
    ToShard,
    receive_parts,
    send_parts,
)
from paceline.server.sessions import Session
from paceline.server.shard import Shard
from paceline.server.shard_set import ShardSet
from paceline.transport import Memory
from paceline.transport.unix_connection import Closed, Listener, UnixConnection, connect, deserted

_LOOK = 0.5
"""Seconds between looks at whether those live who have not come yet."""


def group_count(plan_strategy: str, workers: int) -> int:
    """How many groups there are, each with a buffer of its own for its mean gradient."""
    strategy = parse_strategy(plan_strategy)
    return workers // strategy.size if isinstance(strategy, Groups) else 0


def table_size(workers: int, parameters: int) -> int:
    """Of the memory in which workers leave hyperparameters, and which parameters have gradients."""
    return workers * (SLOT + parameters)


def serve(address: str, index: int, patience: float, say: Callable[[str], None]) -> None:
    """Be a server until the run is over."""
    if index == 0:
        _serve_first(Listener(address), patience, say)
    else:
        _serve_further(connect(address, ToShard, patience), index, patience)


def _shard(plan: RunSpec, index: int, memories: list[Memory]) -> Shard:
    gradients, versions, _, _, _, state = memories
    groups = group_count(plan.strategy, plan.workers)
    return Shard(plan, index, groups, gradients, versions, state)


class _PendingJoins:
    """Who has come, until all have."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.others: dict[int, UnixConnection[Any]] = {}
        self.plan: RunSpec | None = None
        self.text = b""
        self.descriptors: list[int] = []

    @property
    def complete(self) -> bool:
        plan = self.plan
        return plan is not None and len(self.sessions) == plan.workers and len(self.others) == plan.servers - 1

    def welcome(self, connection: UnixConnection[Any], patience: float) -> None:
        hello, received = connection.receive_with_descriptors(MEMORIES)
        if isinstance(hello, ShardHello):
            self.others[hello.index] = connection
        elif isinstance(hello, Hello):
            self.sessions[hello.rank] = Session(hello.rank, hello.pid, connection, host=hello.host)
            if hello.plan:
                self.text, self.descriptors = receive_parts(connection, patience) or b"", received
                self.plan = msgspec.msgpack.decode(self.text, type=RunSpec)

    def session_the_dead(self) -> None:
        """Who died before it came has a session with nobody at it, where its end is heard as any other's."""
        for rank, pid in enumerate(self.plan.pids if self.plan is not None else ()):
            if pid and rank not in self.sessions and not _lives(pid):
                self.sessions[rank] = Session(rank, pid, deserted(FromWorker))


def _lives(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        waiting = select.poll()  # a process may have more files open than select() can tell apart
        waiting.register(descriptor, select.POLLIN)
        return not waiting.poll(0)
    finally:
        os.close(descriptor)


def _gather(listener: Listener, patience: float) -> _PendingJoins:
    until = time.monotonic() + patience
    pending = _PendingJoins()
    while not pending.complete:
        connection = listener.accept(FromWorker, max(0.0, min(_LOOK, until - time.monotonic())))
        if connection is not None:
            with contextlib.suppress(Closed):  # whoever it was is gone
                pending.welcome(connection, patience)
            continue
        pending.session_the_dead()
        if time.monotonic() >= until:
            raise JoinError(f"not all workers and servers came together within {patience:g} s")
    return pending


def _serve_first(listener: Listener, patience: float, say: Callable[[str], None]) -> None:
    pending = _gather(listener, patience)
    sessions, others, plan = pending.sessions, pending.others, pending.plan
    assert plan is not None
    for index in sorted(others):
        others[index].send(Ready(), pending.descriptors)
        send_parts(others[index], pending.text)
    memories = [Memory.inherited(descriptor) for descriptor in pending.descriptors]
    try:
        own = _shard(plan, 0, memories)
        shards = ShardSet(own, dict(sorted(others.items())), plan.timeouts.barrier)
        for index, connection in sorted(others.items()):
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
    table = memories[2]
    parameters = len(plan.parameters)
    slots = [table.bytes(rank * SLOT, SLOT) for rank in range(plan.capacity)]
    start = plan.capacity * SLOT
    used = [table.bytes(start + rank * parameters, parameters) for rank in range(plan.capacity)]
    words = SharedFlags(memories[3], plan.capacity)
    coordinator = Coordinator(plan, sessions, shards, Hyperparameters(None, slots), used, words, say)
    coordinator.let_in(listener, pending.text, memories)
    for session in sessions.values():
        with contextlib.suppress(Closed):  # its end will be heard
            session.connection.send(Ready())
    try:
        coordinator.run()
    finally:
        shards.close()
        for memory in memories:
            memory.close_descriptor()


def _serve_further(connection: UnixConnection[Any], index: int, patience: float) -> None:
    try:
        connection.send(ShardHello(index, os.getpid()))
        _, descriptors = connection.receive_with_descriptors(MEMORIES)
        plan = msgspec.msgpack.decode(receive_parts(connection, patience) or b"", type=RunSpec)
        memories = [Memory.inherited(descriptor) for descriptor in descriptors]
        try:
            shard = _shard(plan, index, memories)
            for memory in memories:
                memory.close_descriptor()
            connection.send(ShardAnswer())
            while True:
                connection.send(ShardAnswer(_do(shard, connection.receive())))
        except (Closed, TeamError):
            raise
        except Exception as error:
            connection.send(RunFailed("ServerLost", f"{type(error).__name__}: {error}", []))
            raise
    except Closed:
        pass  # the first server has ended, and so does this one
    finally:
        connection.close()


def _do(shard: Shard, message: Any) -> float:
    match message:
        case ApplyUpdate():
            return shard.apply(message)
        case AddGradient():
            shard.add(message)
        case MeasureDistance():
            return shard.distance(message)
        case ReloadState():
            shard.reload()
    return 0.0


def serve_in_thread(address: str, index: int, patience: float, say: Callable[[str], None]) -> threading.Thread:
    """Be a server beside a worker, in its process."""

    def run() -> None:
        try:
            serve(address, index, patience, say)
        except Exception as error:
            say(f"the server in this worker failed: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name=f"paceline server {index}", daemon=True)
    thread.start()
    return thread
