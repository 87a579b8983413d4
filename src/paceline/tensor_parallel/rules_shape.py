"""Rules of operations that only arrange elements anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import (
    NO,
    LocalRule,
    Outcome,
    RuleRefusal,
    argument,
    dimension,
    is_tensor,
    placed,
)


def _sizes(args: Sequence[Any], kwargs: dict[str, Any], name: str = "shape") -> list[int]:
    """Sizes that were given as one sequence, or one by one."""
    given: Any = args[1:] if len(args) > 1 else (kwargs[name],)
    return list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)


def _resolved(sizes: Sequence[int], total: int) -> list[int]:
    known = math.prod(size for size in sizes if size != -1)
    return [total // max(1, known) if size == -1 else size for size in sizes]


def view(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    if "dtype" in kwargs or (len(args) > 1 and not isinstance(args[1], (int, tuple, list))):
        return NO
    return reshaped(args[0], _sizes(args, kwargs), workers)


def view_as(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    return reshaped(args[0], list(args[1].shape), workers)


def flatten(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    shape = list(args[0].shape)
    first = dimension(argument(args, kwargs, 1, "start_dim", 0), len(shape))
    last = dimension(argument(args, kwargs, 2, "end_dim", -1), len(shape))
    return reshaped(args[0], [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]], workers)


def unflatten(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    shape = list(args[0].shape)
    dim = dimension(argument(args, kwargs, 1, "dim"), len(shape))
    sizes = _resolved(argument(args, kwargs, 2, "sizes"), shape[dim])
    return reshaped(args[0], [*shape[:dim], *sizes, *shape[dim + 1 :]], workers)


def squeeze(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    shape = list(args[0].shape)
    dims = argument(args, kwargs, 1, "dim")
    wanted = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dimension(dim, len(shape)) for dim in wanted}
    return reshaped(args[0], [size for dim, size in enumerate(shape) if not (dim in gone and size == 1)], workers)


def unsqueeze(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    shape = list(args[0].shape)
    dim = dimension(argument(args, kwargs, 1, "dim"), len(shape) + 1)
    return reshaped(args[0], [*shape[:dim], 1, *shape[dim:]], workers)


def reshaped(tensor: Any, sizes: list[int], workers: int) -> Outcome:
    """The general case: each worker brings its part into the shape that is its part of the result."""
    place = placed(tensor)
    assert place is not None
    old = list(tensor.shape)
    sizes = _resolved(sizes, math.prod(old))
    found = moved(old, sizes, place, workers)
    if isinstance(found, RuleRefusal):
        return found
    local = list(sizes)
    local[found.dim] //= workers
    # Not view: what a worker has may lie in memory otherwise than the whole would.
    return LocalRule((tensor, local), {}, found, call=torch.reshape)


def moved(old: list[int], new: list[int], place: Placement, workers: int) -> Placement | RuleRefusal:
    """Where the cut is after a change of shape that leaves the order of elements."""
    before = math.prod(old[: place.dim])
    equal = len(set(place.blocks)) == 1
    passed = 1
    for dim, size in enumerate(new):
        if passed == before and size == old[place.dim]:
            return place.at(dim)
        passed *= size
    if not equal:
        return NO
    # Equal blocks are as a dimension of their own before the one that is cut.
    outer = before * len(place.blocks)
    passed = 1
    wish: tuple[int, ...] | None = None
    for dim, size in enumerate(new):
        if passed == outer and size > 1:
            if size % workers == 0:
                return Placement(dim, (size,))
            if len(place.blocks) == 1 and place.size % size == 0:
                wish = (place.size // size,) * size
            break
        inside = outer // passed if outer % passed == 0 else 0
        if inside > 1 and size > inside and size % inside == 0 and (size // inside) % workers == 0:
            # It takes in what was before: each of those is a block now.
            return Placement(dim, (size // inside,) * inside)
        passed *= size
    return RuleRefusal(wish)


def transpose(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    place, dims = placed(args[0]), len(args[0].shape)
    assert place is not None
    names = ("dim0", "dim1") if "dim0" in kwargs else ("axis0", "axis1")
    first = dimension(argument(args, kwargs, 1, names[0]), dims)
    second = dimension(argument(args, kwargs, 2, names[1]), dims)
    return LocalRule(args, kwargs, place.at({first: second, second: first}.get(place.dim, place.dim)))


def last_two(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`t`, `mT`, `adjoint`."""
    place, dims = placed(args[0]), len(args[0].shape)
    assert place is not None
    return LocalRule(args, kwargs, place.at({dims - 1: dims - 2, dims - 2: dims - 1}.get(place.dim, place.dim)))


def reversed_dims(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`T`, which turns round all dimensions there are."""
    return last_two(args, kwargs, workers) if len(args[0].shape) == 2 else NO


def permute(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    place, dims = placed(args[0]), len(args[0].shape)
    assert place is not None
    order = [dimension(dim, dims) for dim in _sizes(args, kwargs, "dims")]
    return LocalRule(args, kwargs, place.at(order.index(place.dim)))


def expand(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    place, old = placed(args[0]), list(args[0].shape)
    assert place is not None
    new = list(args[1].shape) if is_tensor(args[1]) else _sizes(args, kwargs, "size")
    dim = place.dim + len(new) - len(old)
    if new[dim] not in (-1, place.size):
        return NO
    new[dim] = -1
    return LocalRule((args[0], new), {}, place.at(dim), call=torch.Tensor.expand)


def split(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    return _pieces(args, kwargs, workers, chunks=False)


def chunk(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    return _pieces(args, kwargs, workers, chunks=True)


def _pieces(args: Sequence[Any], kwargs: dict[str, Any], workers: int, *, chunks: bool) -> Outcome:
    place, shape = placed(args[0]), list(args[0].shape)
    assert place is not None
    dim = dimension(argument(args, kwargs, 2, "dim", 0), len(shape))
    given = args[1] if len(args) > 1 else next(value for name, value in kwargs.items() if name != "dim")
    if dim != place.dim:
        return LocalRule(args, kwargs, place)
    size = -(-place.size // given) if chunks else given
    if isinstance(size, int):
        sizes = [min(size, place.size - start) for start in range(0, place.size, size)]
    else:
        sizes = list(size)
    found = _blocks_of(place.blocks, sizes)
    if found is None:
        return RuleRefusal(tuple(sizes) if all(one % workers == 0 for one in sizes) else None)
    local = [one // workers for one in sizes]
    return LocalRule((args[0], local, dim), {}, [Placement(dim, blocks) for blocks in found], call=torch.split)


def _blocks_of(blocks: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Per piece, the blocks that it consists of; None where a piece ends inside a block."""
    left, found = list(blocks), []
    for size in sizes:
        own: list[int] = []
        while left and sum(own) < size:
            own.append(left.pop(0))
        if sum(own) != size:
            return None
        found.append(tuple(own))
    return found


def unbind(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    place, shape = placed(args[0]), list(args[0].shape)
    assert place is not None
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(shape))
    if dim == place.dim:
        return NO
    return LocalRule(args, kwargs, place.at(place.dim - (dim < place.dim)))


def select(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    outcome = unbind((args[0], argument(args, kwargs, 1, "dim")), {}, workers)
    return outcome if isinstance(outcome, RuleRefusal) else LocalRule(args, kwargs, outcome.out)


def stretch(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`slice`, as a traced model has `tensor[a:b]`: from `a` to `b` along one dimension."""
    place, shape = placed(args[0]), args[0].shape
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(shape))
    if place is None:
        return NO
    start, end = argument(args, kwargs, 2, "start"), argument(args, kwargs, 3, "end")
    every = not start and (end is None or end >= place.size) and argument(args, kwargs, 4, "step", 1) == 1
    return LocalRule(args, kwargs, place) if dim != place.dim or every else NO


def take(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`tensor[…]` with numbers, slices, None and an ellipsis."""
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    place = placed(tensor)
    if place is None or not all(
        one is None or one is Ellipsis or isinstance(one, slice) or (isinstance(one, int) and not isinstance(one, bool))
        for one in index
    ):
        return NO
    used = sum(one is not None and one is not Ellipsis for one in index)
    where = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = [*index[:where], *[slice(None)] * (len(tensor.shape) - used), *index[where + 1 :]]
    dim = at = 0
    for number, one in enumerate(full):
        if one is None:
            at += 1
            continue
        if dim == place.dim:
            if not (isinstance(one, slice) and one.indices(place.size) == (0, place.size, 1)):
                return NO
            full[number] = slice(None)
            return LocalRule((tensor, tuple(full)), kwargs, place.at(at))
        dim += 1
        at += isinstance(one, slice)
    return NO


def cat(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    tensors = argument(args, kwargs, 0, "tensors")
    places = [placed(tensor) for tensor in tensors]
    first = places[0]
    dims = len(tensors[0].shape)
    dim = dimension(argument(args, kwargs, 1, "dim", 0), dims)
    if first is None or any(place is None or place.dim != first.dim for place in places):
        return NO
    known = [place for place in places if place is not None]
    if dim == first.dim:
        return LocalRule(args, kwargs, Placement(dim, tuple(block for place in known for block in place.blocks)))
    return LocalRule(args, kwargs, first) if all(place == first for place in known) else NO


def stack(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    tensors = argument(args, kwargs, 0, "tensors")
    first = placed(tensors[0])
    if first is None or any(placed(tensor) != first for tensor in tensors):
        return NO
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(tensors[0].shape) + 1)
    return LocalRule(args, kwargs, first.at(first.dim + (dim <= first.dim)))


def elsewhere(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """Something is done along given dimensions: fine along all but the one that is cut."""
    place, dims = placed(args[0]), len(args[0].shape)
    name = next((name for name in ("dim", "dims", "axis") if name in kwargs), "dim")
    given = args[1:] if len(args) > 2 else argument(args, kwargs, 1, name)
    if place is None or given is None:
        return NO
    along = [given] if isinstance(given, int) else given
    return NO if place.dim in {dimension(dim, dims) for dim in along} else LocalRule(args, kwargs, place)


RULES = {
    "view": view,
    "reshape": view,
    "view_as": view_as,
    "reshape_as": view_as,
    "flatten": flatten,
    "unflatten": unflatten,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "t": last_two,
    "T": reversed_dims,
    "mT": last_two,
    "permute": permute,
    "expand": expand,
    "expand_as": expand,
    "split": split,
    "split_with_sizes": split,
    "chunk": chunk,
    "unbind": unbind,
    "select": select,
    "slice": stretch,
    "__getitem__": take,
    "cat": cat,
    "concat": cat,
    "stack": stack,
    "flip": elsewhere,
}
