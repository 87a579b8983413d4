"""`torch.distributed.init_process_group("paceline")`: c10d's operations on CPU tensors, over shared memory.

What torch asks for is translated here into what `Shared` and `Mailbox` do: lists of tensors into contiguous parts,
options into operators and roots. Nothing is computed here.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp, Store, distributed_c10d  # type: ignore[attr-defined]

from paceline.cluster.membership import machine
from paceline.collectives.devices import by_device, keep_out_of_graphs
from paceline.collectives.group import Group, StoreExchange
from paceline.collectives.hierarchical import HierarchicalGroup
from paceline.collectives.identity import Identity
from paceline.collectives.operation import Op
from paceline.collectives.tensors import Filled, Tensors, given, pieces, plain
from paceline.collectives.work import DONE, GlooWork, P2PWork, PacelineWork, QueuedWork
from paceline.config import Timeouts
from paceline.errors import TeamTimeout, UsageError, WorkerLost, names
from paceline.transport.mailbox import ANY

_CPU = torch.device("cpu")
_SUM = ReduceOp.SUM
_BY_NUMBER = {getattr(ReduceOp.RedOpType, op.name).value: op for op in Op if op is not Op.NONE}
_CALL = -(1 << 40)
"""Tags of a monitored barrier; what users send has none below zero."""


class PacelineProcessGroup(Identity):
    """One member's process group: over shared memory on one machine, and gloo between machines."""

    has_monitored_barrier = True

    def __init__(
        self, store: Store, rank: int, size: int, timeout: datetime.timedelta, others: dict[str, str] | None = None
    ) -> None:
        super().__init__(rank, size)
        self._store, self._timeout, self._others = store, timeout, others or {}
        self._elsewhere: dict[str, distributed.ProcessGroup] = {}
        seconds = timeout.total_seconds()
        store.set_timeout(timeout)
        timeouts = Timeouts(join=seconds, barrier=seconds, notice=max(30.0, seconds / 10))
        exchange = StoreExchange(store, rank, size, timeouts)
        places = [place.decode() for place in exchange(machine().encode())]
        self._machines = HierarchicalGroup(store, rank, places, timeouts, _say) if len(set(places)) > 1 else None
        self.group = self._machines.group if self._machines else Group(rank, size, exchange, timeouts, _say)
        """The members on this machine."""
        exchange.forget()
        self._barriers = 0
        self.member: Any = None
        """This group for `paceline.collectives`, once that is used."""
        self._shared = self._machines or self.group.shared
        self._lane = self._machines.lane if self._machines else self.group.lane
        self._gloo = self._machines.gloo if self._machines else None
        self._mailbox = self.group.mailbox

    @property
    def on_one_machine(self) -> bool:
        return self._machines is None

    # -- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        if type(opts) is distributed.AllreduceOptions and not opts.asyncOp and len(tensors) == 1:
            # What is called most often takes the shortest way.
            tensor, kind = tensors[0].data, _kind(opts.reduceOp)
            if tensor.is_cpu and tensor.layout is torch.strided and kind is not Op.PREMUL_SUM:
                self._lane.now(lambda: self._shared.all_reduce(tensor, kind))
                return DONE
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op, factor = _operator(opts)
        if not tensors[0].is_cpu:
            return self.elsewhere(tensors[0].device.type).allreduce(tensors, opts)
        # A sparse tensor has no memory of its own that could be seen without it.
        dense = [tensor if tensor.is_sparse else plain(tensor) for tensor in tensors]

        def run() -> None:
            for tensor in dense:
                if tensor.is_sparse:
                    self._all_reduce_sparse(tensor, op)
                else:
                    self._shared.all_reduce(tensor, op, factor)

        return self._begin(run, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> PacelineWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0
        combine, factor = _operator(op if isinstance(opts, int) else opts)
        dense = [plain(tensor) for tensor in tensors]

        def run() -> None:
            for tensor in dense:
                self._shared.reduce(tensor, root, combine, factor)

        return self._begin(run, opts, tensors)

    def reduce_scatter(
        self, outputs: Tensors | torch.Tensor, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> PacelineWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for output, parts in zip(outputs, inputs, strict=True):
            self._count("reduce_scatter", "input", parts)
            if parts[self._rank].numel() != output.numel():
                raise UsageError(
                    f"reduce_scatter: the output has {output.numel()} elements, the input for this rank "
                    f"{parts[self._rank].numel()}; they must be as many"
                )
        return self._reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PacelineWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        parts = []
        for output, source in zip(outputs, inputs, strict=True):
            self._whole("reduce_scatter_tensor", "input", source, "output", output)
            parts.append(pieces(given(source), self._size))
        return self._reduce_scatter(outputs, parts, opts)

    def _reduce_scatter(self, outputs: Tensors, inputs: Sequence[Sequence[torch.Tensor]], opts: Any) -> PacelineWork:
        op, factor = _operator(opts)
        filled = Filled(outputs)
        sources = [[given(part) for part in parts] for parts in inputs]

        def run() -> None:
            for output, parts in zip(filled.parts, sources, strict=True):
                self._shared.reduce_scatter(output, parts, op, factor)
            filled.back()

        return self._begin(run, opts, outputs)

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Op) -> None:
        """Sum tensors of which each member has other entries: everybody adds up everybody's."""
        if op not in (Op.SUM, Op.AVG):
            raise UsageError(f"all_reduce of sparse tensors takes sum or avg, not {op.spoken}")
        own = tensor.detach().coalesce()
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
        self._shared.all_gather(counts, torch.tensor([own._nnz()]))
        shape = (own.sparse_dim(), own.values().shape[1:])
        indices = [torch.empty(shape[0], int(count), dtype=torch.int64) for count in counts]
        values = [torch.empty(int(count), *shape[1], dtype=own.dtype) for count in counts]
        self._shared.all_gather(indices, own.indices().contiguous())
        self._shared.all_gather(values, own.values().contiguous())
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), own.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total / self._size if op is Op.AVG else total)

    # -- moving ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> PacelineWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0
        filled = Filled(tensors, keep=self._rank == root)

        def run() -> None:
            for part in filled.parts:
                self._shared.broadcast(part, root)
            if self._rank != root:
                filled.back()

        return self._begin(run, opts, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PacelineWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts in outputs:
            self._count("all_gather", "output", parts)
        return self._all_gather([list(parts) for parts in outputs], inputs, opts, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> PacelineWork:
        # Here torch has one list per rank, each with a tensor per input.
        by_input = [[parts[number] for parts in outputs] for number in range(len(inputs))]
        return self._all_gather(by_input, inputs, opts, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PacelineWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        whole = Filled(outputs)
        parts = []
        for output, source in zip(whole.parts, inputs, strict=True):
            self._whole("all_gather_into_tensor", "output", output, "input", source)
            parts.append(pieces(output, self._size))
        return self._all_gather(parts, inputs, opts, outputs, whole)

    def _all_gather(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any, result: Any, whole: Filled | None = None
    ) -> PacelineWork:
        filled = [Filled(parts) for parts in outputs]
        sources = [given(source) for source in inputs]

        def run() -> None:
            for place, source in zip(filled, sources, strict=True):
                self._shared.all_gather(place.parts, source)
                place.back()
            if whole is not None:
                whole.back()

        return self._begin(run, opts, result)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> PacelineWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0
        at_root = self._rank == root
        if at_root:
            for parts in outputs:
                self._count("gather", "output", parts)
        filled = [Filled(parts) for parts in outputs] if at_root else [None] * len(inputs)
        sources = [given(source) for source in inputs]

        def run() -> None:
            for place, source in zip(filled, sources, strict=True):
                self._shared.gather(place.parts if place else None, source, root)
                if place:
                    place.back()

        return self._begin(run, opts, outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> PacelineWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0
        sources: list[Tensors | None] = [None] * len(outputs)
        if self._rank == root:
            for parts in inputs:
                self._count("scatter", "input", parts)
            sources = [[given(part) for part in parts] for parts in inputs]
        filled = Filled(outputs)

        def run() -> None:
            for output, parts in zip(filled.parts, sources, strict=True):
                self._shared.scatter(output, parts, root)
            filled.back()

        return self._begin(run, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        self._count("all_to_all", "output", outputs)
        self._count("all_to_all", "input", inputs)
        filled = Filled(outputs)
        sources = [given(part) for part in inputs]

        def run() -> None:
            self._shared.all_to_all(filled.parts, sources)
            filled.back()

        return self._begin(run, opts, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> PacelineWork:
        filled = Filled([output])
        outs = self._split("output", filled.parts[0], output_splits)
        parts = self._split("input", given(source), input_splits)

        def run() -> None:
            self._shared.all_to_all(outs, parts)
            filled.back()

        return self._begin(run, opts, [output])

    def barrier(self, opts: Any = None, timeout: Any = None) -> PacelineWork:  # type: ignore[override]
        return self._begin(self._shared.barrier, opts, [])

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 learns who does not come; the group stays usable for those who do."""
        if self._gloo is not None:
            self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)
            return
        limit = timeout.total_seconds() if timeout is not None else self.group.board.timeouts.barrier
        # Every barrier has tags of its own: a call that comes late to one must not count for the next.
        self._barriers += 1
        call, answer = _CALL - 2 * self._barriers, _CALL - 2 * self._barriers - 1
        nothing, missing = torch.empty(0, dtype=torch.uint8), torch.zeros(self._size, dtype=torch.bool)
        if self._rank:
            self._mailbox.send(0, nothing, call)
            self._mailbox.receive(0, missing, answer).wait(2 * limit + 1.0)
        else:
            self._await_calls(call, limit, wait_all_ranks, missing)
            for rank in range(1, self._size):
                self._mailbox.send(rank, missing, answer)
        late = [rank for rank in range(self._size) if missing[rank]]
        if late:
            raise TeamTimeout(f"{names(late)} did not come to the monitored barrier in {limit:g} s", late)

    def _await_calls(self, tag: int, limit: float, all_ranks: bool, missing: torch.Tensor) -> None:
        """Rank 0 waits for the others, and notes who does not come: the first, or all of them."""
        until = time.monotonic() + limit
        nothing = torch.empty(0, dtype=torch.uint8)
        for rank in range(1, self._size):
            try:
                self._mailbox.receive(rank, nothing, tag).wait(max(0.01, until - time.monotonic()))
            except (TeamTimeout, WorkerLost):
                missing[rank] = True
                if not all_ranks:
                    return

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if self._gloo is not None and self._peer(peer) != self._rank:
            return self._gloo.send([given(tensor)], peer, tag)
        sending = self._mailbox.send(self._box(peer), given(tensor), tag)
        if not sending.done:
            self._mailbox.attend()
        return P2PWork(sending, tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> PacelineWork:
        filled = Filled(tensors)
        if self._gloo is not None and peer != self._rank:
            asked = (filled.parts, tag) if peer == ANY else (filled.parts, self._peer(peer), tag)
            begin = self._gloo.recv_anysource if peer == ANY else self._gloo.recv
            return GlooWork(begin(*asked), filled.back)
        receiving = self._mailbox.receive(self._box(peer), filled.parts[0], tag)
        letter = P2PWork(receiving, tensors, filled.back if filled.copies else None)
        if not receiving.done:
            self._mailbox.attend()
        return letter

    def _box(self, peer: int) -> int:
        """A member's place in the mailbox; between machines that is only used for what a member sends to itself."""
        if self._gloo is not None:
            return self.group.rank
        return peer if peer == ANY else self._peer(peer)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PacelineWork:
        return self.recv(tensors, ANY, tag)

    # -- what torch asks of a process group --------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations inside a coalescing block are begun at once; its end is the last of them."""

    def _end_coalescing(self, device: torch.device) -> PacelineWork:
        return QueuedWork(self._lane, lambda: None, [])

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *(torch.device(device) for device in self._others)]

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.set_timeout(timeout)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        board = self.group.board
        board.timeouts = Timeouts(barrier=timeout.total_seconds(), notice=board.timeouts.notice)

    def shutdown(self) -> None:
        (self._machines or self.group).close()

    def abort(self) -> None:
        self.group.board.fail("the process group was aborted")
        self.shutdown()

    def elsewhere(self, device: str) -> distributed.ProcessGroup:
        """The group for tensors of another device: all members ask for it when they first need it."""
        if device not in self._others:
            raise UsageError(
                f"the process group 'paceline' is for CPU tensors; for {device} give its backend, too: "
                f"init_process_group('cpu:paceline,{device}:…')"
            )
        if device not in self._elsewhere:
            group, _ = distributed_c10d._new_process_group_helper(
                self._size,
                self._rank,
                [],
                f"{device}:{self._others[device]}",
                self._store,
                distributed_c10d.GroupName(f"{self.group_name}/{device}"),
                timeout=self._timeout,
            )
            self._elsewhere[device] = group
        return self._elsewhere[device]

    # -- what these have in common -----------------------------------------------------------------------------------

    def _begin(self, run: Callable[[], None], opts: Any, outputs: Any) -> PacelineWork:
        """Do it now if the caller waits anyway, else begin it."""
        if _later(opts):
            return QueuedWork(self._lane, run, outputs)
        self._lane.now(run)
        return DONE

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise UsageError(f"there is no rank {rank} in this group; ranks are 0 to {self._size - 1}")
        return rank

    def _count(self, name: str, which: str, parts: Sequence[torch.Tensor]) -> None:
        if len(parts) != self._size:
            raise UsageError(f"{name} was given {len(parts)} {which} tensors; it needs one per rank, {self._size}")

    def _whole(self, name: str, large: str, whole: torch.Tensor, small: str, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self._size:
            raise UsageError(
                f"{name}: the {large} has {whole.numel()} elements and the {small} {part.numel()}; "
                f"with {self._size} ranks the {large} must have {part.numel() * self._size}"
            )

    def _split(self, which: str, tensor: torch.Tensor, splits: Sequence[int]) -> Tensors:
        """Parts of the first dimension, one per rank."""
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise UsageError(
                    f"all_to_all_single: the {which} has {rows} rows, which do not divide by {self._size} ranks; "
                    "give split sizes"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise UsageError(
                f"all_to_all_single: the split sizes of the {which} are {list(splits)}; they must be {self._size}, "
                f"and {rows} together"
            )
        return list(tensor.split(list(splits)))


def _kind(op: Any) -> Op:
    return Op.SUM if op == _SUM else _BY_NUMBER[op.op.value]


def _operator(opts: Any) -> tuple[Op, float | torch.Tensor | None]:
    """Which operator is asked for, and by what a premultiplied sum multiplies."""
    if opts is None:
        return Op.SUM, None
    wanted: Any = opts if isinstance(opts, ReduceOp | ReduceOp.RedOpType) else opts.reduceOp
    kind = getattr(wanted, "op", wanted)
    op = _BY_NUMBER[kind.value]
    return op, wanted.factor if op is Op.PREMUL_SUM else None


def _later(opts: Any) -> bool:
    """Whether the caller goes on without waiting; those who do not say, may."""
    return bool(getattr(opts, "asyncOp", True))


def _say(message: str) -> None:
    print(f"paceline: {message}", file=sys.stderr, flush=True)


for _name in (
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
):
    setattr(PacelineProcessGroup, _name, by_device(_name, getattr(PacelineProcessGroup, _name)))

keep_out_of_graphs(PacelineProcessGroup.allreduce)
keep_out_of_graphs(PacelineProcessGroup.barrier)

for _old, _new in (
    ("_allgather_base", "all_gather_single"),
    ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ("_reduce_scatter_base", "reduce_scatter_single"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ("alltoall_base", "all_to_all_single"),
):
    setattr(PacelineProcessGroup, _old, getattr(PacelineProcessGroup, _new))


def create(
    store: Store, rank: int, size: int, timeout: datetime.timedelta, others: dict[str, str]
) -> PacelineProcessGroup:
    """What torch.distributed calls for a new group; `others` are the backends for devices besides the CPU."""
    return PacelineProcessGroup(store, rank, size, timeout, others)
