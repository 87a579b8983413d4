"""The primitives of a group, by the names that lectures give them. See `paceline.collectives`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch

from paceline.collectives import differentiable
from paceline.collectives.communicator import Communicator, ObservedTraffic, in_one_piece
from paceline.collectives.default_group import GroupLike, member
from paceline.collectives.differentiable import TensorMeta
from paceline.collectives.operation import DTYPES, Op
from paceline.config import one_of
from paceline.errors import UsageError
from paceline.transport import segments
from paceline.transport.channel import PendingSend

T = TypeVar("T")
_OPERATORS = {op.spoken: op for op in Op if op not in (Op.NONE, Op.PREMUL_SUM)}
_DIMENSIONS = 16
"""Of a tensor that others do not know the shape of, at most."""


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new zeroed tensor in shared memory: collectives on it copy nothing aside."""
    return segments.empty(*shape, dtype=dtype)


# -- one to one ------------------------------------------------------------------------------------------------------


def push(tensor: torch.Tensor, to: int, *, tag: int = 0, group: GroupLike = None) -> PendingSend | torch.Tensor:
    """Give a tensor to another member, which pulls it. Does not wait: `wait` for what this returns.

    Of a tensor that requires grad a token is returned: see `attach`.
    """
    here = member(group)
    to, tag = _rank(here.size, "to", to), _tag(tag)
    if _tracked(tensor):
        return differentiable.push(tensor, to, tag, here)
    return here.send(to, in_one_piece(tensor), tag)


def pull(tensor: torch.Tensor, source: int, *, tag: int = 0, group: GroupLike = None) -> torch.Tensor:
    """Wait for the tensor that another member pushes, and put it into this one, which is returned.

    If `tensor` requires grad, a new tensor is returned whose gradient travels back to the source.
    """
    here = member(group)
    source, tag = _rank(here.size, "source", source), _tag(tag)
    if _tracked(tensor):
        return differentiable.pull(tensor, source, tag, here)
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    place = tensor if plain else torch.empty(tensor.shape, dtype=tensor.dtype)
    here.receive(source, place, tag)
    return tensor if place is tensor else tensor.copy_(place)


def wait(*what: Any, group: GroupLike = None) -> None:
    """Wait for what was begun: whatever `push` or an asynchronous operation of torch.distributed has returned.

    A whole number stands for a member: wait until it comes to its own `wait`. So `wait(0)` on all members is the
    barrier of everybody with rank 0, and `wait(0)` there with nothing else goes on at once.
    """
    ranks = [item for item in what if isinstance(item, int)]
    for item in what:
        if not isinstance(item, int | torch.Tensor):
            item.wait()
    if ranks:
        here = member(group)
        _meet(here, {_rank(here.size, "rank", rank) for rank in ranks})


def _meet(here: Communicator, ranks: set[int]) -> None:
    """Those that are waited for tell everybody that they are there; everybody waits for their word."""
    word = torch.zeros(0, dtype=torch.uint8)
    if here.rank in ranks:
        for peer in range(here.size):
            if peer != here.rank:
                here.send(peer, word, -31)
    for peer in ranks - {here.rank}:
        here.receive(peer, torch.empty_like(word), -31)


# -- one to all, all to one ------------------------------------------------------------------------------------------


def broadcast(tensor: torch.Tensor, root: int = 0, *, topology: str = "auto", group: GroupLike = None) -> torch.Tensor:
    """Everybody's tensor becomes the root's."""
    here = member(group)
    root = _rank(here.size, "root", root)
    if _tracked(tensor):
        here.check("broadcast", topology)
        return differentiable.broadcast(tensor, root, topology, here)
    here.broadcast(tensor, root, topology)
    return tensor


def reduce(
    tensor: torch.Tensor, root: int = 0, op: str = "sum", *, topology: str = "auto", group: GroupLike = None
) -> torch.Tensor:
    """The root's tensor becomes the combination of all. The others get theirs back, or a token if it requires grad."""
    here = member(group)
    root, operator = _rank(here.size, "root", root), _operator(op)
    if _tracked(tensor):
        here.check("reduce", topology)
        return differentiable.reduce(tensor, root, op, topology, here)
    here.reduce(tensor, root, operator, topology)
    return tensor


def scatter(
    tensors: Sequence[torch.Tensor] | torch.Tensor | None,
    root: int = 0,
    *,
    topology: str = "auto",
    group: GroupLike = None,
) -> torch.Tensor:
    """To each member its part of what the root has: a list of one tensor per member, or a tensor to be cut in as many.

    The others give None, and need not know how large their part is.
    """
    here = member(group)
    root = _rank(here.size, "root", root)
    here.check("scatter", topology)
    parts = None
    if here.rank == root:
        try:
            if tensors is None:
                raise UsageError("scatter needs tensors at its root")
            parts = _parts("scatter", tensors, here.size)
        except UsageError:
            _shapes(here, None, root)  # the others wait to hear of it
            raise
    shapes = _shapes(here, parts if parts is not None else [], root)
    return differentiable.scatter(parts, shapes, root, topology, here)


def gather(
    tensor: torch.Tensor, root: int = 0, *, topology: str = "auto", group: GroupLike = None
) -> list[torch.Tensor]:
    """Everybody's tensor, by rank, at the root. Elsewhere an empty list, or a token if a gradient will come back."""
    here = member(group)
    root = _rank(here.size, "root", root)
    here.check("gather", topology)
    return differentiable.gather(tensor, _all_shapes(here, tensor), root, topology, here)


# -- all to all ------------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", *, topology: str = "auto", group: GroupLike = None
) -> torch.Tensor:
    """Everybody's tensor becomes the combination of all."""
    here = member(group)
    operator = _operator(op)
    if tensor.requires_grad and torch.is_grad_enabled():
        here.check("all_reduce", topology)
        return differentiable.all_reduce(tensor, op, topology, here)
    here.all_reduce(tensor, operator, topology)
    return tensor


def all_gather(tensor: torch.Tensor, *, topology: str = "auto", group: GroupLike = None) -> list[torch.Tensor]:
    """Everybody's tensor, by rank; they may be of different shapes."""
    here = member(group)
    here.check("all_gather", topology)
    return differentiable.all_gather(tensor, _all_shapes(here, tensor), topology, here)


def reduce_scatter(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    op: str = "sum",
    *,
    topology: str = "auto",
    group: GroupLike = None,
) -> torch.Tensor:
    """The combination of everybody's part for this member; parts are a list, or a tensor to be cut in as many."""
    here = member(group)
    here.check("reduce_scatter", topology)
    operator = _operator(op)
    return differentiable.reduce_scatter(_parts("reduce_scatter", tensors, here.size), operator, topology, here)


def all_to_all(
    tensors: Sequence[torch.Tensor] | torch.Tensor, *, topology: str = "auto", group: GroupLike = None
) -> list[torch.Tensor]:
    """To each member its one of everybody's tensors; they may be of different shapes."""
    here = member(group)
    here.check("all_to_all", topology)
    parts = _parts("all_to_all", tensors, here.size)
    described = torch.stack([_describe(part) for part in parts])
    seen = [torch.empty_like(described) for _ in range(here.size)]
    here.all_gather(seen, described)
    shapes = [_shape(table[here.rank]) for table in seen]
    every = [_shape(row) for table in seen for row in table]
    return differentiable.all_to_all(parts, shapes, every, topology, here)


def map_reduce(
    function: Callable[[T], torch.Tensor | float],
    items: Iterable[T],
    op: str = "sum",
    *,
    topology: str = "auto",
    group: GroupLike = None,
) -> torch.Tensor:
    """Apply a function to each item, the items being dealt out to all members, and combine what comes out.

    Everybody gives the same items and gets the same result. Members with nothing to do wait for those who have.
    """
    here, known, operator = member(group), list(items), _operator(op)
    if not known:
        raise UsageError("map_reduce needs at least one item")
    inner = "sum" if operator is Op.AVG else op
    way = differentiable.pairwise(_operator(inner))
    values = [torch.as_tensor(function(item)) for item in known[here.rank :: here.size]]
    if len(known) >= here.size:
        total = all_reduce(way(values).clone(), inner, topology=topology, group=group)
    else:
        # Who has no item has nothing to combine, and does not even know what it would be.
        own = values[0] if values else torch.empty(0)
        shapes = _all_shapes(here, own)
        own = own if values else own.to(shapes[0].dtype)
        shapes[len(known) :] = [TensorMeta(shapes[0].dtype, (0,), False)] * (here.size - len(known))
        chosen = topology if here.has("all_gather", topology) else "auto"
        total = way(differentiable.all_gather(own, shapes, chosen, here)[: len(known)])
    return total / len(known) if operator is Op.AVG else total


def barrier(*, topology: str = "auto", group: GroupLike = None) -> None:
    """Wait until all members are here."""
    member(group).barrier(topology)


def attach(loss: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
    """The same loss, with tokens in its graph.

    Where an operation leaves a member nothing to compute with (it pushed, or another was the root), but a gradient will
    come back to it, the operation returns an empty tensor: a token. Backward from it, or from a loss that it is
    attached to, is where that gradient arrives.
    """
    return differentiable.attach(loss, *tokens)


# -- looking ---------------------------------------------------------------------------------------------------------


@contextmanager
def observe(group: GroupLike = None) -> Iterator[ObservedTraffic]:
    """Count and record the messages that this member sends and receives meanwhile."""
    with member(group).observe() as seen:
        yield seen


# -- what these have in common ---------------------------------------------------------------------------------------


def _tracked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _operator(op: str) -> Op:
    found = _OPERATORS.get(op)
    return found if found is not None else _OPERATORS[one_of("op", op, _OPERATORS)]


def _rank(size: int, name: str, rank: int) -> int:
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise UsageError(f"{name} is {rank!r}; it must be a rank from 0 to {size - 1}")
    return rank


def _tag(tag: int) -> int:
    if not isinstance(tag, int) or tag < 0:
        raise UsageError(f"tag is {tag!r}; it must be a whole number of at least 0")
    return tag


def _parts(name: str, tensors: Sequence[torch.Tensor] | torch.Tensor, size: int) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        if tensors.dim() == 0 or tensors.shape[0] % size:
            raise UsageError(
                f"{name} cuts a tensor along its first dimension; {tuple(tensors.shape)} does not divide by {size}"
            )
        return list(tensors.chunk(size)) if len(tensors) else [tensors] * size
    if len(tensors) != size:
        raise UsageError(f"{name} was given {len(tensors)} tensors; it needs one per member, {size}")
    return list(tensors)


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's dtype and shape, and whether it requires grad, as numbers, always as many."""
    if tensor.dim() > _DIMENSIONS - 3:
        raise UsageError(f"a tensor of {tensor.dim()} dimensions; at most {_DIMENSIONS - 3} are possible here")
    numbers = [_numbers()[tensor.dtype], _tracked(tensor), tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (_DIMENSIONS - len(numbers)))


def _shape(numbers: torch.Tensor) -> TensorMeta:
    dtype, tracked, dimensions, *sizes = numbers.tolist()
    return TensorMeta(DTYPES[dtype], tuple(sizes[:dimensions]), bool(tracked))


@lru_cache(maxsize=1)
def _numbers() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in enumerate(DTYPES)}


def _all_shapes(here: Communicator, tensor: torch.Tensor) -> list[TensorMeta]:
    seen = [torch.empty(_DIMENSIONS, dtype=torch.int64) for _ in range(here.size)]
    here.all_gather(seen, _describe(tensor))
    return [_shape(numbers) for numbers in seen]


def _shapes(here: Communicator, parts: list[torch.Tensor] | None, root: int) -> list[TensorMeta]:
    """The shapes of the root's tensors, told to all; None if it has none, which all others are told by an error."""
    table = torch.full((here.size, _DIMENSIONS), -1)
    if parts:
        table = torch.stack([_describe(part) for part in parts])
    here.broadcast(table, root)
    if parts is not None and int(table[0, 0]) < 0:
        raise UsageError(f"the root of scatter, rank {root}, does not have one tensor per member, {here.size}")
    return [] if parts is None else [_shape(row) for row in table]
