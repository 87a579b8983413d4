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
from paceline.server.messages import (
    MEMORIES,
    Add,
    Answer,
    Apply,
    Distance,
    Failed,
    FromWorker,
    Hello,
    Plan,
    Ready,
    Reload,
    ShardHello,
    ToShard,
    receive_parts,
    send_parts,
)
from paceline.server.seats import Seat
from paceline.server.shard import Shard
from paceline.server.shards import Shards
from paceline.server.words import SharedWords
from paceline.transport import Memory
from paceline.transport.wire import Closed, Listener, Wire, connect, deserted

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


def _shard(plan: Plan, index: int, memories: list[Memory]) -> Shard:
    gradients, versions, _, _, _, state = memories
    groups = group_count(plan.strategy, plan.workers)
    return Shard(plan, index, groups, gradients, versions, state)


class _Company:
    """Who has come, until all have."""

    def __init__(self) -> None:
        self.seats: dict[int, Seat] = {}
        self.others: dict[int, Wire[Any]] = {}
        self.plan: Plan | None = None
        self.text = b""
        self.descriptors: list[int] = []

    @property
    def complete(self) -> bool:
        plan = self.plan
        return plan is not None and len(self.seats) == plan.workers and len(self.others) == plan.servers - 1

    def welcome(self, wire: Wire[Any], patience: float) -> None:
        hello, received = wire.receive_with_descriptors(MEMORIES)
        if isinstance(hello, ShardHello):
            self.others[hello.index] = wire
        elif isinstance(hello, Hello):
            self.seats[hello.rank] = Seat(hello.rank, hello.pid, wire, host=hello.host)
            if hello.plan:
                self.text, self.descriptors = receive_parts(wire, patience) or b"", received
                self.plan = msgspec.msgpack.decode(self.text, type=Plan)

    def seat_the_dead(self) -> None:
        """Who died before it came has a seat with nobody at it, where its end is heard as any other's."""
        for rank, pid in enumerate(self.plan.pids if self.plan is not None else ()):
            if pid and rank not in self.seats and not _lives(pid):
                self.seats[rank] = Seat(rank, pid, deserted(FromWorker))


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


def _gather(listener: Listener, patience: float) -> _Company:
    until = time.monotonic() + patience
    company = _Company()
    while not company.complete:
        wire = listener.accept(FromWorker, max(0.0, min(_LOOK, until - time.monotonic())))
        if wire is not None:
            with contextlib.suppress(Closed):  # whoever it was is gone
                company.welcome(wire, patience)
            continue
        company.seat_the_dead()
        if time.monotonic() >= until:
            raise JoinError(f"not all workers and servers came together within {patience:g} s")
    return company


def _serve_first(listener: Listener, patience: float, say: Callable[[str], None]) -> None:
    company = _gather(listener, patience)
    seats, others, plan = company.seats, company.others, company.plan
    assert plan is not None
    for index in sorted(others):
        others[index].send(Ready(), company.descriptors)
        send_parts(others[index], company.text)
    memories = [Memory.inherited(descriptor) for descriptor in company.descriptors]
    try:
        own = _shard(plan, 0, memories)
        shards = Shards(own, dict(sorted(others.items())), plan.timeouts.meeting)
        for index, wire in sorted(others.items()):
            answer = wire.receive_within(patience)
            if not isinstance(answer, Answer):
                raise JoinError(f"server {index} could not start: {getattr(answer, 'message', 'no answer')}")
    except Exception as error:
        for seat in seats.values():
            with contextlib.suppress(Closed):
                seat.wire.send(Failed("JoinError", f"the server could not start: {type(error).__name__}: {error}", []))
        raise
    table = memories[2]
    parameters = len(plan.parameters)
    slots = [table.bytes(rank * SLOT, SLOT) for rank in range(plan.capacity)]
    start = plan.capacity * SLOT
    used = [table.bytes(start + rank * parameters, parameters) for rank in range(plan.capacity)]
    words = SharedWords(memories[3], plan.capacity)
    coordinator = Coordinator(plan, seats, shards, Hyperparameters(None, slots), used, words, say)
    coordinator.let_in(listener, company.text, memories)
    for seat in seats.values():
        with contextlib.suppress(Closed):  # its end will be heard
            seat.wire.send(Ready())
    try:
        coordinator.run()
    finally:
        shards.close()
        for memory in memories:
            memory.close_descriptor()


def _serve_further(wire: Wire[Any], index: int, patience: float) -> None:
    try:
        wire.send(ShardHello(index, os.getpid()))
        _, descriptors = wire.receive_with_descriptors(MEMORIES)
        plan = msgspec.msgpack.decode(receive_parts(wire, patience) or b"", type=Plan)
        memories = [Memory.inherited(descriptor) for descriptor in descriptors]
        try:
            shard = _shard(plan, index, memories)
            for memory in memories:
                memory.close_descriptor()
            wire.send(Answer())
            while True:
                wire.send(Answer(_do(shard, wire.receive())))
        except (Closed, TeamError):
            raise
        except Exception as error:
            wire.send(Failed("ServerLost", f"{type(error).__name__}: {error}", []))
            raise
    except Closed:
        pass  # the first server has ended, and so does this one
    finally:
        wire.close()


def _do(shard: Shard, message: Any) -> float:
    match message:
        case Apply():
            return shard.apply(message)
        case Add():
            shard.add(message)
        case Distance():
            return shard.distance(message)
        case Reload():
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
