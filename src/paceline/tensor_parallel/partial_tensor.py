"""A tensor of which each worker has a part, and which behaves as the whole would.

It stands above autograd: an operation on it becomes the same operation on this worker's part, of which autograd then
knows as of any other, so the backward pass costs nothing extra. Where an operation can not be done in parts, the whole
is gathered first. Shapes are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from paceline.errors import UsageError
from paceline.tensor_parallel import rules_math, rules_shape
from paceline.tensor_parallel.comm_functions import ShardSpace, copied, gathered, sliced
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import LocalRule, Replicated, Rule, Sharded

RULES: dict[str, Rule] = {**rules_shape.RULES, **rules_math.RULES}
"""By the name of a function, without the underscore at its end that says that it changes its argument."""
_ABOUT = """shape size dim ndim dtype device layout numel nelement requires_grad is_leaf is_cpu is_cuda is_sparse
is_complex is_floating_point is_quantized is_nested is_meta names element_size itemsize nbytes __len__ __hash__
is_inference is_conj is_neg is_signed ndimension get_device is_contiguous stride is_mkldnn storage_offset _is_view
is_same_size"""
ABOUT = frozenset(_ABOUT.split())
"""What is asked about a tensor, and not computed with it."""


class PartialTensor(torch.Tensor):
    """One worker's part, in the place of the whole."""

    local: torch.Tensor
    placed: Placement
    space: ShardSpace

    @staticmethod
    def of(local: torch.Tensor, placement: Placement, space: ShardSpace) -> PartialTensor:
        sizes = list(local.shape)
        sizes[placement.dim] = placement.size
        split = torch.Tensor._make_wrapper_subclass(
            PartialTensor, sizes, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        split.local, split.placed, split.space = local, placement, space
        made: PartialTensor = split
        return made

    def whole(self) -> torch.Tensor:
        """All parts together, on every worker."""
        known: tuple[int, torch.Tensor] | None = self.__dict__.get("_whole")
        version = 0 if self.local.is_inference() else self.local._version
        if known is None or known[0] != version or known[1].requires_grad != self.local.requires_grad:
            known = (version, gathered(self.local, self.placed, self.space))
            self.__dict__["_whole"] = known
        return known[1]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ABOUT:
                return func(*args, **kwargs)
            if name == "sym_size":  # how a traced model asks for it
                return args[0].shape[args[1]]
            in_place = name[-1] == "_" and name[-2:] != "__"
            rule = RULES.get(name) or (RULES.get(name[:-1]) if in_place else None)
            if rule is not None:
                outcome = rule(args, kwargs, _space(args, kwargs).size)
                # What is changed must be in parts already.
                if isinstance(outcome, LocalRule) and not (in_place and type(args[0]) is not PartialTensor):
                    return _run(func, outcome, _space(args, kwargs), args[0] if in_place else None)
            if func is torch.autograd.grad:
                raise UsageError(
                    "torch.autograd.grad is asked for the gradient of a tensor of which each worker has a part; let "
                    "the layer that it comes from be whole: Tensor(…, plan={'its.name': 'whole'})"
                )
            if name in ("grad_fn", "_version", "grad"):
                return getattr(args[0].local, name)
            if name in ("__repr__", "__str__"):
                return f"Split({args[0].local!r}, {args[0].placed})"
            if (in_place or name == "__setitem__") and type(args[0]) is PartialTensor:
                raise UsageError(
                    f"'{name}' changes a tensor of which each worker has a part, which cannot be done; let the layer "
                    "that it comes from be whole: Tensor(…, plan={'its.name': 'whole'})"
                )
            return func(*tree_map(whole, args), **tree_map(whole, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UsageError(
            f"a custom autograd function calls {func} on a tensor of which each worker has a part; let the layer that "
            "it comes from be whole: Tensor(…, plan={'its.name': 'whole'})"
        )


_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """What a function that torch calls is known by; of a property, that property's name.

    The operators that a traced model is made of have the names of functions, and take the same in the same order.
    """
    name = _names.get(func)
    if name is None:
        name = func._opname if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
        _names[func] = name
    return name


def whole(value: Any) -> Any:
    """All parts of it together, if it is in parts."""
    return value.whole() if type(value) is PartialTensor else value


def _space(args: Sequence[Any], kwargs: dict[str, Any]) -> ShardSpace:
    for value in (*args, *kwargs.values()):
        if type(value) is PartialTensor:
            return value.space
        if isinstance(value, (list, tuple)):
            for one in value:
                if type(one) is PartialTensor:
                    return one.space
    raise AssertionError("nothing here is in parts")


def _run(func: Callable[..., Any], outcome: LocalRule, space: ShardSpace, changed: Any) -> Any:
    args = [_part(value, space) for value in outcome.args]
    kwargs = {name: _part(value, space) for name, value in outcome.kwargs.items()} if outcome.kwargs else {}
    if outcome.random:
        space.swap_random()
    try:
        result = (outcome.call or func)(*args, **kwargs)
    finally:
        if outcome.random:
            space.swap_random()
    if changed is not None:
        changed.local = result
        return changed
    if isinstance(result, torch.Tensor):
        assert isinstance(outcome.out, Placement)
        return PartialTensor.of(result, outcome.out, space)
    if isinstance(result, (tuple, list)):
        out = outcome.out
        places = [out] * len(result) if isinstance(out, Placement) else out
        return type(result)(
            *[tuple(_wrapped(value, place, space) for value, place in zip(result, places, strict=True))]
        )
    return result


def _wrapped(value: Any, placement: Placement, space: ShardSpace) -> Any:
    return PartialTensor.of(value, placement, space) if isinstance(value, torch.Tensor) else value


def _part(value: Any, space: ShardSpace) -> Any:
    kind = type(value)
    if kind is PartialTensor:
        return value.local
    if kind is Sharded:
        return sliced(value.tensor, value.placement, space)
    if kind is Replicated:
        return copied(value.tensor, space)
    if isinstance(value, list):
        return [_part(one, space) for one in value]
    if kind is tuple:
        return tuple(_part(one, space) for one in value)
    return value
