"""A sharded tensor that behaves like the whole one.

It works above autograd: an operation on it becomes the same operation on this worker's shard, which autograd records
like any other, so the backward pass costs nothing extra. If an operation cannot be computed on shards, the whole tensor
is gathered first. The shape is that of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from paceline.errors import UsageError
from paceline.tensor_parallel import rules_math, rules_shape
from paceline.tensor_parallel.comm_functions import ShardGroup, all_gather, replicate, take_shard
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import LocalRule, Replicated, Rule, Sharded

RULES: dict[str, Rule] = {**rules_shape.RULES, **rules_math.RULES}
"""By the name of a function, without the trailing underscore of its in-place form."""
_METADATA = """shape size dim ndim dtype device layout numel nelement requires_grad is_leaf is_cpu is_cuda is_sparse
is_complex is_floating_point is_quantized is_nested is_meta names element_size itemsize nbytes __len__ __hash__
is_inference is_conj is_neg is_signed ndimension get_device is_contiguous stride is_mkldnn storage_offset _is_view
is_same_size"""
METADATA = frozenset(_METADATA.split())
"""Functions that read a tensor's metadata and compute nothing."""


class PartialTensor(torch.Tensor):
    """One worker's shard of a tensor."""

    local: torch.Tensor
    """The shard."""
    placement: Placement
    group: ShardGroup

    @staticmethod
    def of(local: torch.Tensor, placement: Placement, group: ShardGroup) -> PartialTensor:
        sizes = list(local.shape)
        sizes[placement.dim] = placement.size
        wrapper = torch.Tensor._make_wrapper_subclass(
            PartialTensor, sizes, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        wrapper.local, wrapper.placement, wrapper.group = local, placement, group
        partial: PartialTensor = wrapper
        return partial

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered from all workers."""
        known: tuple[int, torch.Tensor] | None = self.__dict__.get("_full")
        version = 0 if self.local.is_inference() else self.local._version
        if known is None or known[0] != version or known[1].requires_grad != self.local.requires_grad:
            known = (version, all_gather(self.local, self.placement, self.group))
            self.__dict__["_full"] = known
        return known[1]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA:
                return func(*args, **kwargs)
            if name == "sym_size":  # the form of `size` in a traced model
                return args[0].shape[args[1]]
            in_place = name[-1] == "_" and name[-2:] != "__"
            rule = RULES.get(name) or (RULES.get(name[:-1]) if in_place else None)
            if rule is not None:
                outcome = rule(args, kwargs, _group_of(args, kwargs).size)
                # A tensor that is changed in place must be sharded already.
                if isinstance(outcome, LocalRule) and not (in_place and type(args[0]) is not PartialTensor):
                    return _run(func, outcome, _group_of(args, kwargs), args[0] if in_place else None)
            if func is torch.autograd.grad:
                raise UsageError(
                    "torch.autograd.grad is called on a tensor that is sharded over workers; do not shard the layer "
                    "that it comes from: Tensor(…, plan={'its.name': 'replicated'})"
                )
            if name in ("grad_fn", "_version", "grad"):
                return getattr(args[0].local, name)
            if name in ("__repr__", "__str__"):
                return f"PartialTensor({args[0].local!r}, {args[0].placement})"
            if (in_place or name == "__setitem__") and type(args[0]) is PartialTensor:
                raise UsageError(
                    f"'{name}' changes a sharded tensor in place, which is not supported; do not shard the layer that "
                    "it comes from: Tensor(…, plan={'its.name': 'replicated'})"
                )
            return func(*tree_map(full_tensor, args), **tree_map(full_tensor, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UsageError(
            f"a custom autograd function calls {func} on a sharded tensor; do not shard the layer that it comes from: "
            "Tensor(…, plan={'its.name': 'replicated'})"
        )


_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """Name of a function that torch dispatches; for the getter of a property, the property's name.

    The operators of a traced model have the names of torch's functions, and take the same arguments in the same order.
    """
    name = _names.get(func)
    if name is None:
        name = func._opname if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
        _names[func] = name
    return name


def full_tensor(value: Any) -> Any:
    """The whole tensor of a sharded one; any other value itself."""
    return value.full_tensor() if type(value) is PartialTensor else value


def _group_of(args: Sequence[Any], kwargs: dict[str, Any]) -> ShardGroup:
    for value in (*args, *kwargs.values()):
        if type(value) is PartialTensor:
            return value.group
        if isinstance(value, (list, tuple)):
            for one in value:
                if type(one) is PartialTensor:
                    return one.group
    raise AssertionError("no argument is sharded")


def _run(func: Callable[..., Any], outcome: LocalRule, group: ShardGroup, changed: Any) -> Any:
    args = [_local(value, group) for value in outcome.args]
    kwargs = {name: _local(value, group) for name, value in outcome.kwargs.items()} if outcome.kwargs else {}
    if outcome.random:
        group.swap_random()
    try:
        result = (outcome.call or func)(*args, **kwargs)
    finally:
        if outcome.random:
            group.swap_random()
    if changed is not None:
        changed.local = result
        return changed
    if isinstance(result, torch.Tensor):
        assert isinstance(outcome.out, Placement)
        return PartialTensor.of(result, outcome.out, group)
    if isinstance(result, (tuple, list)):
        out = outcome.out
        placements = [out] * len(result) if isinstance(out, Placement) else out
        return type(result)(
            *[tuple(_wrapped(value, placement, group) for value, placement in zip(result, placements, strict=True))]
        )
    return result


def _wrapped(value: Any, placement: Placement, group: ShardGroup) -> Any:
    return PartialTensor.of(value, placement, group) if isinstance(value, torch.Tensor) else value


def _local(value: Any, group: ShardGroup) -> Any:
    kind = type(value)
    if kind is PartialTensor:
        return value.local
    if kind is Sharded:
        return take_shard(value.tensor, value.placement, group)
    if kind is Replicated:
        return replicate(value.tensor, group)
    if isinstance(value, list):
        return [_local(one, group) for one in value]
    if kind is tuple:
        return tuple(_local(one, group) for one in value)
    return value
