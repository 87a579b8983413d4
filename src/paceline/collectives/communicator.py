"""One member's access to a group's collectives, through shared memory or by an algorithm over a channel."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline import topologies
from paceline.collectives import algorithms
from paceline.collectives.group import Group
from paceline.collectives.operation import Op
from paceline.collectives.operators import reducer
from paceline.collectives.shared_memory import SharedMemoryCollectives
from paceline.collectives.tensors import in_one_piece, put_back
from paceline.errors import UsageError
from paceline.events import Message
from paceline.topologies import Traffic
from paceline.transport.channel import Channel, CountingChannel, PendingSend
from paceline.transport.machines_mailbox import MachinesMailbox, MailboxPart
from paceline.transport.mailbox import Mailbox

TOPOLOGIES = ("auto", "shared", *topologies.TOPOLOGIES)
TAG = -21
"""Tag of the messages of algorithms; users' tags are not negative."""
Price = Callable[[int], float]
"""Seconds of an all-reduce, by its bytes."""
_PROBES = ((1 << 10, 6), (1 << 17, 3), (1 << 20, 2))
"""Bytes and repetitions of the all-reduces from which costs are measured."""


class MailChannel:
    """A channel through a mailbox."""

    def __init__(self, mailbox: Mailbox | MachinesMailbox | MailboxPart) -> None:
        self.rank, self.size = mailbox.rank, mailbox.size
        self._mailbox = mailbox

    def send(self, peer: int, tensor: torch.Tensor, tag: int = TAG) -> PendingSend:
        return self._mailbox.send(peer, tensor, tag)

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = TAG) -> None:
        self._mailbox.receive(peer, tensor, tag).wait()


class ObservedTraffic:
    """Messages of the collectives that ran inside `observe`."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """Messages and bytes of this member."""
        self.messages: list[Message] = []
        """One event per message, in the order of their ends."""

    def add(self, traffic: Traffic) -> None:
        for name in Traffic.__struct_fields__:
            setattr(self.traffic, name, getattr(self.traffic, name) + getattr(traffic, name))


class Communicator:
    """Runs collectives in a chosen topology.

    channel: `send` and `receive` need one that takes tags. group: None if the members do not share memory.
    """

    def __init__(self, rank: int, size: int, channel: Channel, group: Group | None) -> None:
        self.rank, self.size = rank, size
        self._channel, self._group = channel, group
        self._observers: list[ObservedTraffic] = []
        self.pushed: dict[tuple[int, int], int] = {}
        self.pulled: dict[tuple[int, int], int] = {}
        """Messages with a gradient that were pushed or pulled, by rank and tag."""
        self._prices: dict[str, Price] | None = None
        self._chosen: dict[tuple[str, int], str] = {}

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> PendingSend:
        """Begins to send a contiguous tensor."""
        with self._observed("push") as channel:
            sending: PendingSend = channel.send(peer, tensor, tag)
            return sending

    def receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Receives a contiguous tensor."""
        with self._observed("pull") as channel:
            channel.receive(peer, tensor, tag)

    @contextmanager
    def observe(self) -> Iterator[ObservedTraffic]:
        """Records the messages that are sent and received in the block."""
        seen = ObservedTraffic()
        self._observers.append(seen)
        try:
            yield seen
        finally:
            self._observers.remove(seen)

    @contextmanager
    def _observed(self, operation: str, topology: str = "") -> Iterator[Any]:
        """The channel, counted for the observers."""
        if not self._observers:
            yield self._channel
            return
        channel = CountingChannel(self._channel, partial(self._note, operation, topology))
        try:
            yield channel
        finally:
            for observer in self._observers:
                observer.add(channel.traffic)

    def _note(self, operation: str, topology: str, direction: str, peer: int, size: int, start: float) -> None:
        message = Message(self.rank, start, time.perf_counter() - start, operation, topology, direction, peer, size)
        for observer in self._observers:
            observer.messages.append(message)

    # -- operations --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Op, topology: str = "auto") -> None:
        chosen = self._choose("all_reduce", topology, tensor.nbytes)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.all_reduce(tensor, op))
            return
        reduction = reducer(op, tensor.dtype)
        flat = in_one_piece(tensor).view(-1)
        self._run("all_reduce", chosen, flat, reduction.add)
        reduction.divide(flat, self.size)
        put_back(tensor, flat)

    def reduce(self, tensor: torch.Tensor, root: int, op: Op, topology: str = "auto") -> None:
        chosen = self._choose("reduce", topology, tensor.nbytes)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.reduce(tensor, root, op))
            return
        reduction = reducer(op, tensor.dtype)
        flat = in_one_piece(tensor).view(-1)
        self._run("reduce", chosen, flat, reduction.add, root)
        if self.rank == root:
            reduction.divide(flat, self.size)
            put_back(tensor, flat)

    def reduce_scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op, topology: str = "auto") -> None:
        size = sum(part.nbytes for part in inputs)
        chosen = self._choose("reduce_scatter", topology, size)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.reduce_scatter(out, inputs, op))
            return
        reduction = reducer(op, out.dtype)
        parts = [part.reshape(-1).clone() for part in inputs]  # algorithms use them on the way
        self._run("reduce_scatter", chosen, parts, reduction.add)
        reduction.divide(parts[self.rank], self.size)
        out.copy_(parts[self.rank].view(out.shape))

    def broadcast(self, tensor: torch.Tensor, root: int, topology: str = "auto") -> None:
        flat = in_one_piece(tensor).view(-1)
        chosen = self._choose("broadcast", topology, flat.nbytes)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.broadcast(flat, root))
        else:
            self._run("broadcast", chosen, flat, root)
        put_back(tensor, flat)

    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor, topology: str = "auto") -> None:
        source = in_one_piece(tensor)
        chosen = self._choose("all_gather", topology, sum(out.nbytes for out in outs))
        if chosen == "shared":
            self._run_shared(lambda: self._shared.all_gather(outs, source))
            return
        parts = [out.view(-1) for out in outs]
        parts[self.rank].copy_(source.view(-1))
        self._run("all_gather", chosen, parts)

    def gather(
        self,
        outs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        topology: str = "auto",
        size: int = 0,
    ) -> None:
        """size: bytes in all, equal on all members; 0 if unknown."""
        source = in_one_piece(tensor)
        chosen = self._choose("gather", topology, size)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.gather(outs, source, root))
            return
        parts = None if outs is None else [out.view(-1) for out in outs]
        self._run("gather", chosen, source.view(-1), parts, root)

    def scatter(
        self, out: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, topology: str = "auto", size: int = 0
    ) -> None:
        """size: as for `gather`."""
        parts = None if inputs is None else [in_one_piece(part) for part in inputs]
        chosen = self._choose("scatter", topology, size)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.scatter(out, parts, root))
            return
        flat = None if parts is None else [part.view(-1) for part in parts]
        self._run("scatter", chosen, out.view(-1), flat, root)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], topology: str = "auto", size: int = 0
    ) -> None:
        """size: as for `gather`."""
        parts = [in_one_piece(part) for part in inputs]
        chosen = self._choose("all_to_all", topology, size)
        if chosen == "shared":
            self._run_shared(lambda: self._shared.all_to_all(outs, parts))
            return
        self._run("all_to_all", chosen, [part.view(-1) for part in parts], [out.view(-1) for out in outs])

    def barrier(self, topology: str = "auto") -> None:
        chosen = self._choose("barrier", topology, 0)
        if chosen == "shared":
            self._run_shared(self._shared.barrier)
        else:
            self._run("barrier", chosen)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def prices(self) -> dict[str, Price]:
        """By topology, the measured cost of an all-reduce."""
        if self._prices is None:
            self._prices = self._measure()
        return self._prices

    @staticmethod
    def has(operation: str, topology: str) -> bool:
        """True if a topology has this operation."""
        return topology in ("auto", "shared") or operation in algorithms.ALGORITHMS.get(topology, ())

    def check(self, operation: str, topology: str) -> None:
        """Raises UsageError, before any member waits, if a topology does not have this operation."""
        if topology not in TOPOLOGIES:
            raise UsageError(f"there is no topology '{topology}'; there are {', '.join(TOPOLOGIES)}")
        if topology == "shared" and self._group is None:
            raise UsageError("the topology shared needs a group of the backend paceline, on one machine")
        if topology not in ("auto", "shared"):
            algorithms.find(topology, operation)

    def _choose(self, operation: str, topology: str, size: int) -> str:
        """The given topology; for `auto`, the one with the least cost for so many bytes.

        All members must choose alike, so the size is 0 where it may differ between them.
        """
        if topology == "auto":
            key = operation, size.bit_length()
            chosen = self._chosen.get(key)
            if chosen is None:
                chosen = self._chosen[key] = self._cheapest(operation, size)
            return chosen
        self.check(operation, topology)
        return topology

    def _cheapest(self, operation: str, size: int) -> str:
        having = [name for name, known in algorithms.ALGORITHMS.items() if operation in known]
        if self._group is not None:
            having.append("shared")
        if self.size == 1:
            return having[-1]
        prices = self.prices()
        return min(having, key=lambda name: prices[name](1 << size.bit_length()))

    def _measure(self) -> dict[str, Price]:
        """Times all-reduces of some sizes in each topology; all members use the times of rank 0."""
        names = [*algorithms.ALGORITHMS, *(["shared"] if self._group is not None else [])]
        times = [[self._best(name, size, count) for size, count in _PROBES] for name in names]
        numbers = torch.tensor(times, dtype=torch.float64).view(-1)
        algorithms.find("tree", "broadcast")(self._channel, numbers, 0)
        table = numbers.view(-1, len(_PROBES)).tolist()
        return {name: partial(_price, known) for name, known in zip(names, table, strict=True)}

    def _best(self, topology: str, size: int, count: int) -> float:
        data, best = torch.zeros(size, dtype=torch.uint8), math.inf
        reduction = reducer(Op.MAX, data.dtype)
        for _ in range(count):
            start = time.perf_counter()
            if topology == "shared":
                self._enqueue(lambda: self._shared.all_reduce(data, Op.MAX))
            else:
                self._enqueue(lambda: algorithms.find(topology, "all_reduce")(self._channel, data, reduction.add))
            best = min(best, time.perf_counter() - start)
        return best

    def _enqueue(self, run: Callable[[], None]) -> None:
        self._group.queue.run(run) if self._group is not None else run()

    # -- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> SharedMemoryCollectives:
        assert self._group is not None
        return self._group.shared

    def _run_shared(self, run: Callable[[], None]) -> None:
        assert self._group is not None
        if not self._observers:
            self._group.queue.run(run)
            return
        shared = self._shared
        shared.on_access = lambda operation, *message: self._note(operation, "shared", *message)
        try:
            self._group.queue.run(run)
        finally:
            shared.on_access = None

    def _run(self, operation: str, topology: str, *arguments: Any) -> None:
        """Runs an operation by an algorithm, in order with the group's other operations."""
        function = algorithms.find(topology, operation)
        if topology == "hub" and operation in ("gather", "scatter"):
            function = partial(function, hub=arguments[-1])  # the root itself is the hub
        with self._observed(operation, topology) as channel:
            self._enqueue(lambda: function(channel, *arguments))


def _price(known: list[float], size: int) -> float:
    """Seconds for so many bytes, on the line through the two nearest probes."""
    sizes = [probe for probe, _ in _PROBES]
    right = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
    (less, more), (before, after) = sizes[right - 1 : right + 1], known[right - 1 : right + 1]
    slope = max(after - before, 0.0) / (more - less)
    return max(before + slope * (size - less), min(known) / 2)
