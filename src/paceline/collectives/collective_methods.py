"""The collectives of a process group, as c10d calls them.

Translates torch's arguments into those of `SharedMemoryCollectives`: lists of tensors into contiguous parts, options
into operators and roots. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.collectives import profiling
from paceline.collectives.arguments import (
    check_alike,
    kind_of,
    operator_of,
    overlap,
    root_of,
    root_tensor,
    seconds_of,
)
from paceline.collectives.calls import c10d_call
from paceline.collectives.group import Group
from paceline.collectives.hierarchical import HierarchicalGroup
from paceline.collectives.instruments import observed_operation
from paceline.collectives.op_queue import OpQueue
from paceline.collectives.operation import Op
from paceline.collectives.operators import reducer, scaled
from paceline.collectives.shared_memory import SharedMemoryCollectives
from paceline.collectives.tensors import Filled, Tensors, given, pieces, plain
from paceline.collectives.work import DONE, PacelineWork, QueuedWork
from paceline.errors import InvalidCall


class CollectiveMethods(distributed.ProcessGroup):
    """The reductions and moves of a process group."""

    _rank: int
    _size: int
    _shared: SharedMemoryCollectives | HierarchicalGroup
    _queue: OpQueue
    group: Group
    """The members on this machine."""
    _sequence: int
    """Operations that this member has begun."""

    def elsewhere(self, device: str) -> distributed.ProcessGroup:
        """The group for tensors of another device."""
        raise NotImplementedError

    # -- reductions --------------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def allreduce(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 2 and not options and not profiling.active():
            # A short path for the most frequent call.
            tensors, opts = arguments
            if type(opts) is distributed.AllreduceOptions and not opts.asyncOp and len(tensors) == 1:
                tensor, kind = tensors[0].data, kind_of(opts.reduceOp)
                if (
                    tensor.is_cpu
                    and tensor.layout is torch.strided
                    and kind is not Op.PREMUL_SUM
                    and seconds_of(opts) is None
                ):
                    self._sequence += 1
                    self._queue.run(lambda: self._shared.all_reduce(tensor, kind))
                    return DONE
        return self._allreduce(*arguments, **options)

    @c10d_call
    def _allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if len(tensors) > 1:
            return self._allreduce_list(tensors, opts, timeout)
        return self._allreduce_each(tensors, opts, timeout)

    @c10d_call
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._allreduce_each(tensors, opts)

    def _allreduce_each(self, tensors: Tensors, opts: Any, timeout: Any = None) -> Any:
        """Reduces each tensor with the others' tensors in its place."""
        op, factor = operator_of(opts)
        # A sparse tensor has no `data` of its own.
        dense = [tensor if tensor.is_sparse else plain(tensor) for tensor in tensors]
        shared = not any(tensor.is_sparse for tensor in tensors) and overlap(dense)

        def run() -> None:
            # Memory that is in several tensors must be reduced once.
            terms = [tensor.clone() for tensor in dense] if shared else dense
            for tensor in terms:
                if tensor.is_sparse:
                    self._all_reduce_sparse(tensor, op)
                else:
                    if factor is not None:
                        tensor.copy_(scaled(tensor, factor))
                    self._shared.all_reduce(tensor, op)
            if shared:
                for tensor, term in zip(dense, terms, strict=True):
                    tensor.copy_(term)

        return self._start(run, opts, tensors, timeout=timeout)

    def _allreduce_list(self, tensors: Tensors, opts: Any, timeout: Any) -> Any:
        """Reduces all tensors of all members to one, which each tensor becomes."""
        check_alike("all_reduce", tensors)
        op, factor = operator_of(opts)
        dense = [plain(tensor) for tensor in tensors]

        def run() -> None:
            reduction = reducer(op, dense[0].dtype)
            total = scaled(dense[0], factor).clone()
            for tensor in dense[1:]:
                reduction.add(total, scaled(tensor, factor))
            self._shared.all_reduce(total, op)
            for tensor in dense:
                tensor.copy_(total)

        return self._start(run, opts, tensors, timeout=timeout)

    @c10d_call
    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> PacelineWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        (tensor,) = self._single("reduce", tensors)
        root = root_of("reduce", opts, self._size)
        combine, factor = operator_of(op if isinstance(opts, int) or opts is None else opts)
        dense = plain(tensor)

        def run() -> None:
            term = scaled(dense, factor)
            self._shared.reduce(term, root, combine)
            if term is not dense and self._rank == root:
                dense.copy_(term)

        return self._start(run, opts, tensors, timeout=timeout)

    @c10d_call
    def reduce_scatter(
        self, outputs: Tensors | torch.Tensor, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> PacelineWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for output, parts in zip(outputs, inputs, strict=True):
            self._count("reduce_scatter", "input", parts)
            if parts[self._rank].numel() != output.numel():
                raise InvalidCall(
                    f"reduce_scatter: the output has {output.numel()} elements, the input for this rank "
                    f"{parts[self._rank].numel()}; they must be as many"
                )
        return self._reduce_scatter(outputs, inputs, opts, timeout)

    @c10d_call
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PacelineWork:
        return self._reduce_scatter_singles([output], [source], opts)

    @c10d_call
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        return self._reduce_scatter_singles(outputs, inputs, opts)

    def _reduce_scatter_singles(self, outputs: Tensors, inputs: Tensors, opts: Any) -> PacelineWork:
        parts = []
        for output, source in zip(outputs, inputs, strict=True):
            self._whole("reduce_scatter_tensor", "input", source, "output", output)
            parts.append(pieces(given(source), self._size))
        return self._reduce_scatter(outputs, parts, opts)

    def _reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Sequence[torch.Tensor]], opts: Any, timeout: Any = None
    ) -> PacelineWork:
        op, factor = operator_of(opts)
        filled = Filled(outputs)
        sources = [[given(part) for part in parts] for parts in inputs]

        def run() -> None:
            for output, parts in zip(filled.parts, sources, strict=True):
                self._shared.reduce_scatter(output, [scaled(part, factor) for part in parts], op)

        return self._start(run, opts, outputs, filled, timeout=timeout)

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Op) -> None:
        """Sums sparse tensors: every member gathers all entries and adds them."""
        if op not in (Op.SUM, Op.AVG):
            raise InvalidCall(f"all_reduce of sparse tensors takes sum or avg, not {op.spoken}")
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

    @c10d_call
    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> PacelineWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = root_of("broadcast", opts, self._size, len(tensors))
        check_alike("broadcast", tensors)
        source = root_tensor(opts)
        filled = Filled(tensors, keep=self._rank == root)

        def run() -> None:
            part = filled.parts[source]
            self._shared.broadcast(part, root)
            for other in filled.parts:
                if other is not part:
                    other.copy_(part)

        back = [filled] if self._rank != root or len(tensors) > 1 else []
        return self._start(run, opts, tensors, *back, timeout=timeout)

    @c10d_call
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PacelineWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(outputs) != len(inputs):
            raise InvalidCall("all_gather: requires input/output tensor lists to have the same length")
        for parts in outputs:
            self._count("all_gather", "output", parts)
        result = outputs[0] if len(outputs) == 1 else outputs
        return self._all_gather([list(parts) for parts in outputs], inputs, opts, result)

    @c10d_call
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> PacelineWork:
        # Here torch has one list per rank, each with a tensor per input.
        by_input = [[parts[number] for parts in outputs] for number in range(len(inputs))]
        return self._all_gather(by_input, inputs, opts, outputs)

    @c10d_call
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PacelineWork:
        return self._all_gather_singles([output], [source], opts)

    @c10d_call
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        return self._all_gather_singles(outputs, inputs, opts)

    def _all_gather_singles(self, outputs: Tensors, inputs: Tensors, opts: Any) -> PacelineWork:
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

    @c10d_call
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> PacelineWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root = root_of("gather", opts, self._size)
        source = given(self._single("gather", inputs)[0])
        own = self._of_root("gather", "output", outputs, root)
        filled = None if own is None else Filled(own)

        def run() -> None:
            self._shared.gather(None if filled is None else filled.parts, source, root)

        return self._start(run, opts, own or [], *([filled] if filled else []), timeout=timeout)

    @c10d_call
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> PacelineWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root = root_of("scatter", opts, self._size)
        filled = Filled(self._single("scatter", outputs))
        own = self._of_root("scatter", "input", inputs, root)
        parts = None if own is None else [given(part) for part in own]
        return self._start(
            lambda: self._shared.scatter(filled.parts[0], parts, root), opts, outputs, filled, timeout=timeout
        )

    @c10d_call
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PacelineWork:
        self._count("all_to_all", "output", outputs)
        self._count("all_to_all", "input", inputs)
        filled = Filled(outputs)
        sources = [given(part) for part in inputs]
        return self._start(lambda: self._shared.all_to_all(filled.parts, sources), opts, outputs, filled)

    @c10d_call
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

    def _start(
        self, run: Callable[[], None], opts: Any, outputs: Any, *filled: Filled, timeout: Any = None
    ) -> PacelineWork:
        """Runs an operation now if the caller waits for it, else submits it; then copies back what it has filled."""
        self._sequence += 1
        limit, record = seconds_of(opts, timeout), profiling.take()
        control = self.group.control

        operation = observed_operation()

        def run_and_copy() -> None:
            control.limit = limit
            try:
                run()
                for place in filled:
                    place.back()
                if operation is not None:
                    operation.finish()
            finally:
                control.limit = None
                if record is not None:
                    record.end()

        if getattr(opts, "asyncOp", True):
            return QueuedWork(self._queue, run_and_copy, outputs)
        self._queue.run(run_and_copy)
        return DONE

    def _single(self, name: str, tensors: Tensors) -> Tensors:
        if len(tensors) != 1:
            raise InvalidCall(f"{name}: requires a single-element tensor list; this one has {len(tensors)}")
        return tensors

    def _of_root(self, name: str, which: str, lists: Sequence[Tensors], root: int) -> Tensors | None:
        """The root's list of one tensor per rank; None for the others, which have none."""
        if self._rank != root:
            if lists:
                raise InvalidCall(f"{name}: requires empty {which} on non-root")
            return None
        if len(lists) != 1 or len(lists[0]) != self._size:
            raise InvalidCall(
                f"{name}: requires a single-element {which} list containing a list with {self._size} tensors"
            )
        return list(lists[0])

    def _count(self, name: str, which: str, parts: Sequence[torch.Tensor]) -> None:
        if len(parts) != self._size:
            raise InvalidCall(
                f"{name}: invalid {which} tensor list (expected length {self._size}, one per rank, got {len(parts)})"
            )

    def _whole(self, name: str, large: str, whole: torch.Tensor, small: str, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self._size:
            raise InvalidCall(
                f"{name}: the {large} has {whole.numel()} elements and the {small} {part.numel()}; "
                f"with {self._size} ranks the {large} must have {part.numel() * self._size}"
            )

    def _split(self, which: str, tensor: torch.Tensor, splits: Sequence[int]) -> Tensors:
        """Splits a tensor along its first dimension, one part per rank."""
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise InvalidCall(
                    f"all_to_all_single: the {which} has {rows} rows, which do not divide by {self._size} ranks; "
                    "give split sizes"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise InvalidCall(
                f"all_to_all_single: Split sizes doesn't match total dim 0 size: those of the {which} are "
                f"{list(splits)}; they must be {self._size}, and {rows} together"
            )
        return list(tensor.split(list(splits)))
