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
Adjoint = Callable[..., Tensors]
"""Takes the gradients of an operation's results; returns those of its tensors."""


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


class _Twice(Function):
    """An operation with its adjoint, which can be differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], adjoint: Adjoint, *tensors: torch.Tensor) -> Any:
        ctx.adjoint = adjoint
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.adjoint(*gradients)


class _Once(_Twice):
    """An operation whose adjoint cannot be differentiated."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.adjoint(*gradients)


def _one(
    kind: type[_Twice], run: Callable[..., Any], adjoint: Adjoint, *tensors: torch.Tensor, wanted: bool = True
) -> torch.Tensor:
    """The tensor that `run` makes of these, in autograd's graph if a gradient is wanted."""
    result: torch.Tensor = kind.apply(run, adjoint, *tensors) if wanted else run(*tensors)
    return result


def _several(
    kind: type[_Twice], run: Callable[..., Any], adjoint: Adjoint, *tensors: torch.Tensor, wanted: bool = True
) -> list[torch.Tensor]:
    """As `_one`, where `run` makes several tensors."""
    return list(kind.apply(run, adjoint, *tensors) if wanted else run(*tensors))


# -- all_reduce, reduce, broadcast -----------------------------------------------------------------------------------


def all_reduce(tensor: torch.Tensor, op: str, route: Route) -> torch.Tensor:
    match op:
        case "sum" | "avg":
            return _total(tensor, Op[op.upper()], route)
        case "min" | "max":
            return _extreme(tensor, Op[op.upper()], route)
        case "product":
            gathered = Route(route.comm, route.topology if route.comm.has("all_gather", route.topology) else "auto")
            return fold(torch.mul, _all_gather(tensor, _metas([tensor]) * route.comm.size, gathered))
    raise UsageError(f"all_reduce with op '{op}' has no gradient; sum, avg, product, min and max have")


def _total(tensor: torch.Tensor, op: Op, route: Route) -> torch.Tensor:
    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _copy(tensor)
        route.comm.all_reduce(result, op, route.topology)
        return result

    return _one(_Twice, run, lambda gradient: [_total(gradient, op, route)], tensor)


def _extreme(tensor: torch.Tensor, op: Op, route: Route) -> torch.Tensor:
    """Minimum or maximum: the gradient goes to the members that had it, in equal shares."""
    result = _copy(tensor)
    route.comm.all_reduce(result, op, route.topology)
    chosen = (tensor.detach() == result).to(tensor.dtype)
    sharers = chosen.clone()
    route.comm.all_reduce(sharers, Op.SUM, route.topology)
    share = chosen / sharers
    return _one(_Twice, lambda _: result, lambda gradient: [share * _total(gradient, Op.SUM, route)], tensor)


def reduce(tensor: torch.Tensor, root: int, op: str, route: Route) -> torch.Tensor:
    if op not in ("sum", "avg"):
        raise UsageError(f"reduce with op '{op}' has no gradient; sum and avg have")
    shape, at_root = tensor.shape, route.comm.rank == root

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _copy(tensor)
        route.comm.reduce(result, root, Op[op.upper()], route.topology)
        return result if at_root else _token(tensor)

    def adjoint(gradient: torch.Tensor) -> Tensors:
        spread = torch.empty(shape, dtype=gradient.dtype)
        if at_root:
            spread = _copy(gradient / route.comm.size if op == "avg" else gradient)
        route.comm.broadcast(spread, root, route.topology)
        return [spread]

    return _one(_Once, run, adjoint, tensor)


def broadcast(tensor: torch.Tensor, root: int, route: Route) -> torch.Tensor:
    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = _copy(tensor)
        route.comm.broadcast(result, root, route.topology)
        return result

    def adjoint(gradient: torch.Tensor) -> Tensors:
        total = _copy(gradient)
        route.comm.reduce(total, root, Op.SUM, route.topology)
        # The others' previous values are not in the result.
        return [total if route.comm.rank == root else torch.zeros_like(total)]

    return _one(_Once, run, adjoint, tensor)


# -- all_gather, reduce_scatter --------------------------------------------------------------------------------------


def all_gather(tensor: torch.Tensor, shapes: list[TensorMeta], route: Route) -> list[torch.Tensor]:
    wanted = _wanted(shapes)
    return _all_gather(_entry(tensor, wanted), shapes, route, wanted)


def _all_gather(
    tensor: torch.Tensor, shapes: list[TensorMeta], route: Route, wanted: bool = True
) -> list[torch.Tensor]:
    def run(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = [shape.empty() for shape in shapes]
        route.comm.all_gather(outs, in_one_piece(tensor.detach()), route.topology)
        return tuple(outs)

    def adjoint(*gradients: torch.Tensor) -> Tensors:
        return [_reduce_scatter(gradients, Op.SUM, route)]

    return _several(_Twice, run, adjoint, tensor, wanted=wanted)


def reduce_scatter(parts: Tensors, op: Op, route: Route) -> torch.Tensor:
    wanted = any(map(tracked, parts))
    if wanted and op not in (Op.SUM, Op.AVG):
        raise UsageError(f"reduce_scatter with op '{op.spoken}' has no gradient; sum and avg have")
    return _reduce_scatter(parts, op, route, wanted)


def _reduce_scatter(parts: Tensors, op: Op, route: Route, wanted: bool = True) -> torch.Tensor:
    shapes = _metas(parts)

    def run(*parts: torch.Tensor) -> torch.Tensor:
        out = torch.empty(parts[route.comm.rank].shape, dtype=parts[0].dtype)
        route.comm.reduce_scatter(out, [in_one_piece(part.detach()) for part in parts], op, route.topology)
        return out

    def adjoint(gradient: torch.Tensor) -> Tensors:
        return _all_gather(gradient / route.comm.size if op is Op.AVG else gradient, shapes, route)

    return _one(_Twice, run, adjoint, *parts, wanted=wanted)


# -- scatter, gather -------------------------------------------------------------------------------------------------


def scatter(parts: Tensors | None, shapes: list[TensorMeta], root: int, route: Route) -> torch.Tensor:
    given = parts if parts is not None else [torch.zeros(0, requires_grad=True)]

    def adjoint(gradient: torch.Tensor) -> Tensors:
        return _gathered(gradient, shapes, root, route) or [torch.zeros(0)]

    return _one(_Once, lambda *parts: _scattered(parts, shapes, root, route), adjoint, *given, wanted=_wanted(shapes))


def _scattered(parts: Tensors, shapes: list[TensorMeta], root: int, route: Route) -> torch.Tensor:
    out = shapes[route.comm.rank].empty()
    own = [part.detach() for part in parts] if route.comm.rank == root else None
    route.comm.scatter(out, own, root, route.topology, _size(shapes))
    return out


def gather(tensor: torch.Tensor, shapes: list[TensorMeta], root: int, route: Route) -> list[torch.Tensor]:
    wanted = _wanted(shapes)

    def run(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = _gathered(tensor.detach(), shapes, root, route)
        return tuple(outs if outs or not wanted else [_token(tensor)])

    def adjoint(*gradients: torch.Tensor) -> Tensors:
        return [_scattered(gradients, shapes, root, route)]

    return _several(_Once, run, adjoint, _entry(tensor, wanted), wanted=wanted)


def _gathered(tensor: torch.Tensor, shapes: list[TensorMeta], root: int, route: Route) -> list[torch.Tensor]:
    """All tensors, by rank, at the root; none elsewhere."""
    outs = [shape.empty() for shape in shapes] if route.comm.rank == root else []
    route.comm.gather(outs or None, tensor, root, route.topology, _size(shapes))
    return outs


# -- all_to_all, push, pull ------------------------------------------------------------------------------------------


def all_to_all(parts: Tensors, shapes: list[TensorMeta], every: list[TensorMeta], route: Route) -> list[torch.Tensor]:
    """every: the shapes of all tensors between all members."""
    wanted = _wanted(every)
    return _all_to_all([_entry(parts[0], wanted), *parts[1:]], shapes, _size(every), route, wanted)


def _all_to_all(
    parts: Tensors, shapes: list[TensorMeta], size: int, route: Route, wanted: bool = True
) -> list[torch.Tensor]:
    back = _metas(parts)

    def run(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = [shape.empty() for shape in shapes]
        route.comm.all_to_all(outs, [part.detach() for part in parts], route.topology, size)
        return tuple(outs)

    def adjoint(*gradients: torch.Tensor) -> Tensors:
        return _all_to_all(gradients, back, size, route)

    return _several(_Twice, run, adjoint, *parts, wanted=wanted)


def push(tensor: torch.Tensor, to: int, tag: int, comm: Communicator) -> torch.Tensor:
    back, shape = _next(comm.pushed, to, tag), tensor.shape
    # Not waited for, as the peer may be pushing, too; copied, as it is read at an unknown time.
    sending = comm.send(to, _copy(tensor), tag)

    def adjoint(gradient: torch.Tensor) -> Tensors:
        returned = torch.empty(shape, dtype=gradient.dtype)
        comm.receive(to, returned, back)
        sending.wait()
        return [returned]

    return _one(_Once, _token, adjoint, tensor)


def pull(tensor: torch.Tensor, source: int, tag: int, comm: Communicator) -> torch.Tensor:
    back = _next(comm.pulled, source, tag)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        comm.receive(source, out, tag)
        return out

    def adjoint(gradient: torch.Tensor) -> Tensors:
        comm.send(source, _copy(gradient), back)
        # The tensor's previous values are not in the result.
        return [torch.zeros_like(gradient)]

    return _one(_Once, run, adjoint, tensor)


def _next(counts: dict[tuple[int, int], int], peer: int, tag: int) -> int:
    """The tag of the message with this tensor's gradient: the same on both sides, and unique."""
    counts[peer, tag] = counts.get((peer, tag), 0) + 1
    return -((tag + 1) << 32) - counts[peer, tag]


# -- helpers ---------------------------------------------------------------------------------------------------------


def pairwise(op: Op) -> Callable[[Tensors], torch.Tensor]:
    """A function that reduces the values of one member, in their order; differentiable where torch's is."""
    return lambda values: fold(FUNCTIONS[op], values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def attach(loss: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
    """The same loss, with tokens in its graph.

    Where an operation gives a member no values (it pushed, or another was the root) but a gradient will be sent back to
    it, the operation returns an empty tensor: a token. `backward` from it, or from a loss that it is attached to,
    receives that gradient.
    """
    shapes = [(token.shape, token.dtype) for token in tokens]

    def adjoint(gradient: torch.Tensor) -> Tensors:
        return [gradient, *(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)]

    return _one(_Twice, lambda loss, *_: loss.view_as(loss), adjoint, loss, *tokens) if tokens else loss


def _token(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(0, dtype=like.dtype)


def tracked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _metas(tensors: Tensors) -> list[TensorMeta]:
    return [TensorMeta(tensor.dtype, tuple(tensor.shape), True) for tensor in tensors]


def _wanted(shapes: list[TensorMeta]) -> bool:
    return torch.is_grad_enabled() and any(shape.tracked for shape in shapes)


def _size(shapes: list[TensorMeta]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _entry(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    """The tensor in the graph, even if it needs no gradient: the backward pass of the others needs this member."""
    return tensor.detach().requires_grad_() if wanted and not tensor.requires_grad else tensor
