"""The collectives of a process group, as c10d calls them.

Translates torch's arguments into those of `SharedMemoryCollectives`: lists of tensors into contiguous parts, options
into operators and roots. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from paceline.collectives.devices import by_device, keep_out_of_graphs
from paceline.collectives.hierarchical import HierarchicalGroup
from paceline.collectives.op_queue import OpQueue
from paceline.collectives.operation import Op
from paceline.collectives.operators import scaled
from paceline.collectives.shared_memory import SharedMemoryCollectives
from paceline.collectives.tensors import Filled, Tensors, given, pieces, plain
from paceline.collectives.work import DONE, PacelineWork, QueuedWork
from paceline.errors import UsageError

_SUM = ReduceOp.SUM
_BY_NUMBER = {getattr(ReduceOp.RedOpType, op.name).value: op for op in Op if op is not Op.NONE}


class CollectiveMethods(distributed.ProcessGroup):
    """The reductions and moves of a process group."""

    _rank: int
    _size: int
    _shared: SharedMemoryCollectives | HierarchicalGroup
    _queue: OpQueue

    def elsewhere(self, device: str) -> distributed.ProcessGroup:
        """The group for tensors of another device."""
        raise NotImplementedError

    # -- reductions --------------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        if type(opts) is distributed.AllreduceOptions and not opts.asyncOp and len(tensors) == 1:
            # A short path for the most frequent call.
            tensor, kind = tensors[0].data, _kind(opts.reduceOp)
            if tensor.is_cpu and tensor.layout is torch.strided and kind is not Op.PREMUL_SUM:
                self._queue.run(lambda: self._shared.all_reduce(tensor, kind))
                return DONE
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op, factor = _operator(opts)
        if not tensors[0].is_cpu:
            return self.elsewhere(tensors[0].device.type).allreduce(tensors, opts)
        # A sparse tensor has no `data` of its own.
        dense = [tensor if tensor.is_sparse else plain(tensor) for tensor in tensors]

        def run() -> None:
            for tensor in dense:
                if tensor.is_sparse:
                    self._all_reduce_sparse(tensor, op)
                else:
                    if factor is not None:
                        tensor.copy_(scaled(tensor, factor))
                    self._shared.all_reduce(tensor, op)

        return self._start(run, opts, tensors)

    @by_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    @by_device
    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> PacelineWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = _root(opts)
        combine, factor = _operator(op if isinstance(opts, int) else opts)
        dense = [plain(tensor) for tensor in tensors]

        def run() -> None:
            for tensor in dense:
                term = scaled(tensor, factor)
                self._shared.reduce(term, root, combine)
                if term is not tensor and self._rank == root:
                    tensor.copy_(term)

        return self._start(run, opts, tensors)

    @by_device
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

    @by_device
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PacelineWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    @by_device
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
                self._shared.reduce_scatter(output, [scaled(part, factor) for part in parts], op)

        return self._start(run, opts, outputs, filled)

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Op) -> None:
        """Sums sparse tensors: every member gathers all entries and adds them."""
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

    @by_device
    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> PacelineWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = _root(opts)
        filled = Filled(tensors, keep=self._rank == root)

        def run() -> None:
            for part in filled.parts:
                self._shared.broadcast(part, root)

        return self._start(run, opts, tensors, *([filled] if self._rank != root else []))

    @by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PacelineWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts in outputs:
            self._count("all_gather", "output", parts)
        return self._all_gather([list(parts) for parts in outputs], inputs, opts, outputs)

    @by_device
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> PacelineWork:
        # Here torch has one list per rank, each with a tensor per input.
        by_input = [[parts[number] for parts in outputs] for number in range(len(inputs))]
        return self._all_gather(by_input, inputs, opts, outputs)

    @by_device
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PacelineWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    @by_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        whole = Filled(outputs)
        parts = []
        for output, source in zip(whole.parts, inputs, strict=True):
            self._whole("all_gather_into_tensor", "output", output, "input", source)
            parts.append(pieces(output, self._size))
        return self._all_gather(parts, inputs, opts, outputs, whole)

    def _all_gather(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any, result: Any, *whole: Filled
    ) -> PacelineWork:
        filled = [Filled(parts) for parts in outputs]
        sources = [given(source) for source in inputs]

        def run() -> None:
            for place, source in zip(filled, sources, strict=True):
                self._shared.all_gather(place.parts, source)

        return self._start(run, opts, result, *filled, *whole)

    @by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> PacelineWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root = _root(opts)
        at_root = self._rank == root
        if at_root:
            for parts in outputs:
                self._count("gather", "output", parts)
        filled = [Filled(parts) for parts in outputs] if at_root else []
        places = [place.parts for place in filled] if at_root else [None] * len(inputs)
        sources = [given(source) for source in inputs]

        def run() -> None:
            for parts, source in zip(places, sources, strict=True):
                self._shared.gather(parts, source, root)

        return self._start(run, opts, outputs, *filled)

    @by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> PacelineWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root = _root(opts)
        sources: list[Tensors | None] = [None] * len(outputs)
        if self._rank == root:
            for parts in inputs:
                self._count("scatter", "input", parts)
            sources = [[given(part) for part in parts] for parts in inputs]
        filled = Filled(outputs)

        def run() -> None:
            for output, parts in zip(filled.parts, sources, strict=True):
                self._shared.scatter(output, parts, root)

        return self._start(run, opts, outputs, filled)

    @by_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        self._count("all_to_all", "output", outputs)
        self._count("all_to_all", "input", inputs)
        filled = Filled(outputs)
        sources = [given(part) for part in inputs]
        return self._start(lambda: self._shared.all_to_all(filled.parts, sources), opts, outputs, filled)

    @by_device
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
        return self._start(lambda: self._shared.all_to_all(outs, parts), opts, [output], filled)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], opts: Any, outputs: Any, *filled: Filled) -> PacelineWork:
        """Runs an operation now if the caller waits for it, else submits it; then copies back what it has filled."""

        def run_and_copy() -> None:
            run()
            for place in filled:
                place.back()

        if getattr(opts, "asyncOp", True):
            return QueuedWork(self._queue, run_and_copy, outputs)
        self._queue.run(run_and_copy)
        return DONE

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
        """Splits a tensor along its first dimension, one part per rank."""
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


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0


def _kind(op: Any) -> Op:
    return Op.SUM if op == _SUM else _BY_NUMBER[op.op.value]


def _operator(opts: Any) -> tuple[Op, float | torch.Tensor | None]:
    """The operator, and the factor of a premultiplied sum."""
    if opts is None:
        return Op.SUM, None
    wanted: Any = opts if isinstance(opts, ReduceOp | ReduceOp.RedOpType) else opts.reduceOp
    kind = getattr(wanted, "op", wanted)
    op = _BY_NUMBER[kind.value]
    return op, wanted.factor if op is Op.PREMUL_SUM else None
