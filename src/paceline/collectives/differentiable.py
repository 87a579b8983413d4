"""Collectives that a gradient goes back through.

All members' losses count as one sum. So what went to all has the sum of all gradients coming back, and each operation
has its mirror image as its backward pass:

| forward | backward |
|---|---|
| all_reduce | all_reduce |
| all_gather | reduce_scatter, and the other way round |
| scatter | gather, and the other way round |
| broadcast | reduce, and the other way round |
| all_to_all | all_to_all |
| push | pull, and the other way round |

Members must run their backward passes in the same order, and all of them: whoever is left with nothing to compute with
holds a token, an empty tensor of the graph (see `attach`). Where a member only receives, the others tell it whether
there will be a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from paceline.collectives.communicator import Communicator, in_one_piece
from paceline.collectives.default_group import GroupLike, member
from paceline.collectives.operation import Op
from paceline.errors import UsageError

Tensors = Sequence[torch.Tensor]


class TensorMeta(NamedTuple):
    """What others must know of a tensor to receive it."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    tracked: bool
    """Whether a gradient will be wanted for it."""

    def empty(self) -> torch.Tensor:
        return torch.empty(self.sizes, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class _Way(NamedTuple):
    """With whom, and how."""

    member: Communicator
    topology: str


# -- all_reduce, reduce, broadcast -----------------------------------------------------------------------------------


def all_reduce(tensor: torch.Tensor, op: str, topology: str, group: GroupLike) -> torch.Tensor:
    way = _Way(member(group), topology)
    match op:
        case "sum" | "avg":
            return _apply(_AllReduce, way, Op[op.upper()], tensor)
        case "min" | "max":
            return _apply(_Extreme, way, Op[op.upper()], tensor)
        case "product":
            shape = TensorMeta(tensor.dtype, tuple(tensor.shape), True)
            gathered = _Way(way.member, topology if way.member.has("all_gather", topology) else "auto")
            return fold(torch.mul, _apply_all(_AllGather, gathered, [shape] * way.member.size, tensor))
    raise UsageError(f"all_reduce with op '{op}' has no gradient; sum, avg, product, min and max have")


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.op = way, op
        result = _copy(tensor)
        way.member.all_reduce(result, op, way.topology)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # Through itself, so that a gradient of the gradient can be taken, too.
        return None, None, _apply(_AllReduce, ctx.way, ctx.op, gradient)


class _Extreme(Function):
    """The gradient goes to whoever had the smallest or largest value, in equal shares if several had it."""

    @staticmethod
    def forward(ctx: Any, way: _Way, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        result = _copy(tensor)
        way.member.all_reduce(result, op, way.topology)
        chosen = (tensor == result).to(tensor.dtype)
        sharers = chosen.clone()
        way.member.all_reduce(sharers, Op.SUM, way.topology)
        ctx.way = way
        ctx.save_for_backward(chosen / sharers)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (share,) = ctx.saved_tensors
        return None, None, share * _apply(_AllReduce, ctx.way, Op.SUM, gradient)


def reduce(tensor: torch.Tensor, root: int, op: str, topology: str, group: GroupLike) -> torch.Tensor:
    if op not in ("sum", "avg"):
        raise UsageError(f"reduce with op '{op}' has no gradient; sum and avg have")
    return _apply(_Reduce, _Way(member(group), topology), Op[op.upper()], root, tensor)


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, op: Op, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.op, ctx.root, ctx.shape = way, op, root, tensor.shape
        result = _copy(tensor)
        way.member.reduce(result, root, op, way.topology)
        return result if way.member.rank == root else _token(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        way = ctx.way
        if way.member.rank == ctx.root:
            spread = _copy(gradient / way.member.size if ctx.op is Op.AVG else gradient)
        else:
            spread = torch.empty(ctx.shape, dtype=gradient.dtype)
        way.member.broadcast(spread, ctx.root, way.topology)
        return None, None, None, spread


def broadcast(tensor: torch.Tensor, root: int, topology: str, group: GroupLike) -> torch.Tensor:
    return _apply(_Broadcast, _Way(member(group), topology), root, tensor)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.root = way, root
        result = _copy(tensor)
        way.member.broadcast(result, root, way.topology)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        total = _copy(gradient)
        ctx.way.member.reduce(total, ctx.root, Op.SUM, ctx.way.topology)
        # What the others had before is not in the result.
        return None, None, total if ctx.way.member.rank == ctx.root else torch.zeros_like(total)


# -- all_gather, reduce_scatter --------------------------------------------------------------------------------------


def all_gather(tensor: torch.Tensor, shapes: list[TensorMeta], topology: str, group: GroupLike) -> list[torch.Tensor]:
    way = _Way(member(group), topology)
    if not _wanted(shapes):
        outs = [shape.empty() for shape in shapes]
        way.member.all_gather(outs, tensor.detach(), topology)
        return outs
    return _apply_all(_AllGather, way, shapes, _entry(tensor))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, shapes: list[TensorMeta], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way, ctx.shapes = way, shapes
        outs = [shape.empty() for shape in shapes]
        way.member.all_gather(outs, in_one_piece(tensor.detach()), way.topology)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, _apply(_ReduceScatter, ctx.way, Op.SUM, *gradients)


def reduce_scatter(parts: Tensors, op: Op, topology: str, group: GroupLike) -> torch.Tensor:
    way = _Way(member(group), topology)
    if not any(_tracked(part) for part in parts):
        out = torch.empty(parts[way.member.rank].shape, dtype=parts[0].dtype)
        way.member.reduce_scatter(out, [in_one_piece(part.detach()) for part in parts], op, topology)
        return out
    if op not in (Op.SUM, Op.AVG):
        raise UsageError(f"reduce_scatter with op '{op.spoken}' has no gradient; sum and avg have")
    return _apply(_ReduceScatter, way, op, *parts)


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, op: Op, *parts: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.op = way, op
        ctx.shapes = [TensorMeta(part.dtype, tuple(part.shape), True) for part in parts]
        out = torch.empty(parts[way.member.rank].shape, dtype=parts[0].dtype)
        way.member.reduce_scatter(out, [in_one_piece(part.detach()) for part in parts], op, way.topology)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        spread = gradient / ctx.way.member.size if ctx.op is Op.AVG else gradient
        return None, None, *_apply_all(_AllGather, ctx.way, ctx.shapes, spread)


# -- scatter, gather -------------------------------------------------------------------------------------------------


def scatter(
    parts: Tensors | None, shapes: list[TensorMeta], root: int, topology: str, group: GroupLike
) -> torch.Tensor:
    way = _Way(member(group), topology)
    if not _wanted(shapes):
        out = shapes[way.member.rank].empty()
        way.member.scatter(
            out, None if parts is None else [part.detach() for part in parts], root, topology, _size(shapes)
        )
        return out
    given = parts if parts is not None else [torch.zeros(0, requires_grad=True)]
    return _apply(_Scatter, way, shapes, root, *given)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, shapes: list[TensorMeta], root: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.shapes, ctx.root = way, shapes, root
        at_root = way.member.rank == root
        out = shapes[way.member.rank].empty()
        way.member.scatter(
            out, [part.detach() for part in parts] if at_root else None, root, way.topology, _size(shapes)
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        way, at_root = ctx.way, ctx.way.member.rank == ctx.root
        outs = [shape.empty() for shape in ctx.shapes] if at_root else None
        way.member.gather(outs, in_one_piece(gradient), ctx.root, way.topology, _size(ctx.shapes))
        return None, None, None, *(outs if outs is not None else [torch.zeros(0)])


def gather(
    tensor: torch.Tensor, shapes: list[TensorMeta], root: int, topology: str, group: GroupLike
) -> list[torch.Tensor]:
    way = _Way(member(group), topology)
    at_root = way.member.rank == root
    if not _wanted(shapes):
        outs = [shape.empty() for shape in shapes] if at_root else None
        way.member.gather(outs, tensor.detach(), root, topology, _size(shapes))
        return outs or []
    return _apply_all(_Gather, way, shapes, root, _entry(tensor))


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, way: _Way, shapes: list[TensorMeta], root: int, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way, ctx.shapes, ctx.root = way, shapes, root
        outs = [shape.empty() for shape in shapes] if way.member.rank == root else None
        way.member.gather(outs, tensor.detach(), root, way.topology, _size(shapes))
        return tuple(outs) if outs is not None else (_token(tensor),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        way, at_root = ctx.way, ctx.way.member.rank == ctx.root
        own = ctx.shapes[way.member.rank].empty()
        way.member.scatter(own, list(gradients) if at_root else None, ctx.root, way.topology, _size(ctx.shapes))
        return None, None, None, own


# -- all_to_all, push, pull ------------------------------------------------------------------------------------------


def all_to_all(
    parts: Tensors, shapes: list[TensorMeta], every: list[TensorMeta], topology: str, group: GroupLike
) -> list[torch.Tensor]:
    """`every` are the shapes of all that goes from anybody to anybody."""
    way, size = _Way(member(group), topology), _size(every)
    if not (any(shape.tracked for shape in every) and torch.is_grad_enabled()):
        outs = [shape.empty() for shape in shapes]
        way.member.all_to_all(outs, [part.detach() for part in parts], topology, size)
        return outs
    return _apply_all(_AllToAll, way, size, shapes, _entry(parts[0]), *parts[1:])


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, way: _Way, size: int, shapes: list[TensorMeta], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way, ctx.size, ctx.back = way, size, [TensorMeta(part.dtype, tuple(part.shape), True) for part in parts]
        outs = [shape.empty() for shape in shapes]
        way.member.all_to_all(outs, [part.detach() for part in parts], way.topology, size)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *_apply_all(_AllToAll, ctx.way, ctx.size, ctx.back, *gradients)


def push(tensor: torch.Tensor, to: int, tag: int, group: GroupLike) -> torch.Tensor:
    here = member(group)
    return _apply(_Push, here, to, tag, _next(here.pushed, to, tag), tensor)


class _Push(Function):
    @staticmethod
    def forward(ctx: Any, here: Communicator, to: int, tag: int, back: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.here, ctx.to, ctx.back, ctx.shape, ctx.dtype = here, to, back, tensor.shape, tensor.dtype
        # Not waited for: the other may be pushing, too. A copy, as nobody can know when it is taken.
        ctx.sending = here.send(to, _copy(tensor), tag)
        return _token(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        returned = torch.empty(ctx.shape, dtype=ctx.dtype)
        ctx.here.receive(ctx.to, returned, ctx.back)
        ctx.sending.wait()
        return None, None, None, None, returned


def pull(tensor: torch.Tensor, source: int, tag: int, group: GroupLike) -> torch.Tensor:
    here = member(group)
    return _apply(_Pull, here, source, tag, _next(here.pulled, source, tag), tensor)


class _Pull(Function):
    @staticmethod
    def forward(ctx: Any, here: Communicator, source: int, tag: int, back: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.here, ctx.source, ctx.back = here, source, back
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        here.receive(source, out, tag)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.here.send(ctx.source, _copy(gradient), ctx.back)
        # What the tensor was before is not in the result.
        return None, None, None, None, torch.zeros_like(gradient)


def _next(counts: dict[tuple[int, int], int], peer: int, tag: int) -> int:
    """The tag under which this message's gradient comes back: the same on both sides, and no other's."""
    counts[peer, tag] = counts.get((peer, tag), 0) + 1
    return -((tag + 1) << 32) - counts[peer, tag]


# -- what these have in common ---------------------------------------------------------------------------------------


def pairwise(op: Op) -> Callable[[Tensors], torch.Tensor]:
    """Combines the values of one member, in their order; a gradient goes back through it where torch has one."""
    functions: dict[Op, Any] = {
        Op.SUM: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }
    return lambda values: fold(functions[op], values)


def _apply(function: type[Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def _apply_all(function: type[Function], *arguments: Any) -> list[torch.Tensor]:
    return list(function.apply(*arguments))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def attach(loss: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
    return _apply(_Attach, loss, *tokens) if tokens else loss


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.tokens = [(token.shape, token.dtype) for token in tokens]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.tokens)


def _token(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(0, dtype=like.dtype)


def _tracked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _wanted(shapes: list[TensorMeta]) -> bool:
    return torch.is_grad_enabled() and any(shape.tracked for shape in shapes)


def _size(shapes: list[TensorMeta]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _entry(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the graph, even if nobody wants its own gradient: the others' need this member's help."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
