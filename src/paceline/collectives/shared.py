"""Collectives through shared memory: the way of a group whose members are all on one machine.

Small tensors are copied into the members' slots on the board, and one step later everybody takes from there what it
needs. Large ones stay where they are: a step tells where that is, members read and write each other's memory in chunks
that stay in their caches, and a second step tells that all are done.

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
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch

from paceline.collectives.operation import Kind, Op, Operation, operation
from paceline.collectives.operators import Reducer, reducer, scaled
from paceline.errors import Mismatch, TeamError, UsageError, WorkerLost
from paceline.transport.board import Board
from paceline.transport.reach import Reach, View, bytes_of

CHUNK = 256 * 1024
"""Bytes of a chunk: read, combined and given on while they are in a core's own cache."""
_INLINE = 1 << 62
"""Stands for a segment's number where data lies in the slot."""
_FIRST, _WIDTH = 3, 5
"""A row: signature, whether somebody will read memory, own place; then for each member where its part is (three
numbers), how many bytes are offered to it and how many expected from it, both plus one."""
_PLANS = 512

Tensors = Sequence[torch.Tensor | None]

_exposed: set[torch.Tensor] = set()
"""What others may write to. If one of them falls out of step, this stays for good: it may yet write."""


class _Plan(NamedTuple):
    """All that can be known of a small reduction before it is done."""

    operation: Operation
    signature: int
    reducer: Reducer
    pair: Callable[..., torch.Tensor] | None
    """What combines two tensors at once, if there are two and torch has such a function."""
    places: list[tuple[torch.Tensor, list[torch.Tensor], int]]
    """For either turn: this member's place in its slot, everybody's, and the address of the first."""


class Shared:
    """One member's part in the collectives of a group. Tensors are on the CPU; those of `exchange` contiguous."""

    def __init__(self, board: Board, reach: Reach) -> None:
        self._board, self._reach = board, reach
        self.rank, self.size = board.rank, board.size
        self.spin = True
        """Whether to wait by looking for a while; not from a thread in the background."""
        self.told: Callable[[str, str, int, int, float], None] | None = None
        """Hears of what is read from and written to others' memory: operation, direction, rank, bytes, its start."""
        self._plans: list[dict[tuple[torch.dtype, torch.Size], _Plan]] = [{} for _ in Op]
        self._scratch = torch.empty(CHUNK, dtype=torch.uint8)
        self._total = torch.empty(CHUNK, dtype=torch.uint8)

    # -- reductions --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM, factor: float | torch.Tensor | None = None) -> None:
        """Everybody's tensor becomes the combination of all."""
        if factor is not None:
            tensor.copy_(scaled(tensor, factor))
        if tensor.nbytes > Board.SLOT:
            self._reduce_large(Kind.ALL_REDUCE, tensor, op, None)
            return
        plan = self._plans[op].get((tensor.dtype, tensor.shape)) or self._plan(op, tensor)
        board = self._board
        own, parts, address = plan.places[board.turn]
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)  # half of the time that torch takes for so little
        else:
            own.copy_(tensor)
        if not board.agree(plan.signature, plan.operation, self.spin):
            self._disagree(plan.operation)
        if plan.pair is not None and tensor.is_contiguous():
            plan.pair(*parts, out=tensor)
        else:
            plan.reducer.merge(parts, tensor)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Op = Op.SUM, factor: float | torch.Tensor | None = None
    ) -> None:
        """The root's tensor becomes the combination of all; the others' stay as they are."""
        if factor is not None:
            tensor = scaled(tensor, factor) if self.rank != root else tensor.copy_(scaled(tensor, factor))
        if tensor.nbytes > Board.SLOT:
            self._reduce_large(Kind.REDUCE, tensor, op, root)
            return
        made, signature = operation(Kind.REDUCE, tensor.dtype, tensor.numel(), op, root)
        plan = self._plans[op].get((tensor.dtype, tensor.shape)) or self._plan(op, tensor)
        own, parts, _ = plan.places[self._board.turn]
        own.copy_(tensor)
        self._board.row[0] = signature
        self._agree(self._board.step(made, self.spin), made, signature)
        if self.rank == root:
            plan.reducer.merge(parts, tensor)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op = Op.SUM,
        factor: float | torch.Tensor | None = None,
    ) -> None:
        """`out` becomes the combination of everybody's input for this member; inputs are as many as members."""
        if factor is not None:
            inputs = [scaled(part, factor) for part in inputs]
        made, signature = operation(Kind.REDUCE_SCATTER, out.dtype, 0, op)
        way = reducer(op, out.dtype)
        self._same_dtype(made, out, *inputs)
        with _Exchange(self, made, signature, inputs, [out] * self.size) as views:
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
                        way.add(total, part)
                way.divide(total, self.size)
                piece.copy_(total)

    def _plan(self, op: Op, tensor: torch.Tensor) -> _Plan:
        if len(self._plans[op]) >= _PLANS:
            self._plans[op].clear()
        count, shape, dtype = tensor.numel(), tensor.shape, tensor.dtype
        made, signature = operation(Kind.ALL_REDUCE, dtype, count, op)
        places = []
        for turn in (0, 1):
            parts = [self._board.slot(turn, rank, count, dtype).view(shape) for rank in range(self.size)]
            places.append((parts[self.rank], parts, parts[self.rank].data_ptr()))
        way = reducer(op, dtype)
        plan = _Plan(made, signature, way, way.pair if self.size == 2 else None, places)
        self._plans[op][dtype, shape] = plan
        return plan

    def _reduce_large(self, kind: Kind, tensor: torch.Tensor, op: Op, root: int | None) -> None:
        """Each member combines its own part of all tensors, and gives it to all, or to the root."""
        made, signature = operation(kind, tensor.dtype, tensor.numel(), op, root or 0)
        way, board, reach = reducer(op, tensor.dtype), self._board, self._reach
        contiguous = tensor.resolve_conj().resolve_neg().contiguous()
        seen, where = reach.expose(contiguous.view(-1))
        row = board.row
        row[0], row[_FIRST], row[_FIRST + 1], row[_FIRST + 2] = signature, *where
        rows = board.step(made, self.spin)
        self._agree(rows, made, signature)
        _exposed.add(seen)
        try:
            self._combine(made, seen, rows, way, root)
        except TeamError as error:
            raise self._named(error, made) from None
        board.finish(made, self.spin)
        _exposed.discard(seen)
        if (root is None or root == self.rank) and seen.data_ptr() != tensor.data_ptr():
            tensor.copy_(seen.view(tensor.shape))
        reach.release()

    def _combine(
        self, made: Operation, seen: torch.Tensor, rows: list[memoryview], way: Reducer, root: int | None
    ) -> None:
        """This member's part of it, chunk by chunk."""
        kind, op, board = made.kind, made.op, self._board
        views = self._views({rank: tuple(rows[rank][_FIRST : _FIRST + 3]) for rank in self._others()})
        wanting = self._others() if root is None else [root] if root != self.rank else []
        keeps = root is None or root == self.rank
        item, length = seen.itemsize, CHUNK // seen.itemsize
        start, stop = _share(seen.numel(), self.rank, self.size)
        for begin in range(start, stop, length):
            if board.closing:
                raise TeamError(f"this process ended in the middle of {made.spoken}")
            own = seen[begin : min(begin + length, stop)]
            scratch = self._buffer(self._scratch, own)
            # The first rank's comes first, except that two can be added either way round.
            if keeps and (self.rank == 0 or (self.size == 2 and op in (Op.SUM, Op.AVG))):
                total, order = own, [rank for rank in range(self.size) if rank != self.rank]
            else:
                total, order = self._buffer(self._total, own), list(range(1, self.size))
                total.copy_(own if self.rank == 0 else self._read(kind, views[0], 0, begin * item, total))
            for rank in order:
                way.add(total, own if rank == self.rank else self._read(kind, views[rank], rank, begin * item, scratch))
            way.divide(total, self.size)
            if keeps and total is not own:
                own.copy_(total)
            for rank in wanting:
                if board.has_left(rank):  # it gave up: its memory may be somebody else's by now
                    self._lost(rank, made)
                self._write(kind, views[rank], rank, begin * item, total)

    # -- moving ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        made, signature = operation(Kind.BARRIER, torch.uint8, 0)
        self._board.row[0] = signature
        self._agree(self._board.step(made, self.spin), made, signature)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        made, signature = operation(Kind.BROADCAST, tensor.dtype, tensor.numel(), Op.NONE, root)
        if self.rank == root:
            self._exchange(made, signature, [tensor] * self.size, [None] * self.size)
        else:
            wants = [tensor if rank == root else None for rank in range(self.size)]
            self._exchange(made, signature, [None] * self.size, wants)

    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Everybody's tensor, by rank; they may be of different sizes."""
        made, signature = operation(Kind.ALL_GATHER, tensor.dtype, 0)
        self._same_dtype(made, tensor, *outs)
        self._exchange(made, signature, [tensor] * self.size, outs)

    def gather(self, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        """Everybody's tensor, by rank, at the root."""
        made, signature = operation(Kind.GATHER, tensor.dtype, 0, Op.NONE, root)
        self._same_dtype(made, tensor, *(outs or ()))
        offers = [tensor if rank == root else None for rank in range(self.size)]
        self._exchange(made, signature, offers, outs or [None] * self.size)

    def scatter(self, out: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """To each member its own one of the root's tensors."""
        made, signature = operation(Kind.SCATTER, out.dtype, 0, Op.NONE, root)
        self._same_dtype(made, out, *(inputs or ()))
        wants = [out if rank == root else None for rank in range(self.size)]
        self._exchange(made, signature, inputs or [None] * self.size, wants)

    def all_to_all(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """To each member its own one of everybody's tensors."""
        made, signature = operation(Kind.ALL_TO_ALL, inputs[0].dtype, 0)
        self._same_dtype(made, *outs, *inputs)
        if _overlap(outs, inputs):
            inputs = [part.clone() for part in inputs]
        self._exchange(made, signature, inputs, outs)

    def _exchange(self, made: Operation, signature: int, offers: Tensors, wants: Tensors) -> None:
        """Offer a tensor to each member, or None, and take one from each, or none."""
        with _Exchange(self, made, signature, offers, wants) as views:
            for rank in self._others():
                want = wants[rank]
                if want is not None and want.nbytes:
                    views[rank].copy(0, want)
            mine, own = offers[self.rank], wants[self.rank]
            if mine is not None and own is not None and mine.data_ptr() != own.data_ptr():
                bytes_of(own).copy_(bytes_of(mine))

    # -- what these have in common -----------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        """All other members, beginning with the next: so that not all look at the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _views(self, places: dict[int, tuple[int, ...]]) -> dict[int, View]:
        return {rank: self._reach.view(rank, (place[0], place[1], place[2])) for rank, place in places.items()}

    def _read(self, kind: Kind, view: View, rank: int, offset: int, into: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        part = view.read(offset, into)
        if self.told:
            self.told(kind.spoken, "read", rank, into.nbytes, start)
        return part

    def _write(self, kind: Kind, view: View, rank: int, offset: int, source: torch.Tensor) -> None:
        start = time.perf_counter()
        view.write(offset, source)
        if self.told:
            self.told(kind.spoken, "write", rank, source.nbytes, start)

    @staticmethod
    def _buffer(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return memory[: like.nbytes].view(like.dtype)

    def _agree(self, rows: list[memoryview], made: Operation, signature: int) -> None:
        for row in rows:
            if row[0] != signature:
                self._disagree(made)

    def _disagree(self, made: Operation) -> None:
        """Somebody came for something else. All see it in the same step, so that the group goes on."""
        for rank, row in enumerate(self._board.rows):
            if row[0] != made.signature:
                other = Operation.of(row[0])
                raise Mismatch(
                    f"rank {rank} is at {other.spoken if other else 'something else'} while rank {self.rank} is at "
                    f"{made.spoken}: all members must do the same",
                    [rank],
                )

    def _same_dtype(self, made: Operation, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype != made.dtype:
                raise UsageError(
                    f"{made.kind.spoken} was given tensors of {tensor.dtype} and of {made.dtype}; "
                    "all must have the same dtype"
                )

    def _lost(self, rank: int, made: Operation) -> None:
        raise TeamError(f"rank {rank} {self._board.gone(rank)} in the middle of {made.spoken}", [rank])

    def _named(self, error: TeamError, made: Operation) -> TeamError:
        """What went wrong with another's memory, with the reason for it: mostly that its owner has died."""
        for rank in error.ranks:
            reason = self._board.gone_soon(rank)
            if reason is not None:
                return WorkerLost(f"rank {rank} {reason} in the middle of {made.spoken}", [rank])
        return error


class _Exchange:
    """What everybody offers to everybody, seen by one member: views by rank, for as long as all are at it."""

    def __init__(self, shared: Shared, made: Operation, signature: int, offers: Tensors, wants: Tensors) -> None:
        self._shared, self._made = shared, made
        board, reach = shared._board, shared._reach
        rank, size = shared.rank, shared.size
        turn = board.turn
        numbers = array("Q", bytes(8 * _WIDTH * size))
        used, exposed = 0, 0
        last: torch.Tensor | None = None
        entry: tuple[int, int, int] = (0, 0, 0)
        for peer in range(size):
            offer, want, at = offers[peer], wants[peer], _WIDTH * peer
            if peer == rank:
                if offer is not None and want is not None:
                    # Nothing travels, but the sizes must agree as they do with the others.
                    numbers[at + 3], numbers[at + 4] = offer.nbytes + 1, want.nbytes + 1
                continue
            if want is not None:
                numbers[at + 4] = want.nbytes + 1
            if offer is None:
                continue
            if offer is not last:
                size_in_bytes = offer.nbytes
                if used + size_in_bytes <= Board.SLOT:
                    if size_in_bytes:
                        board.slot(turn, rank, size_in_bytes, torch.uint8, used).copy_(bytes_of(offer))
                    entry = (_INLINE, 0, used)
                    used += -(-size_in_bytes // 64) * 64
                else:
                    _, entry = reach.expose(offer)
                    exposed = 1
                last = offer
            numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = *entry, offer.nbytes + 1
        row = board.row
        row[0], row[1] = signature, exposed
        row[_FIRST : _FIRST + _WIDTH * size] = memoryview(numbers)
        self._rows = board.step(made, shared.spin)
        self._turn = turn
        shared._agree(self._rows, made, signature)
        self._check()

    def __enter__(self) -> dict[int, View]:
        try:
            return self._open()
        except TeamError as error:
            raise self._shared._named(error, self._made) from None

    def _open(self) -> dict[int, View]:
        shared = self._shared
        views: dict[int, View] = {}
        at = _FIRST + _WIDTH * shared.rank
        for rank in shared._others():
            number, descriptor, place, size = self._rows[rank][at : at + 4]
            if size <= 1:
                continue
            if number == _INLINE:
                views[rank] = _Slot(shared._board.slot(self._turn, rank, size - 1, torch.uint8, place))
            else:
                views[rank] = shared._reach.view(rank, (number, descriptor, place))
        return views

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, TeamError):
            raise self._shared._named(error, self._made) from None
        if kind is None and any(row[1] for row in self._rows):
            self._shared._board.finish(self._made, self._shared.spin)
            self._shared._reach.release()

    def _check(self) -> None:
        """What is offered must be what is expected; everybody checks it for all, so that all know."""
        size = self._shared.size
        table = numpy.stack([numpy.asarray(row[_FIRST : _FIRST + _WIDTH * size]) for row in self._rows])
        offered, wanted = table[:, 3::_WIDTH], table[:, 4::_WIDTH].T
        wrong = numpy.argwhere(offered != wanted)
        if len(wrong):
            giver, taker = (int(number) for number in wrong[0])
            gives, takes = int(offered[giver, taker]) - 1, int(wanted[giver, taker]) - 1
            raise Mismatch(
                f"rank {giver} has {_bytes(gives)} for rank {taker}, which expects {_bytes(takes)}, "
                f"at {self._made.spoken}",
                [giver, taker],
            )


class _Slot:
    """A part that lies in its owner's slot."""

    def __init__(self, content: torch.Tensor) -> None:
        self._content = content

    def read(self, offset: int, into: torch.Tensor) -> torch.Tensor:
        return self._content[offset : offset + into.nbytes].view(into.dtype)

    def copy(self, offset: int, into: torch.Tensor) -> None:
        bytes_of(into).copy_(self._content[offset : offset + into.nbytes])

    def write(self, offset: int, source: torch.Tensor) -> None:
        raise NotImplementedError


def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    """From where to where this member's part of so many elements goes; parts begin at whole cache lines."""
    share = -(-count // (64 * size)) * 64
    return min(rank * share, count), min((rank + 1) * share, count)


def _overlap(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    stores = {part.untyped_storage().data_ptr() for part in outs if part.nbytes}
    return any(part.nbytes and part.untyped_storage().data_ptr() in stores for part in inputs)


def _bytes(count: int) -> str:
    return "nothing" if count < 0 else f"{count} bytes"
