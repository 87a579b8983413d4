"""The collectives that `paceline.collectives` exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from paceline.collectives import differentiable
from paceline.collectives.communicator import Communicator, ObservedTraffic
from paceline.collectives.default_group import GroupLike, communicator
from paceline.collectives.differentiable import Route, TensorMeta, tracked
from paceline.collectives.operation import DTYPES, NUMBERS, Op
from paceline.collectives.tensors import in_one_piece
from paceline.config import one_of
from paceline.errors import UsageError
from paceline.transport import segments
from paceline.transport.channel import PendingSend

T = TypeVar("T")
_OPERATORS = {op.spoken: op for op in Op if op not in (Op.NONE, Op.PREMUL_SUM)}
_DIMENSIONS = 16
"""Numbers that describe a tensor to members that do not know its shape: three, and its sizes."""


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new zeroed tensor in shared memory, which collectives use without a copy."""
    return segments.empty(*shape, dtype=dtype)


# -- one to one ------------------------------------------------------------------------------------------------------


def push(tensor: torch.Tensor, to: int, *, tag: int = 0, group: GroupLike = None) -> PendingSend | torch.Tensor:
    """Sends a tensor to another member, which pulls it. Does not wait: pass the result to `wait`.

    Returns a token for a tensor that requires grad: see `attach`.
    """
    comm = communicator(group)
    to, tag = _rank(comm.size, "to", to), _tag(tag)
    if tracked(tensor):
        return differentiable.push(tensor, to, tag, comm)
    return comm.send(to, in_one_piece(tensor), tag)


def pull(tensor: torch.Tensor, source: int, *, tag: int = 0, group: GroupLike = None) -> torch.Tensor:
    """Receives the tensor that another member pushes into this one, and returns it.

    If `tensor` requires grad, a new tensor is returned, whose gradient is sent back to the source.
    """
    comm = communicator(group)
    source, tag = _rank(comm.size, "source", source), _tag(tag)
    if tracked(tensor):
        return differentiable.pull(tensor, source, tag, comm)
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    place = tensor if plain else torch.empty(tensor.shape, dtype=tensor.dtype)
    comm.receive(source, place, tag)
    return tensor if place is tensor else tensor.copy_(place)


def wait(*what: Any, group: GroupLike = None) -> None:
    """Waits for operations that were begun: the results of `push` or of asynchronous operations of torch.distributed.

    A whole number stands for a member, and waits until it calls `wait` itself. So `wait(0)` on all members is a barrier
    with rank 0, at which rank 0 does not wait.
    """
    ranks = [item for item in what if isinstance(item, int)]
    for item in what:
        if not isinstance(item, int | torch.Tensor):
            item.wait()
    if ranks:
        comm = communicator(group)
        _wait_for_ranks(comm, {_rank(comm.size, "rank", rank) for rank in ranks})


def _wait_for_ranks(comm: Communicator, ranks: set[int]) -> None:
    """The ranks that are waited for send an empty message to all members; all wait for these."""
    empty_message = torch.zeros(0, dtype=torch.uint8)
    if comm.rank in ranks:
        for peer in range(comm.size):
            if peer != comm.rank:
                comm.send(peer, empty_message, -31)
    for peer in ranks - {comm.rank}:
        comm.receive(peer, torch.empty_like(empty_message), -31)


# -- one to all, all to one ------------------------------------------------------------------------------------------


def broadcast(tensor: torch.Tensor, root: int = 0, *, topology: str = "auto", group: GroupLike = None) -> torch.Tensor:
    """All tensors become the root's."""
    comm = communicator(group)
    root = _rank(comm.size, "root", root)
    if tracked(tensor):
        comm.check("broadcast", topology)
        return differentiable.broadcast(tensor, root, Route(comm, topology))
    comm.broadcast(tensor, root, topology)
    return tensor


def reduce(
    tensor: torch.Tensor, root: int = 0, op: str = "sum", *, topology: str = "auto", group: GroupLike = None
) -> torch.Tensor:
    """The root's tensor becomes the reduction of all. Others get theirs back, or a token if it requires grad."""
    comm = communicator(group)
    root, operator = _rank(comm.size, "root", root), _operator(op)
    if tracked(tensor):
        comm.check("reduce", topology)
        return differentiable.reduce(tensor, root, op, Route(comm, topology))
    comm.reduce(tensor, root, operator, topology)
    return tensor


def scatter(
    tensors: Sequence[torch.Tensor] | torch.Tensor | None,
    root: int = 0,
    *,
    topology: str = "auto",
    group: GroupLike = None,
) -> torch.Tensor:
    """Sends each member its part of the root's tensors: a list with one per member, or a tensor to be split.

    The others pass None, and need not know the size of their part.
    """
    comm = communicator(group)
    root = _rank(comm.size, "root", root)
    comm.check("scatter", topology)
    parts = None
    if comm.rank == root:
        try:
            if tensors is None:
                raise UsageError("scatter needs tensors at its root")
            parts = _parts("scatter", tensors, comm.size)
        except UsageError:
            _shapes(comm, None, root)  # the others wait for this, and raise, too
            raise
    shapes = _shapes(comm, parts if parts is not None else [], root)
    return differentiable.scatter(parts, shapes, root, Route(comm, topology))


def gather(
    tensor: torch.Tensor, root: int = 0, *, topology: str = "auto", group: GroupLike = None
) -> list[torch.Tensor]:
    """All tensors, by rank, at the root. Elsewhere an empty list, or a token if a gradient will be sent back."""
    comm = communicator(group)
    root = _rank(comm.size, "root", root)
    comm.check("gather", topology)
    return differentiable.gather(tensor, _all_shapes(comm, tensor), root, Route(comm, topology))


# -- all to all ------------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", *, topology: str = "auto", group: GroupLike = None
) -> torch.Tensor:
    """All tensors become the reduction of all."""
    comm = communicator(group)
    operator = _operator(op)
    if tracked(tensor):
        comm.check("all_reduce", topology)
        return differentiable.all_reduce(tensor, op, Route(comm, topology))
    comm.all_reduce(tensor, operator, topology)
    return tensor


def all_gather(tensor: torch.Tensor, *, topology: str = "auto", group: GroupLike = None) -> list[torch.Tensor]:
    """All tensors, by rank; their shapes may differ."""
    comm = communicator(group)
    comm.check("all_gather", topology)
    return differentiable.all_gather(tensor, _all_shapes(comm, tensor), Route(comm, topology))


def reduce_scatter(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    op: str = "sum",
    *,
    topology: str = "auto",
    group: GroupLike = None,
) -> torch.Tensor:
    """The reduction of all members' parts for this member; parts are a list, or a tensor to be split."""
    comm = communicator(group)
    comm.check("reduce_scatter", topology)
    operator = _operator(op)
    return differentiable.reduce_scatter(_parts("reduce_scatter", tensors, comm.size), operator, Route(comm, topology))


def all_to_all(
    tensors: Sequence[torch.Tensor] | torch.Tensor, *, topology: str = "auto", group: GroupLike = None
) -> list[torch.Tensor]:
    """Sends each member its part of this member's tensors; their shapes may differ."""
    comm = communicator(group)
    comm.check("all_to_all", topology)
    parts = _parts("all_to_all", tensors, comm.size)
    described = torch.stack([_describe(part) for part in parts])
    seen = [torch.empty_like(described) for _ in range(comm.size)]
    comm.all_gather(seen, described)
    shapes = [_shape(table[comm.rank]) for table in seen]
    every = [_shape(row) for table in seen for row in table]
    return differentiable.all_to_all(parts, shapes, every, Route(comm, topology))


def map_reduce(
    function: Callable[[T], torch.Tensor | float],
    items: Iterable[T],
    op: str = "sum",
    *,
    topology: str = "auto",
    group: GroupLike = None,
) -> torch.Tensor:
    """Applies a function to each item, with the items divided among the members, and reduces the results.

    All members pass the same items and get the same result. A member without an item waits for the others.
    """
    comm, known, operator = communicator(group), list(items), _operator(op)
    if not known:
        raise UsageError("map_reduce needs at least one item")
    inner = "sum" if operator is Op.AVG else op
    combine = differentiable.pairwise(_operator(inner))
    values = [torch.as_tensor(function(item)) for item in known[comm.rank :: comm.size]]
    if len(known) >= comm.size:
        total = all_reduce(combine(values).clone(), inner, topology=topology, group=group)
    else:
        # A member without an item does not know the shape and dtype of a result.
        own = values[0] if values else torch.empty(0)
        shapes = _all_shapes(comm, own)
        own = own if values else own.to(shapes[0].dtype)
        shapes[len(known) :] = [TensorMeta(shapes[0].dtype, (0,), False)] * (comm.size - len(known))
        chosen = topology if comm.has("all_gather", topology) else "auto"
        total = combine(differentiable.all_gather(own, shapes, Route(comm, chosen))[: len(known)])
    return total / len(known) if operator is Op.AVG else total


def barrier(*, topology: str = "auto", group: GroupLike = None) -> None:
    """Waits until all members have called it."""
    communicator(group).barrier(topology)


attach = differentiable.attach


# -- observing -------------------------------------------------------------------------------------------------------


def observe(group: GroupLike = None) -> AbstractContextManager[ObservedTraffic]:
    """Counts and records the messages that this member sends and receives in the block."""
    return communicator(group).observe()


# -- helpers ---------------------------------------------------------------------------------------------------------


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
    """A tensor's dtype, shape and need of a gradient, as a fixed count of numbers."""
    if tensor.dim() > _DIMENSIONS - 3:
        raise UsageError(f"a tensor of {tensor.dim()} dimensions; at most {_DIMENSIONS - 3} are possible here")
    numbers = [NUMBERS[tensor.dtype], tracked(tensor), tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (_DIMENSIONS - len(numbers)))


def _shape(numbers: torch.Tensor) -> TensorMeta:
    dtype, tracked, dimensions, *sizes = numbers.tolist()
    return TensorMeta(DTYPES[dtype], tuple(sizes[:dimensions]), bool(tracked))


def _all_shapes(comm: Communicator, tensor: torch.Tensor) -> list[TensorMeta]:
    seen = [torch.empty(_DIMENSIONS, dtype=torch.int64) for _ in range(comm.size)]
    comm.all_gather(seen, _describe(tensor))
    return [_shape(numbers) for numbers in seen]


def _shapes(comm: Communicator, parts: list[torch.Tensor] | None, root: int) -> list[TensorMeta]:
    """Broadcasts the shapes of the root's tensors. parts: None at a root whose tensors are wrong; the others raise."""
    table = torch.full((comm.size, _DIMENSIONS), -1)
    if parts:
        table = torch.stack([_describe(part) for part in parts])
    comm.broadcast(table, root)
    if parts is not None and int(table[0, 0]) < 0:
        raise UsageError(f"the root of scatter, rank {root}, does not have one tensor per member, {comm.size}")
    return [] if parts is None else [_shape(row) for row in table]
