"""Deferred outputs of a split model: tensors that have a shape but no values yet.

A deferred tensor records the operations applied to it. `loss.backward()` so has the whole computation from the model's
output to the loss, and applies it to each microbatch on the worker that has the output. Reading a value computes it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.tensor_parallel.partial_tensor import name_of

if TYPE_CHECKING:
    from paceline.pipeline.batch_run import BatchRun

Tensor = torch.Tensor
_FORCING = """item tolist numpy equal allclose isclose is_nonzero __repr__ __format__ __array__ __deepcopy__
__reduce_ex__ __float__ __int__ __bool__ __index__ __complex__"""
FORCING = frozenset(_FORCING.split())
"""Functions that need values."""
_METADATA = "shape dtype device ndim layout is_sparse is_leaf grad_fn size dim numel __len__ is_floating_point"
METADATA = frozenset(_METADATA.split())
"""Functions that read what a deferred tensor has without values."""


class Autocast:
    """The state of autocast when this was created."""

    def __init__(self) -> None:
        self.on = torch.is_autocast_enabled("cpu")
        self.dtype = torch.get_autocast_dtype("cpu")

    @property
    def key(self) -> tuple[bool, torch.dtype]:
        return (self.on, self.dtype if self.on else torch.float32)

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        if self.on == torch.is_autocast_enabled("cpu") and not self.on:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.dtype, enabled=self.on)


class Deferred(torch.Tensor):
    """A result of the model, or of a recorded function of other deferred tensors."""

    run: BatchRun
    result_index: int
    """Index among the model's results, if it is one."""
    function: Callable[..., Any] | None
    """The recorded function; None for a result of the model."""
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    item_index: int
    """Index among the function's results; below 0 if it returns one tensor."""
    autocast: Autocast
    meta: Tensor
    """A tensor of its shape and dtype on the meta device."""
    known: Tensor | None
    """The value, once it is computed."""
    inputs: list[Deferred] | None
    """Cache of `deferred_inputs`."""
    named: dict[str, Any] | None
    """Cache of `bound_arguments`."""

    @staticmethod
    def result(run: BatchRun, meta: Tensor, index: int) -> Deferred:
        """The model's result of this index."""
        new: Any = torch.Tensor._make_wrapper_subclass(
            Deferred, meta.shape, dtype=meta.dtype, device=torch.device("cpu"), requires_grad=False
        )
        new.run, new.meta, new.result_index, new.autocast = run, meta, index, Autocast()
        new.arguments, new.options, new.item_index = (), {}, -1
        new.function = new.known = new.inputs = new.named = None
        deferred: Deferred = new
        return deferred

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = name_of(func)
        if func == torch.Tensor.backward:
            loss, gradient = args[0], (args[1:2] or (options.get("gradient"),))[0]
            if gradient is not None:
                raise UsageError("backward of a split model's loss takes no gradient; multiply the loss by it instead")
            loss.run.backward(loss)
            return None
        if name == "backward":
            raise UsageError(
                "torch.autograd.backward takes no losses of a model that is cut into stages; add them, and call "
                "loss.backward()"
            )
        if func is torch.autograd.grad:
            raise UsageError(
                "torch.autograd.grad cannot go through a model that is cut into stages; call loss.backward() and read "
                ".grad, or use all-reduce"
            )
        if name in FORCING:
            return _applied(func, args, options)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        if name == "requires_grad":
            return args[0].meta.is_floating_point()
        if name.endswith("_") and not name.endswith("__"):
            raise UsageError(f"'{name}' changes a split model's output in place; use '{name[:-1]}'")
        leaves = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Deferred)]
        if all(_is_final(leaf) for leaf in leaves):
            return _applied(func, args, options)
        args, options = pytree.tree_map_only(Deferred, _settled, (args, options))
        return _recorded(func, name, args, options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached only by calls that bypass __torch_function__."""
        raise UsageError(f"'{func}' needs the values of a split model's output, which are not computed yet")


def _applied(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a function on the values of its deferred arguments."""
    plain_args, plain_options = pytree.tree_map_only(Deferred, materialize, (args, options))
    return func(*plain_args, **plain_options)


def _recorded(func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Records a function call; only the shapes and dtypes of its results are computed."""
    leaves = pytree.tree_leaves((args, options))
    runs = {id(leaf.run): leaf.run for leaf in leaves if isinstance(leaf, Deferred)}
    if len(runs) > 1:
        raise UsageError(
            "one computation uses the outputs of two calls of a split model, which can be called once per backward "
            "pass; give it both inputs at once"
        )
    if any(isinstance(leaf, FakeTensor) for leaf in leaves):
        raise UsageError(
            "the loss uses a tensor that was stored while the model was traced, perhaps by a forward hook, and has no "
            "values; let the model return it"
        )
    if any(isinstance(leaf, Tensor) and not isinstance(leaf, Deferred) and leaf.requires_grad for leaf in leaves):
        raise UsageError(
            "the loss uses parameters besides the split model's output, and no worker has all of them; for a penalty "
            "on weights use the optimizer's weight_decay"
        )
    try:
        result = _meta_result(func, args, options)
    except NotImplementedError:
        if any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool and not isinstance(leaf, Deferred) for leaf in leaves
        ):
            raise UsageError(
                "the loss selects values of a split model's output by a mask, which gives each microbatch another "
                "number of them; ignore the others instead, by ignore_index or by weights of 0"
            ) from None
        raise UsageError(
            f"'{name}' of a split model's output depends on its values, which do not exist before loss.backward(); "
            "call it after that, or under torch.no_grad()"
        ) from None
    (run,) = runs.values()

    def deferred(meta: Tensor, item: int) -> Deferred:
        new = Deferred.result(run, meta, 0)
        new.function, new.arguments, new.options, new.item_index = func, args, options, item
        return new

    if isinstance(result, Tensor):
        return deferred(result, -1)
    if isinstance(result, tuple | list) and any(isinstance(one, Tensor) for one in result):
        items = [deferred(one, item) for item, one in enumerate(result)]
        # Also for named tuples, such as the result of a sort.
        return type(result)(items) if type(result).__module__ in ("builtins", "torch.return_types") else tuple(items)
    return result


_meta_results: dict[Any, Any] = {}
"""Cache of `_meta_result`: every step makes the same calls."""


def _meta_result(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a function on meta tensors: shapes and dtypes without values."""
    leaves, spec = pytree.tree_flatten((args, options))
    facts = tuple(
        (leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else (type(leaf), leaf)
        for leaf in (leaf.meta if isinstance(leaf, Deferred) else leaf for leaf in leaves)
    )
    autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype())
    try:
        key = (func, facts, spec, autocast)
        known = key in _meta_results
    except TypeError:  # an argument that cannot be hashed
        key, known = None, False
    if known:
        return _meta_results[key]
    meta_args, meta_options = pytree.tree_map(_on_meta, (args, options))
    try:
        result = meta_args[0] if name_of(func) == "cpu" else func(*meta_args, **meta_options)
    except RuntimeError as error:
        if "item()" not in str(error):  # the function checks its arguments' values
            raise
        ones_args, ones_options = pytree.tree_map_only(Tensor, _ones, (args, options))
        result = pytree.tree_map_only(Tensor, _meta, func(*ones_args, **ones_options))
    if key is not None and len(_meta_results) < 10_000:
        _meta_results[key] = result
    return result


def _on_meta(leaf: Any) -> Any:
    """An argument as it must be where there are no values: `output.to(device)` has nothing to copy."""
    if isinstance(leaf, Tensor):
        return _meta(leaf)
    to_device = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu")
    return torch.device("meta") if to_device else leaf


def _meta(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, Deferred) else tensor.detach().to("meta")


def _ones(tensor: Tensor) -> Tensor:
    meta = _meta(tensor)
    return torch.ones(meta.shape, dtype=meta.dtype)


def _settled(value: Deferred) -> Tensor:
    """The value itself once its run is finished: a sum over steps must not keep every step's run alive."""
    return materialize(value) if _is_final(value) else value


def _is_final(value: Deferred) -> bool:
    """True if its value can be used; one that the script has asked for may still become part of the loss."""
    return value.run.finished or (value.known is not None and not torch.is_grad_enabled())


def materialize(value: Deferred) -> Tensor:
    """The value, computed if it is not known yet; collective, like every call of the model."""
    if value.known is None:
        inner = deferred_inputs(value)
        if value.function is not None and inner and all(leaf.known is not None for leaf in inner):
            value.known = replay(value, materialize, lambda tensor: tensor)
        else:
            value.known = value.run.value(value)
    return value.known


def replay(
    value: Deferred,
    of: Callable[[Deferred], Tensor],
    other: Callable[[Tensor], Tensor],
    instead: dict[str, Any] | None = None,
) -> Tensor:
    """Calls a value's recorded function again, with `of` applied to its deferred inputs and `other` to other tensors.

    instead: values for some of its arguments, by name.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Deferred):
            return of(leaf)
        return other(leaf) if isinstance(leaf, Tensor) else leaf

    arguments, options = value.arguments, value.options
    if instead:
        arguments, options = (), {**bound_arguments(value), **instead}
    args, options = pytree.tree_map(changed, (arguments, options))
    assert value.function is not None
    with value.autocast.enter():
        result = value.function(*args, **options)
    selected: Tensor = result if value.item_index < 0 else result[value.item_index]
    return selected


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def bound_arguments(of: Deferred) -> dict[str, Any]:
    """The recorded function's arguments by name, defaults included."""
    if of.named is None:
        try:
            bound = _signature(of.function).bind(*of.arguments, **of.options)
            bound.apply_defaults()
            of.named = bound.arguments
        except (TypeError, ValueError):
            of.named = {}
    return of.named


def deferred_inputs(of: Deferred) -> list[Deferred]:
    """The deferred tensors among the recorded function's arguments."""
    if of.inputs is None:
        leaves = pytree.tree_leaves((of.arguments, of.options))
        of.inputs = [leaf for leaf in leaves if isinstance(leaf, Deferred)]
    return of.inputs
