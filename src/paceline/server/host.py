"""What runs in a server: a process of its own, or a thread of a worker."""

from __future__ import annotations

import contextlib
import os
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
from paceline.transport import Memory
from paceline.transport.futex import Words
from paceline.transport.wire import Closed, Listener, Wire, connect


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
    gradients, versions, _, _, state = memories
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


def _gather(listener: Listener, patience: float) -> _Company:
    until = time.monotonic() + patience
    company = _Company()
    while not company.complete:
        wire = listener.accept(FromWorker, max(0.0, until - time.monotonic()))
        if wire is not None:
            with contextlib.suppress(Closed):  # whoever it was is gone; the others will notice
                company.welcome(wire, patience)
        elif time.monotonic() >= until:
            raise JoinError(f"not all workers and servers came together within {patience:g} s")
    listener.close()
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
            seat.wire.send(Failed("JoinError", f"the server could not start: {type(error).__name__}: {error}", []))
        raise
    table, floors = memories[2], memories[3]
    parameters = len(plan.parameters)
    slots = [table.bytes(rank * SLOT, SLOT) for rank in range(plan.workers)]
    start = plan.workers * SLOT
    used = [table.bytes(start + rank * parameters, parameters) for rank in range(plan.workers)]
    for memory in memories:
        memory.close_descriptor()
    words = Words(floors.bytes(0, Words.STRIDE * plan.workers), plan.workers)
    coordinator = Coordinator(plan, seats, shards, Hyperparameters(None, slots), used, words, say)
    for seat in seats.values():
        seat.wire.send(Ready())
    try:
        coordinator.run()
    finally:
        shards.close()


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
