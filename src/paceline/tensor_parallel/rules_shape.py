"""Rules for operations that only rearrange elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import (
    REFUSED,
    LocalRule,
    Rule,
    RuleRefusal,
    RuleResult,
    argument,
    dimension,
    is_tensor,
    placement_of,
)


def _sizes(args: Sequence[Any], kwargs: dict[str, Any], name: str = "shape") -> list[int]:
    """Sizes that are given as one sequence, or one by one."""
    sizes: Any = args[1:] if len(args) > 1 else (kwargs[name],)
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


def _resolved(sizes: Sequence[int], total: int) -> list[int]:
    known = math.prod(size for size in sizes if size != -1)
    return [total // max(1, known) if size == -1 else size for size in sizes]


def view(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    if "dtype" in kwargs or (len(args) > 1 and not isinstance(args[1], (int, tuple, list))):
        return REFUSED
    return reshape_to(args[0], _sizes(args, kwargs), workers)


def view_as(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    return reshape_to(args[0], list(args[1].shape), workers)


def flatten(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    shape = list(args[0].shape)
    first = dimension(argument(args, kwargs, 1, "start_dim", 0), len(shape))
    last = dimension(argument(args, kwargs, 2, "end_dim", -1), len(shape))
    return reshape_to(args[0], [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]], workers)


def unflatten(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    shape = list(args[0].shape)
    dim = dimension(argument(args, kwargs, 1, "dim"), len(shape))
    sizes = _resolved(argument(args, kwargs, 2, "sizes"), shape[dim])
    return reshape_to(args[0], [*shape[:dim], *sizes, *shape[dim + 1 :]], workers)


def squeeze(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    shape = list(args[0].shape)
    dims = argument(args, kwargs, 1, "dim")
    wanted = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dimension(dim, len(shape)) for dim in wanted}
    return reshape_to(args[0], [size for dim, size in enumerate(shape) if not (dim in gone and size == 1)], workers)


def unsqueeze(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    shape = list(args[0].shape)
    dim = dimension(argument(args, kwargs, 1, "dim"), len(shape) + 1)
    return reshape_to(args[0], [*shape[:dim], 1, *shape[dim:]], workers)


def reshape_to(tensor: Any, sizes: list[int], workers: int) -> RuleResult:
    """A change of shape: each worker reshapes its shard."""
    placement = placement_of(tensor)
    assert placement is not None
    old = list(tensor.shape)
    sizes = _resolved(sizes, math.prod(old))
    found = moved_placement(old, sizes, placement, workers)
    if isinstance(found, RuleRefusal):
        return found
    local = list(sizes)
    local[found.dim] //= workers
    # Not `view`: a shard may have another memory layout than the whole tensor.
    return LocalRule((tensor, local), {}, found, call=torch.reshape)


def moved_placement(old: list[int], new: list[int], placement: Placement, workers: int) -> Placement | RuleRefusal:
    """The placement after a change of shape that keeps the order of elements."""
    before = math.prod(old[: placement.dim])
    equal = len(set(placement.blocks)) == 1
    passed = 1
    for dim, size in enumerate(new):
        if passed == before and size == old[placement.dim]:
            return placement.at(dim)
        passed *= size
    if not equal:
        return REFUSED
    # Equal blocks are like a dimension of their own before the one that is cut.
    outer = before * len(placement.blocks)
    passed = 1
    preferred: tuple[int, ...] | None = None
    for dim, size in enumerate(new):
        if passed == outer and size > 1:
            if size % workers == 0:
                return Placement(dim, (size,))
            if len(placement.blocks) == 1 and placement.size % size == 0:
                preferred = (placement.size // size,) * size
            break
        inside = outer // passed if outer % passed == 0 else 0
        if inside > 1 and size > inside and size % inside == 0 and (size // inside) % workers == 0:
            # The new dimension includes preceding ones; each of their indices is a block.
            return Placement(dim, (size // inside,) * inside)
        passed *= size
    return RuleRefusal(preferred)


def transpose(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    placement, dims = args[0].placement, len(args[0].shape)
    names = ("dim0", "dim1") if "dim0" in kwargs else ("axis0", "axis1")
    first = dimension(argument(args, kwargs, 1, names[0]), dims)
    second = dimension(argument(args, kwargs, 2, names[1]), dims)
    return LocalRule(args, kwargs, placement.at({first: second, second: first}.get(placement.dim, placement.dim)))


def last_two(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`t`, `mT`, `adjoint`."""
    placement, dims = args[0].placement, len(args[0].shape)
    return LocalRule(
        args, kwargs, placement.at({dims - 1: dims - 2, dims - 2: dims - 1}.get(placement.dim, placement.dim))
    )


def reversed_dims(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`T`, which reverses all dimensions."""
    return last_two(args, kwargs, workers) if len(args[0].shape) == 2 else REFUSED


def permute(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    placement, dims = args[0].placement, len(args[0].shape)
    order = [dimension(dim, dims) for dim in _sizes(args, kwargs, "dims")]
    return LocalRule(args, kwargs, placement.at(order.index(placement.dim)))


def expand(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    placement, old = args[0].placement, list(args[0].shape)
    new = list(args[1].shape) if is_tensor(args[1]) else _sizes(args, kwargs, "size")
    dim = placement.dim + len(new) - len(old)
    if new[dim] not in (-1, placement.size):
        return REFUSED
    new[dim] = -1
    return LocalRule((args[0], new), {}, placement.at(dim), call=torch.Tensor.expand)


def split(args: Sequence[Any], kwargs: dict[str, Any], workers: int, chunks: bool = False) -> RuleResult:
    """`split` into pieces of given sizes, or into a number of chunks."""
    placement, shape = args[0].placement, list(args[0].shape)
    dim = dimension(argument(args, kwargs, 2, "dim", 0), len(shape))
    sections = args[1] if len(args) > 1 else next(value for name, value in kwargs.items() if name != "dim")
    if dim != placement.dim:
        return LocalRule(args, kwargs, placement)
    size = -(-placement.size // sections) if chunks else sections
    if isinstance(size, int):
        sizes = [min(size, placement.size - start) for start in range(0, placement.size, size)]
    else:
        sizes = list(size)
    found = _blocks_of(placement.blocks, sizes)
    if found is None:
        return RuleRefusal(tuple(sizes) if all(one % workers == 0 for one in sizes) else None)
    local = [one // workers for one in sizes]
    return LocalRule((args[0], local, dim), {}, [Placement(dim, blocks) for blocks in found], call=torch.split)


def _blocks_of(blocks: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The blocks of each piece; None if a piece ends inside a block."""
    left, found = list(blocks), []
    for size in sizes:
        own: list[int] = []
        while left and sum(own) < size:
            own.append(left.pop(0))
        if sum(own) != size:
            return None
        found.append(tuple(own))
    return found


def unbind(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    placement, shape = args[0].placement, list(args[0].shape)
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(shape))
    if dim == placement.dim:
        return REFUSED
    return LocalRule(args, kwargs, placement.at(placement.dim - (dim < placement.dim)))


def select(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    outcome = unbind((args[0], argument(args, kwargs, 1, "dim")), {}, workers)
    return outcome if isinstance(outcome, RuleRefusal) else LocalRule(args, kwargs, outcome.out)


def slice_range(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`slice`, the form of `tensor[a:b]` in a traced model."""
    placement, shape = placement_of(args[0]), args[0].shape
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(shape))
    if placement is None:
        return REFUSED
    start, end = argument(args, kwargs, 2, "start"), argument(args, kwargs, 3, "end")
    every = not start and (end is None or end >= placement.size) and argument(args, kwargs, 4, "step", 1) == 1
    return LocalRule(args, kwargs, placement) if dim != placement.dim or every else REFUSED


def getitem(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`tensor[…]` with numbers, slices, None and an ellipsis."""
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    placement = placement_of(tensor)
    if placement is None or not all(
        one is None or one is Ellipsis or isinstance(one, slice) or (isinstance(one, int) and not isinstance(one, bool))
        for one in index
    ):
        return REFUSED
    used = sum(one is not None and one is not Ellipsis for one in index)
    where = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = [*index[:where], *[slice(None)] * (len(tensor.shape) - used), *index[where + 1 :]]
    dim = at = 0
    for number, one in enumerate(full):
        if one is None:
            at += 1
            continue
        if dim == placement.dim:
            if not (isinstance(one, slice) and one.indices(placement.size) == (0, placement.size, 1)):
                return REFUSED
            full[number] = slice(None)
            return LocalRule((tensor, tuple(full)), kwargs, placement.at(at))
        dim += 1
        at += isinstance(one, slice)
    return REFUSED


def cat(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    # An empty tensor adds nothing: a key-value cache begins with one.
    tensors = [one for one in argument(args, kwargs, 0, "tensors") if tuple(one.shape) != (0,)]
    placements = [placement_of(tensor) for tensor in tensors]
    first = placements[0]
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(tensors[0].shape))
    if first is None or any(placement is None or placement.dim != first.dim for placement in placements):
        return REFUSED
    known = [placement for placement in placements if placement is not None]
    if dim == first.dim:
        return LocalRule((tensors, dim), {}, Placement(dim, tuple(block for one in known for block in one.blocks)))
    return LocalRule((tensors, dim), {}, first) if all(placement == first for placement in known) else REFUSED


def stack(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    tensors = argument(args, kwargs, 0, "tensors")
    first = placement_of(tensors[0])
    if first is None or any(placement_of(tensor) != first for tensor in tensors):
        return REFUSED
    dim = dimension(argument(args, kwargs, 1, "dim", 0), len(tensors[0].shape) + 1)
    return LocalRule(args, kwargs, first.at(first.dim + (dim <= first.dim)))


def along_dims(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """Functions along given dimensions, of which none may be cut."""
    placement, dims = placement_of(args[0]), len(args[0].shape)
    name = next((name for name in ("dim", "dims", "axis") if name in kwargs), "dim")
    dim_argument = args[1:] if len(args) > 2 else argument(args, kwargs, 1, name)
    if placement is None or dim_argument is None:
        return REFUSED
    along = [dim_argument] if isinstance(dim_argument, int) else dim_argument
    return REFUSED if placement.dim in {dimension(dim, dims) for dim in along} else LocalRule(args, kwargs, placement)


RULES: dict[str, Rule] = {
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
    "chunk": partial(split, chunks=True),
    "unbind": unbind,
    "select": select,
    "slice": slice_range,
    "__getitem__": getitem,
    "cat": cat,
    "concat": cat,
    "stack": stack,
    "flip": along_dims,
}
