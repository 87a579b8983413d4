"""Collectives of a group whose members are on several machines: shared memory inside a machine, gloo between them.

An all-reduce combines inside each machine, every member its own part; then members in the same place on all machines
combine those parts over the network, all at once; then parts are gathered inside the machines again. Each byte crosses
the network once, whatever the number of members on a machine. Other operations are algorithms over a channel that uses
shared memory or gloo, depending on the receiver.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.collectives import algorithms
from paceline.collectives.channels import MailChannel
from paceline.collectives.gloo import open_gloo
from paceline.collectives.group import Group, StoreExchange
from paceline.collectives.op_queue import OpQueue
from paceline.collectives.operation import Op
from paceline.collectives.operators import reducer
from paceline.collectives.tensors import put_back
from paceline.config import Timeouts
from paceline.errors import TeamError
from paceline.transport.channel import Channel, PendingSend
from paceline.transport.peer_memory import bytes_of

_LARGE = 64 * 1024
"""Bytes from which on a tensor is cut into parts."""
_TAG = 0x4000_0000
"""The tag of algorithms' messages, which users' messages do not have."""


class HierarchicalGroup:
    """One member's collectives in such a group; has the interface of `SharedMemoryCollectives`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        machines: list[str],
        timeouts: Timeouts,
        say: Callable[[str], None],
    ) -> None:
        self.rank, self.size = rank, len(machines)
        self.spin = True
        local = [other for other, machine in enumerate(machines) if machine == machines[rank]]
        inside = PrefixStore(f"inside/{local[0]}", store)
        exchange = StoreExchange(inside, local.index(rank), len(local), timeouts)
        self.group = Group(local.index(rank), len(local), exchange, timeouts, say)
        limit = datetime.timedelta(seconds=timeouts.barrier)
        self.gloo = open_gloo(PrefixStore("between", store), rank, self.size, None, limit)
        exchange.forget()
        self._channel = _MachineChannel(rank, self.size, local, self.group, self.gloo)
        self.queue = OpQueue(self, self.group.control.fail)
        self._end = weakref.finalize(self, OpQueue.close, self.queue, 2.0)
        counts = {machines.count(machine) for machine in machines}
        column = [other for other in range(self.size) if _index(machines, other) == _index(machines, rank)]
        self._column = _Part(self._channel, column) if len(counts) == 1 else None

    # -- reductions --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        reduction = reducer(op, tensor.dtype)
        flat = tensor.contiguous().view(-1)
        if self._column is None or flat.nbytes < _LARGE:
            self._do("tree", "all_reduce", flat, reduction.add)
        else:
            self._all_reduce_by_parts(flat, op)
        reduction.divide(flat, self.size)
        put_back(tensor, flat)

    def _all_reduce_by_parts(self, flat: torch.Tensor, op: Op) -> None:
        assert self._column is not None
        shared, count = self.group.shared, self.group.size
        inner = Op.SUM if op in (Op.AVG, Op.PREMUL_SUM) else op
        share = -(-flat.numel() // count)
        parts = list(flat.split(share)) + [flat[:0]] * count
        own = torch.empty_like(parts[self.group.rank])
        shared.reduce_scatter(own, parts[:count], inner)
        with _gloo_errors():
            algorithms.find("ring", "all_reduce")(self._column, own, reducer(inner, flat.dtype).add)
        shared.all_gather(parts[:count], own)

    def reduce(self, tensor: torch.Tensor, root: int, op: Op = Op.SUM) -> None:
        reduction = reducer(op, tensor.dtype)
        flat = tensor.contiguous().view(-1)
        flat = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat
        self._do("tree", "reduce", flat, reduction.add, root)
        if self.rank == root:
            reduction.divide(flat, self.size)
            tensor.copy_(flat.view(tensor.shape))

    def reduce_scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM) -> None:
        reduction = reducer(op, out.dtype)
        parts = [part.clone().view(-1) for part in inputs]
        self._do("ring", "reduce_scatter", parts, reduction.add)
        reduction.divide(parts[self.rank], self.size)
        out.copy_(parts[self.rank].view(out.shape))

    # -- moving ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._do("tree", "barrier")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._do("tree", "broadcast", tensor.view(-1), root)

    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        parts = [out.view(-1) for out in outs]
        parts[self.rank].copy_(tensor.view(-1))
        self._do("ring", "all_gather", parts)

    def gather(self, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        parts = None if outs is None else [out.view(-1) for out in outs]
        self._do("direct", "gather", tensor.view(-1), parts, root)

    def scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        parts = None if inputs is None else [part.view(-1) for part in inputs]
        self._do("direct", "scatter", out.view(-1), parts, root)

    def all_to_all(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        parts = [part.clone().view(-1) for part in inputs]
        self._do("direct", "all_to_all", parts, [out.view(-1) for out in outs])

    def close(self) -> None:
        self._end()
        self.group.close()

    def _do(self, topology: str, operation: str, *arguments: object) -> None:
        with _gloo_errors():
            algorithms.find(topology, operation)(self._channel, *arguments)


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


class _gloo_errors:  # noqa: N801
    """Turns errors of gloo into ours."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is RuntimeError:
            raise TeamError(f"the connection to another machine failed: {str(error).splitlines()[0]}") from error


def _index(places: list[str], rank: int) -> int:
    """The number of members before this one on its machine."""
    return places[:rank].count(places[rank])
