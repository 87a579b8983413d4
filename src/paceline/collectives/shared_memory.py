"""Collectives of a group on one machine, through shared memory.

Small tensors are copied into the members' slots of the control block, and after one step every member reads the slots
that it needs. Large ones stay in place: a step exchanges their addresses, members read and write each other's memory in
chunks that fit into their caches, and a second step ends the operation.

            rank 0        rank 1                   rank 0          rank 1
          ┌────────┐    ┌────────┐               ┌────┬────┐     ┌────┬────┐
    small │ tensor │    │ tensor │        large  │sums│    │◄───►│    │sums│   each sums its own part
          └───┬────┘    └───┬────┘               └────┴────┘     └────┴────┘   of all, and gives it to all
          ▼   slot  ───┬──  slot   ▼
              all read ┴ all slots
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from paceline.collectives.exchange import FIRST, Exchange, Offers, SharedGroup
from paceline.collectives.operation import CollectiveCall, Op, OpKind, operation
from paceline.collectives.operators import Reducer, reducer
from paceline.collectives.tensors import in_one_piece
from paceline.errors import InvalidCall, TeamError
from paceline.transport.control_block import ControlBlock
from paceline.transport.peer_memory import PeerMemory, View, bytes_of

CHUNK = 256 * 1024
"""Bytes of a chunk, which is read, reduced and written while it is in a core's cache."""
_PLANS = 512

_exposed: set[torch.Tensor] = set()
"""Tensors that others may write to. After a failed operation they are kept: a member may still write."""


class _Plan(NamedTuple):
    """The precomputed parts of a small reduction."""

    operation: CollectiveCall
    signature: int
    reducer: Reducer
    pair: Callable[..., torch.Tensor] | None
    """Torch's function of two tensors, if there are two members and it has one."""
    places: list[tuple[torch.Tensor, list[torch.Tensor], int]]
    """For either turn: this member's slot, all members' slots, and the address of the first."""


class SharedMemoryCollectives(SharedGroup):
    """One member of a group on one machine. Tensors are on the CPU; those that are moved are contiguous."""

    def __init__(self, control: ControlBlock, peers: PeerMemory) -> None:
        super().__init__(control, peers)
        self.on_access: Callable[[str, str, int, int, float], None] | None = None
        """Called after each access to another member's memory: operation, direction, rank, bytes, its start."""
        self._plans: list[dict[tuple[torch.dtype, torch.Size], _Plan]] = [{} for _ in Op]
        self._scratch = torch.empty(CHUNK, dtype=torch.uint8)
        self._total = torch.empty(CHUNK, dtype=torch.uint8)

    # -- reductions --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> None:
        """All tensors become the reduction of all."""
        if tensor.nbytes > ControlBlock.SLOT:
            self._reduce_large(OpKind.ALL_REDUCE, tensor, op, None)
            return
        plan = self._plans[op].get((tensor.dtype, tensor.shape)) or self._plan(op, tensor)
        control = self.control
        own, parts, address = plan.places[control.turn]
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)  # half of the time that torch takes for so little
        else:
            own.copy_(tensor)
        self.agree(plan.operation, plan.signature)
        if plan.pair is not None and tensor.is_contiguous():
            plan.pair(*parts, out=tensor)
        else:
            plan.reducer.merge(parts, tensor)

    def reduce(self, tensor: torch.Tensor, root: int, op: Op = Op.SUM) -> None:
        """The root's tensor becomes the reduction of all; the others' are unchanged."""
        if tensor.nbytes > ControlBlock.SLOT:
            self._reduce_large(OpKind.REDUCE, tensor, op, root)
            return
        call, signature = operation(OpKind.REDUCE, tensor.dtype, tensor.numel(), op, root)
        plan = self._plans[op].get((tensor.dtype, tensor.shape)) or self._plan(op, tensor)
        own, parts, _ = plan.places[self.control.turn]
        own.copy_(tensor)
        self.agree(call, signature)
        if self.rank == root:
            plan.reducer.merge(parts, tensor)

    def reduce_scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op = Op.SUM) -> None:
        """`out` becomes the reduction of all members' inputs for this member; one input per member."""
        call, signature = operation(OpKind.REDUCE_SCATTER, out.dtype, 0, op)
        reduction = reducer(op, out.dtype)
        self._same_dtype(call, out, *inputs)
        with Exchange(self, call, signature, inputs, [out] * self.size) as views:
            flat = out.view(-1)
            length = CHUNK // out.itemsize
            own = inputs[self.rank].view(-1)
            for start in range(0, flat.numel(), length):
                piece = flat[start : start + length]
                total = self._buffer(self._total, piece)
                for rank in range(self.size):
                    if rank == self.rank:
                        part = own[start : start + length]
                    else:
                        scratch = self._buffer(self._scratch if rank else self._total, piece)
                        part = views[rank].read(start * out.itemsize, scratch)
                    if rank == 0:
                        total = part if part.data_ptr() == total.data_ptr() else total.copy_(part)
                    else:
                        reduction.add(total, part)
                reduction.divide(total, self.size)
                piece.copy_(total)

    def _plan(self, op: Op, tensor: torch.Tensor) -> _Plan:
        if len(self._plans[op]) >= _PLANS:
            self._plans[op].clear()
        count, shape, dtype = tensor.numel(), tensor.shape, tensor.dtype
        call, signature = operation(OpKind.ALL_REDUCE, dtype, count, op)
        places = []
        for turn in (0, 1):
            parts = [self.control.slot(turn, rank, count, dtype).view(shape) for rank in range(self.size)]
            places.append((parts[self.rank], parts, parts[self.rank].data_ptr()))
        reduction = reducer(op, dtype)
        plan = _Plan(call, signature, reduction, reduction.pair if self.size == 2 else None, places)
        self._plans[op][dtype, shape] = plan
        return plan

    def _reduce_large(self, kind: OpKind, tensor: torch.Tensor, op: Op, root: int | None) -> None:
        """Each member reduces its own part of all tensors, and writes it to all, or to the root."""
        call, signature = operation(kind, tensor.dtype, tensor.numel(), op, root or 0)
        reduction, control, peers = reducer(op, tensor.dtype), self.control, self.peers
        contiguous = in_one_piece(tensor)
        seen, where = peers.expose(contiguous.view(-1))
        row = control.row
        row[FIRST], row[FIRST + 1], row[FIRST + 2] = where
        rows = self.agree(call, signature)
        _exposed.add(seen)
        try:
            self._combine(call, seen, rows, reduction, root)
        except TeamError as error:
            raise self.explain(error, call) from None
        control.finish(call, self.spin)
        _exposed.discard(seen)
        if (root is None or root == self.rank) and seen.data_ptr() != tensor.data_ptr():
            tensor.copy_(seen.view(tensor.shape))
        peers.release()

    def _combine(
        self, call: CollectiveCall, seen: torch.Tensor, rows: list[memoryview], reduction: Reducer, root: int | None
    ) -> None:
        """Reduces this member's part, chunk by chunk."""
        kind, op, control = call.kind, call.op, self.control
        views = {rank: self.peers.view(rank, rows[rank][FIRST : FIRST + 3]) for rank in self.others()}
        wanting = self.others() if root is None else [root] if root != self.rank else []
        keeps = root is None or root == self.rank
        item, length = seen.itemsize, CHUNK // seen.itemsize
        start, stop = _share(seen.numel(), self.rank, self.size)
        for begin in range(start, stop, length):
            if control.closing:
                raise TeamError(f"this process ended in the middle of {call.spoken}")
            own = seen[begin : min(begin + length, stop)]
            scratch = self._buffer(self._scratch, own)
            # In the order of ranks; the sum of two is the same in either order.
            if keeps and (self.rank == 0 or (self.size == 2 and op in (Op.SUM, Op.AVG))):
                total, order = own, [rank for rank in range(self.size) if rank != self.rank]
            else:
                total, order = self._buffer(self._total, own), list(range(1, self.size))
                total.copy_(own if self.rank == 0 else self._read(kind, views[0], 0, begin * item, total))
            for rank in order:
                reduction.add(
                    total, own if rank == self.rank else self._read(kind, views[rank], rank, begin * item, scratch)
                )
            reduction.divide(total, self.size)
            if keeps and total is not own:
                own.copy_(total)
            for rank in wanting:
                if control.has_left(rank):  # its memory may be in other use by now
                    raise TeamError(f"rank {rank} {control.gone(rank)} in the middle of {call.spoken}", [rank])
                self._write(kind, views[rank], rank, begin * item, total)

    # -- moving ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.agree(*operation(OpKind.BARRIER, torch.uint8, 0))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        call, signature = operation(OpKind.BROADCAST, tensor.dtype, tensor.numel(), Op.NONE, root)
        if self.rank == root:
            self._exchange(call, signature, [tensor] * self.size, [None] * self.size)
        else:
            wants = [tensor if rank == root else None for rank in range(self.size)]
            self._exchange(call, signature, [None] * self.size, wants)

    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """All tensors, by rank; their sizes may differ."""
        call, signature = operation(OpKind.ALL_GATHER, tensor.dtype, 0)
        self._same_dtype(call, tensor, *outs)
        self._exchange(call, signature, [tensor] * self.size, outs)

    def gather(self, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        """All tensors, by rank, at the root."""
        call, signature = operation(OpKind.GATHER, tensor.dtype, 0, Op.NONE, root)
        self._same_dtype(call, tensor, *(outs or ()))
        offers = [tensor if rank == root else None for rank in range(self.size)]
        self._exchange(call, signature, offers, outs or [None] * self.size)

    def scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """Sends each member its part of the root's tensors."""
        call, signature = operation(OpKind.SCATTER, out.dtype, 0, Op.NONE, root)
        self._same_dtype(call, out, *(inputs or ()))
        wants = [out if rank == root else None for rank in range(self.size)]
        self._exchange(call, signature, inputs or [None] * self.size, wants)

    def all_to_all(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Sends each member its part of this member's tensors."""
        call, signature = operation(OpKind.ALL_TO_ALL, inputs[0].dtype, 0)
        self._same_dtype(call, *outs, *inputs)
        if _overlap(outs, inputs):
            inputs = [part.clone() for part in inputs]
        self._exchange(call, signature, inputs, outs)

    def _exchange(self, call: CollectiveCall, signature: int, offers: Offers, wants: Offers) -> None:
        """Offers a tensor or None to each member, and copies one or none from each."""
        with Exchange(self, call, signature, offers, wants) as views:
            for rank in self.others():
                want = wants[rank]
                if want is not None and want.nbytes:
                    views[rank].copy(0, want)
            mine, own = offers[self.rank], wants[self.rank]
            if mine is not None and own is not None and mine.data_ptr() != own.data_ptr():
                bytes_of(own).copy_(bytes_of(mine))

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _read(self, kind: OpKind, view: View, rank: int, offset: int, into: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        part = view.read(offset, into)
        if self.on_access:
            self.on_access(kind.spoken, "read", rank, into.nbytes, start)
        return part

    def _write(self, kind: OpKind, view: View, rank: int, offset: int, source: torch.Tensor) -> None:
        start = time.perf_counter()
        view.write(offset, source)
        if self.on_access:
            self.on_access(kind.spoken, "write", rank, source.nbytes, start)

    @staticmethod
    def _buffer(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return memory[: like.nbytes].view(like.dtype)

    def _same_dtype(self, call: CollectiveCall, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype != call.dtype:
                raise InvalidCall(
                    f"{call.kind.spoken} was given tensors of {tensor.dtype} and of {call.dtype}; "
                    "all must have the same dtype"
                )


def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The first element of this member's part and the end; parts start on cache lines."""
    share = -(-count // (64 * size)) * 64
    return min(rank * share, count), min((rank + 1) * share, count)


def _overlap(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    stores = {part.untyped_storage().data_ptr() for part in outs if part.nbytes}
    return any(part.nbytes and part.untyped_storage().data_ptr() in stores for part in inputs)
