"""Collectives with a backward pass.

The losses of all members count as one sum, so each operation's backward pass is its adjoint:

| forward | backward |
|---|---|
| all_reduce | all_reduce |
| all_gather | reduce_scatter, and the other way round |
| scatter | gather, and the other way round |
| broadcast | reduce, and the other way round |
| all_to_all | all_to_all |
| push | pull, and the other way round |

All members must run their backward passes, in the same order. A member that an operation gives no values holds a token,
an empty tensor of the graph (see `attach`). Where a member only receives, the others send it whether there will be a
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from paceline.collectives.communicator import Communicator
from paceline.collectives.operation import Op
from paceline.collectives.operators import FUNCTIONS
from paceline.collectives.tensors import in_one_piece
from paceline.errors import UsageError

Tensors = Sequence[torch.Tensor]


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor that is to be received."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    tracked: bool
    """True if it needs a gradient."""

    def empty(self) -> torch.Tensor:
        return torch.empty(self.sizes, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class Route(NamedTuple):
    """The group and topology of a collective."""

    comm: Communicator
    topology: str


# -- all_reduce, reduce, broadcast -----------------------------------------------------------------------------------


def all_reduce(tensor: torch.Tensor, op: str, route: Route) -> torch.Tensor:
    match op:
        case "sum" | "avg":
            return _apply(_AllReduce, route, Op[op.upper()], tensor)
        case "min" | "max":
            return _apply(_Extreme, route, Op[op.upper()], tensor)
        case "product":
            shape = TensorMeta(tensor.dtype, tuple(tensor.shape), True)
            gathered = Route(route.comm, route.topology if route.comm.has("all_gather", route.topology) else "auto")
            return fold(torch.mul, _apply_all(_AllGather, gathered, [shape] * route.comm.size, tensor))
    raise UsageError(f"all_reduce with op '{op}' has no gradient; sum, avg, product, min and max have")


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        ctx.route, ctx.op = route, op
        result = _copy(tensor)
        route.comm.all_reduce(result, op, route.topology)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # Through itself, so that it can be differentiated twice.
        return None, None, _apply(_AllReduce, ctx.route, ctx.op, gradient)


class _Extreme(Function):
    """Minimum or maximum: the gradient goes to the members that had it, in equal shares."""

    @staticmethod
    def forward(ctx: Any, route: Route, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        result = _copy(tensor)
        route.comm.all_reduce(result, op, route.topology)
        chosen = (tensor == result).to(tensor.dtype)
        sharers = chosen.clone()
        route.comm.all_reduce(sharers, Op.SUM, route.topology)
        ctx.route = route
        ctx.save_for_backward(chosen / sharers)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (share,) = ctx.saved_tensors
        return None, None, share * _apply(_AllReduce, ctx.route, Op.SUM, gradient)


def reduce(tensor: torch.Tensor, root: int, op: str, route: Route) -> torch.Tensor:
    if op not in ("sum", "avg"):
        raise UsageError(f"reduce with op '{op}' has no gradient; sum and avg have")
    return _apply(_Reduce, route, Op[op.upper()], root, tensor)


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, op: Op, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.route, ctx.op, ctx.root, ctx.shape = route, op, root, tensor.shape
        result = _copy(tensor)
        route.comm.reduce(result, root, op, route.topology)
        return result if route.comm.rank == root else _token(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        route = ctx.route
        if route.comm.rank == ctx.root:
            spread = _copy(gradient / route.comm.size if ctx.op is Op.AVG else gradient)
        else:
            spread = torch.empty(ctx.shape, dtype=gradient.dtype)
        route.comm.broadcast(spread, ctx.root, route.topology)
        return None, None, None, spread


def broadcast(tensor: torch.Tensor, root: int, route: Route) -> torch.Tensor:
    return _apply(_Broadcast, route, root, tensor)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.route, ctx.root = route, root
        result = _copy(tensor)
        route.comm.broadcast(result, root, route.topology)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        total = _copy(gradient)
        ctx.route.comm.reduce(total, ctx.root, Op.SUM, ctx.route.topology)
        # The others' previous values are not in the result.
        return None, None, total if ctx.route.comm.rank == ctx.root else torch.zeros_like(total)


# -- all_gather, reduce_scatter --------------------------------------------------------------------------------------


def all_gather(tensor: torch.Tensor, shapes: list[TensorMeta], route: Route) -> list[torch.Tensor]:
    wanted = _wanted(shapes)
    return list(_run(wanted, _AllGather, route, shapes, _entry(tensor, wanted)))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, shapes: list[TensorMeta], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.route, ctx.shapes = route, shapes
        outs = [shape.empty() for shape in shapes]
        route.comm.all_gather(outs, in_one_piece(tensor.detach()), route.topology)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, _apply(_ReduceScatter, ctx.route, Op.SUM, *gradients)


def reduce_scatter(parts: Tensors, op: Op, route: Route) -> torch.Tensor:
    wanted = any(map(tracked, parts))
    if wanted and op not in (Op.SUM, Op.AVG):
        raise UsageError(f"reduce_scatter with op '{op.spoken}' has no gradient; sum and avg have")
    result: torch.Tensor = _run(wanted, _ReduceScatter, route, op, *parts)
    return result


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, op: Op, *parts: torch.Tensor) -> torch.Tensor:
        ctx.route, ctx.op, ctx.back = route, op, [(part.dtype, part.shape) for part in parts]
        out = torch.empty(parts[route.comm.rank].shape, dtype=parts[0].dtype)
        route.comm.reduce_scatter(out, [in_one_piece(part.detach()) for part in parts], op, route.topology)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        spread = gradient / ctx.route.comm.size if ctx.op is Op.AVG else gradient
        shapes = [TensorMeta(dtype, size, True) for dtype, size in ctx.back]
        return None, None, *_apply_all(_AllGather, ctx.route, shapes, spread)


# -- scatter, gather -------------------------------------------------------------------------------------------------


def scatter(parts: Tensors | None, shapes: list[TensorMeta], root: int, route: Route) -> torch.Tensor:
    given = parts if parts is not None else [torch.zeros(0, requires_grad=True)]
    result: torch.Tensor = _run(_wanted(shapes), _Scatter, route, shapes, root, *given)
    return result


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, route: Route, shapes: list[TensorMeta], root: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.route, ctx.shapes, ctx.root = route, shapes, root
        at_root = route.comm.rank == root
        out = shapes[route.comm.rank].empty()
        route.comm.scatter(
            out, [part.detach() for part in parts] if at_root else None, root, route.topology, _size(shapes)
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        route, at_root = ctx.route, ctx.route.comm.rank == ctx.root
        outs = [shape.empty() for shape in ctx.shapes] if at_root else None
        route.comm.gather(outs, in_one_piece(gradient), ctx.root, route.topology, _size(ctx.shapes))
        return None, None, None, *(outs if outs is not None else [torch.zeros(0)])


def gather(tensor: torch.Tensor, shapes: list[TensorMeta], root: int, route: Route) -> list[torch.Tensor]:
    wanted = _wanted(shapes)
    outs = _run(wanted, _Gather, route, shapes, root, _entry(tensor, wanted))
    return list(outs) if wanted or route.comm.rank == root else []


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, route: Route, shapes: list[TensorMeta], root: int, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.route, ctx.shapes, ctx.root = route, shapes, root
        outs = [shape.empty() for shape in shapes] if route.comm.rank == root else None
        route.comm.gather(outs, tensor.detach(), root, route.topology, _size(shapes))
        return tuple(outs) if outs is not None else (_token(tensor),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        route, at_root = ctx.route, ctx.route.comm.rank == ctx.root
        own = ctx.shapes[route.comm.rank].empty()
        route.comm.scatter(own, list(gradients) if at_root else None, ctx.root, route.topology, _size(ctx.shapes))
        return None, None, None, own


# -- all_to_all, push, pull ------------------------------------------------------------------------------------------


def all_to_all(parts: Tensors, shapes: list[TensorMeta], every: list[TensorMeta], route: Route) -> list[torch.Tensor]:
    """every: the shapes of all tensors between all members."""
    wanted = _wanted(every)
    return list(_run(wanted, _AllToAll, route, _size(every), shapes, _entry(parts[0], wanted), *parts[1:]))


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, route: Route, size: int, shapes: list[TensorMeta], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.route, ctx.size, ctx.back = route, size, [(part.dtype, part.shape) for part in parts]
        outs = [shape.empty() for shape in shapes]
        route.comm.all_to_all(outs, [part.detach() for part in parts], route.topology, size)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        shapes = [TensorMeta(dtype, size, True) for dtype, size in ctx.back]
        return None, None, None, *_apply_all(_AllToAll, ctx.route, ctx.size, shapes, *gradients)


def push(tensor: torch.Tensor, to: int, tag: int, comm: Communicator) -> torch.Tensor:
    return _apply(_Push, comm, to, tag, _next(comm.pushed, to, tag), tensor)


class _Push(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, to: int, tag: int, back: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.comm, ctx.to, ctx.back, ctx.shape, ctx.dtype = comm, to, back, tensor.shape, tensor.dtype
        # Not waited for, as the peer may be pushing, too; copied, as it is read at an unknown time.
        ctx.sending = comm.send(to, _copy(tensor), tag)
        return _token(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        returned = torch.empty(ctx.shape, dtype=ctx.dtype)
        ctx.comm.receive(ctx.to, returned, ctx.back)
        ctx.sending.wait()
        return None, None, None, None, returned


def pull(tensor: torch.Tensor, source: int, tag: int, comm: Communicator) -> torch.Tensor:
    return _apply(_Pull, comm, source, tag, _next(comm.pulled, source, tag), tensor)


class _Pull(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, source: int, tag: int, back: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.comm, ctx.source, ctx.back = comm, source, back
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        comm.receive(source, out, tag)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.comm.send(ctx.source, _copy(gradient), ctx.back)
        # The tensor's previous values are not in the result.
        return None, None, None, None, torch.zeros_like(gradient)


def _next(counts: dict[tuple[int, int], int], peer: int, tag: int) -> int:
    """The tag of the message with this tensor's gradient: the same on both sides, and unique."""
    counts[peer, tag] = counts.get((peer, tag), 0) + 1
    return -((tag + 1) << 32) - counts[peer, tag]


# -- helpers ---------------------------------------------------------------------------------------------------------


def pairwise(op: Op) -> Callable[[Tensors], torch.Tensor]:
    """A function that reduces the values of one member, in their order; differentiable where torch's is."""
    return lambda values: fold(FUNCTIONS[op], values)


def _apply(function: type[Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def _apply_all(function: type[Function], *arguments: Any) -> list[torch.Tensor]:
    return list(function.apply(*arguments))


def _run(wanted: bool, function: Any, *arguments: Any) -> Any:
    """The results of a function, in autograd's graph if any member wants a gradient."""
    return function.apply(*arguments) if wanted else function.forward(SimpleNamespace(), *arguments)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def attach(loss: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
    """The same loss, with tokens in its graph.

    Where an operation gives a member no values (it pushed, or another was the root) but a gradient will be sent back to
    it, the operation returns an empty tensor: a token. `backward` from it, or from a loss that it is attached to,
    receives that gradient.
    """
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


def tracked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _wanted(shapes: list[TensorMeta]) -> bool:
    return torch.is_grad_enabled() and any(shape.tracked for shape in shapes)


def _size(shapes: list[TensorMeta]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _entry(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    """The tensor in the graph, even if it needs no gradient: the backward pass of the others needs this member."""
    return tensor.detach().requires_grad_() if wanted and not tensor.requires_grad else tensor
