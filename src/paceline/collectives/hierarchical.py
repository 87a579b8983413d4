"""Collectives of a group whose members are on several machines: shared memory inside a machine, messages between them.

An all-reduce combines inside each machine, every member its own part; then members in the same place on all machines
combine those parts over the network, all at once; then parts are gathered inside the machines again. Each byte crosses
the network once, whatever the number of members on a machine. Other operations are algorithms over a channel that uses
shared memory or the network, depending on the receiver.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.collectives import algorithms
from paceline.collectives.algorithms.messages import Combine, combine_all, others, outgoing
from paceline.collectives.communicator import Communicator, MailChannel
from paceline.collectives.gloo import open_gloo
from paceline.collectives.group import Group, StoreExchange
from paceline.collectives.op_queue import OpQueue
from paceline.collectives.operation import Op
from paceline.collectives.operators import reducer
from paceline.collectives.tensors import in_one_piece, put_back
from paceline.config import Timeouts
from paceline.errors import TeamError
from paceline.transport.channel import Channel, PendingSend
from paceline.transport.peer_memory import bytes_of

_LARGE = 64 * 1024
"""Bytes from which on a tensor is cut into parts."""
_SMALL = 16 * 1024
"""Bytes, over all members, up to which every member sends a tensor to all others."""
_TAG = 0x4000_0000
"""The tag of algorithms' messages, which users' messages do not have."""
_TOPOLOGIES = dict.fromkeys(("all_reduce", "reduce", "broadcast", "barrier"), "tree")
_TOPOLOGIES |= dict.fromkeys(("reduce_scatter", "all_gather"), "ring")
"""By operation, its topology where it is not direct."""


class HierarchicalCommunicator(Communicator):
    """One member's collectives in such a group, each in one topology."""

    def __init__(self, rank: int, channel: Channel, local: Group, machines: Sequence[Hashable]) -> None:
        """local: the members of this machine; machines: of all members, by rank."""
        super().__init__(rank, len(machines), channel, None)
        self.group = local
        counts = {machines.count(machine) for machine in machines}
        column = [other for other in range(self.size) if _index(machines, other) == _index(machines, rank)]
        self._column = _Part(channel, column) if len(counts) == 1 else None

    def all_reduce(self, tensor: torch.Tensor, op: Op, topology: str = "auto") -> None:
        """All tensors become the reduction of all; a large one in parts, one for each member of a machine."""
        reduction = reducer(op, tensor.dtype)
        flat = in_one_piece(tensor).view(-1)
        if self.size == 2 or tensor.nbytes * self.size < _SMALL:
            with self._errors():
                _exchange(self._channel, flat, reduction.add)
        elif self._column is None or tensor.nbytes < _LARGE:
            super().all_reduce(tensor, op, topology)
            return
        else:
            self._reduce_in_parts(self._column, flat, op, reduction.add)
        reduction.divide(flat, self.size)
        put_back(tensor, flat)

    def _reduce_in_parts(self, column: Channel, flat: torch.Tensor, op: Op, combine: Combine) -> None:
        shared, count = self.group.shared, self.group.size
        inner = Op.SUM if op in (Op.AVG, Op.PREMUL_SUM) else op
        parts = [*flat.split(-(-flat.numel() // count)), *[flat[:0]] * count][:count]
        own = torch.empty_like(parts[self.group.rank])
        shared.reduce_scatter(own, parts, inner)
        with self._errors():
            if column.size == 2:
                _exchange(column, own, combine)
            else:
                algorithms.find("ring", "all_reduce")(column, own, combine)
        shared.all_gather(parts, own)

    def _choose(self, operation: str, topology: str, size: int) -> str:
        return _TOPOLOGIES.get(operation, "direct")

    def _run(self, operation: str, topology: str, *arguments: Any) -> None:
        with self._errors():
            algorithms.find(topology, operation)(self._channel, *arguments)

    def _errors(self) -> AbstractContextManager[None]:
        """Turns errors of the channel into ours."""
        return nullcontext()

    def close(self) -> None:
        self.group.close()


class HierarchicalGroup(HierarchicalCommunicator):
    """A member whose messages between machines go through gloo."""

    def __init__(
        self, store: Store, rank: int, machines: list[str], timeouts: Timeouts, say: Callable[[str], None]
    ) -> None:
        size = len(machines)
        self.spin = True
        local = [other for other, machine in enumerate(machines) if machine == machines[rank]]
        inside = PrefixStore(f"inside/{local[0]}", store)
        exchange = StoreExchange(inside, local.index(rank), len(local), timeouts)
        group = Group(local.index(rank), len(local), exchange, timeouts, say)
        limit = datetime.timedelta(seconds=timeouts.barrier)
        self.gloo = open_gloo(PrefixStore("between", store), rank, size, None, limit)
        exchange.forget()
        super().__init__(rank, _MachineChannel(rank, size, local, group, self.gloo), group, machines)
        self.queue = OpQueue(self, group.control.fail)
        self._end = weakref.finalize(self, OpQueue.close, self.queue, 2.0)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], topology: str = "auto", size: int = 0
    ) -> None:
        super().all_to_all(outs, [part.clone() for part in inputs], topology, size)  # as they may share memory

    def _errors(self) -> AbstractContextManager[None]:
        return _gloo_errors()

    def close(self) -> None:
        self._end()
        super().close()


class _MachineChannel:
    """A channel to members of this machine through shared memory, to others through gloo."""

    def __init__(self, rank: int, size: int, local: list[int], group: Group, gloo: Any) -> None:
        self.rank, self.size = rank, size
        self._local = {other: index for index, other in enumerate(local)}
        self._inside, self._gloo = MailChannel(group.mailbox), gloo

    def send(self, peer: int, tensor: torch.Tensor) -> PendingSend:
        if peer in self._local:
            return self._inside.send(self._local[peer], tensor)
        work: PendingSend = self._gloo.send([bytes_of(tensor)], peer, _TAG)
        return work

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        if peer in self._local:
            self._inside.receive(self._local[peer], tensor)
        else:
            self._gloo.recv([bytes_of(tensor)], peer, _TAG).wait()


class _Part:
    """Some members of a channel, renumbered."""

    def __init__(self, channel: Channel, ranks: list[int]) -> None:
        self.rank, self.size = ranks.index(channel.rank), len(ranks)
        self._channel, self._ranks = channel, ranks

    def send(self, peer: int, tensor: torch.Tensor) -> PendingSend:
        return self._channel.send(self._ranks[peer], tensor)

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        self._channel.receive(self._ranks[peer], tensor)


@contextmanager
def _gloo_errors() -> Iterator[None]:
    """Turns errors of gloo into ours."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise TeamError(f"the connection to another machine failed: {str(error).splitlines()[0]}") from error


def _exchange(channel: Channel, flat: torch.Tensor, combine: Combine) -> None:
    """All members send all to all: one message's time, and for two members no more bytes than in parts."""
    own = flat.clone()
    with outgoing(channel) as send:
        for peer in others(channel):
            send(peer, own)
        combine_all(channel, flat, combine)


def _index(places: Sequence[Hashable], rank: int) -> int:
    """The number of members before this one on its machine."""
    return places[:rank].count(places[rank])
