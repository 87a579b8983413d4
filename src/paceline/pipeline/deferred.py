"""What a split model returns: a tensor whose values are not there yet.

It knows its shape, and remembers what is done with it. `loss.backward()` then has the whole of the way from the model's
output to the loss, and applies it to every microbatch where the output is made. Asking for a value makes it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError

Tensor = torch.Tensor
_kind: Any = torch.Tensor
"""The class itself, whose attributes are descriptors."""


class DeferredRun(Protocol):
    """One pass of a batch through the split model."""

    def backward(self, loss: Deferred) -> None:
        """Make all gradients."""

    def value(self, of: Deferred) -> Tensor:
        """Its value, on every worker of the replica."""

    @property
    def over(self) -> bool:
        """Whether its backward pass is done."""


class Autocast:
    """The state of autocast at some moment, to be entered again."""

    def __init__(self) -> None:
        self.on = torch.is_autocast_enabled("cpu")
        self.dtype = torch.get_autocast_dtype("cpu")

    @property
    def key(self) -> tuple[bool, torch.dtype]:
        return (self.on, self.dtype if self.on else torch.float32)

    def again(self) -> contextlib.AbstractContextManager[Any]:
        if self.on == torch.is_autocast_enabled("cpu") and not self.on:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.dtype, enabled=self.on)


class Deferred(torch.Tensor):
    """A value that is known by how it is made: by the model (its `number`th result), or by a function of others."""

    run: DeferredRun
    number: int
    function: Callable[..., Any] | None
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    place: int
    """Of several that the function returns, which; below 0 if it is one."""
    autocast: Autocast
    outline: Tensor
    """Its shape and dtype, on the meta device."""
    known: Tensor | None
    """The value, once it is there."""
    leaves: list[Deferred] | None
    """Those among its arguments, once somebody has asked for them; and its arguments by name."""
    named: dict[str, Any] | None

    @staticmethod
    def made(run: DeferredRun, outline: Tensor, number: int) -> Deferred:
        return Deferred._new(run, outline, number, None, (), {}, -1)

    @staticmethod
    def _new(
        run: DeferredRun,
        outline: Tensor,
        number: int,
        function: Callable[..., Any] | None,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        place: int,
    ) -> Deferred:
        new: Any = torch.Tensor._make_wrapper_subclass(
            Deferred, outline.shape, dtype=outline.dtype, device=torch.device("cpu"), requires_grad=False
        )
        new.run, new.outline, new.number, new.function = run, outline, number, function
        new.arguments, new.options, new.place, new.known = arguments, options, place, None
        new.autocast = Autocast()
        new.leaves = new.named = None
        made: Deferred = new
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _BACKWARD:
            loss, gradient = args[0], (args[1:2] or (options.get("gradient"),))[0]
            if gradient is not None:
                raise UsageError("backward of a split model's loss takes no gradient; multiply the loss by it instead")
            loss.run.backward(loss)
            return None
        if func in _FORCING or name in _FORCING_NAMES:
            plain_args, plain_options = pytree.tree_map_only(Deferred, worth, (args, options))
            return func(*plain_args, **plain_options)
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        if func == _kind.requires_grad.__get__:
            return args[0].outline.is_floating_point()
        if name.endswith("_") and not name.endswith("__"):
            raise UsageError(f"'{name}' changes a split model's output in place; use '{name[:-1]}'")
        leaves = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Deferred)]
        if all(leaf.run.over or leaf.known is not None for leaf in leaves):
            plain_args, plain_options = pytree.tree_map_only(Deferred, worth, (args, options))
            return func(*plain_args, **plain_options)
        args, options = pytree.tree_map_only(Deferred, _settled, (args, options))
        return _recorded(func, name, args, options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only reached by what goes around torch's functions."""
        raise UsageError(f"'{func}' needs the values of a split model's output, which are not there yet")


def _recorded(func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Remember what is done; only the shape of what comes of it is found out."""
    leaves = pytree.tree_leaves((args, options))
    runs = {id(leaf.run): leaf.run for leaf in leaves if isinstance(leaf, Deferred)}
    if len(runs) > 1:
        raise UsageError(
            "the outputs of two calls of a split model meet in one computation; it can be called once per backward "
            "pass: give it both inputs at once"
        )
    if any(isinstance(leaf, Tensor) and not isinstance(leaf, Deferred) and leaf.requires_grad for leaf in leaves):
        raise UsageError(
            "the loss uses parameters besides the split model's output, and no worker has all of them; for a penalty "
            "on weights use the optimizer's weight_decay"
        )
    if any(isinstance(leaf, FakeTensor) for leaf in leaves):
        raise UsageError(
            "the loss uses a value that was kept when the model was traced, by a forward hook perhaps, and that has no "
            "numbers; let the model return it"
        )
    try:
        result = _outlined(func, args, options)
    except NotImplementedError:
        if any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool and not isinstance(leaf, Deferred) for leaf in leaves
        ):
            raise UsageError(
                "the loss picks values of a split model's output by a mask, which lets microbatches have different "
                "numbers of them; let it ignore the others instead: by ignore_index, or by weights that are 0 there"
            ) from None
        raise UsageError(
            f"'{name}' of a split model's output depends on its values, which are not there before loss.backward(); "
            "do it after that, or under torch.no_grad()"
        ) from None
    (run,) = runs.values()
    if isinstance(result, Tensor):
        return Deferred._new(run, result, 0, func, args, options, -1)
    if isinstance(result, tuple | list) and any(isinstance(one, Tensor) for one in result):
        made = [Deferred._new(run, one, 0, func, args, options, place) for place, one in enumerate(result)]
        # Also of those that have names, as a sort has.
        return type(result)(made) if type(result).__module__ in ("builtins", "torch.return_types") else tuple(made)
    return result


_shapes: dict[Any, Any] = {}
"""What functions give, by what they are given: every step asks for the same."""


def _outlined(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a function as far as it can be known without values: shapes and dtypes, on the meta device."""
    leaves, spec = pytree.tree_flatten((args, options))
    facts = tuple(
        (leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else (type(leaf), leaf)
        for leaf in (leaf.outline if isinstance(leaf, Deferred) else leaf for leaf in leaves)
    )
    autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype())
    try:
        key = (func, facts, spec, autocast)
        known = key in _shapes
    except TypeError:  # an argument that cannot be looked up
        key, known = None, False
    if known:
        return _shapes[key]
    outlines = pytree.tree_map_only(Tensor, _outline, (args, options))
    try:
        result = func(*outlines[0], **outlines[1])
    except RuntimeError as error:
        if "item()" not in str(error):  # it looks whether its arguments are allowed, which those without values are not
            raise
        made_up = pytree.tree_map_only(Tensor, _ones, (args, options))
        result = pytree.tree_map_only(Tensor, _outline, func(*made_up[0], **made_up[1]))
    if key is not None and len(_shapes) < 10_000:
        _shapes[key] = result
    return result


def _outline(tensor: Tensor) -> Tensor:
    return tensor.outline if isinstance(tensor, Deferred) else tensor.detach().to("meta")


def _ones(tensor: Tensor) -> Tensor:
    outline = _outline(tensor)
    return torch.ones(outline.shape, dtype=outline.dtype)


def _settled(value: Deferred) -> Tensor:
    """The value itself, if the run is over that it belongs to: what is summed over steps must not keep them all."""
    return worth(value) if value.run.over or value.known is not None else value


def worth(value: Deferred) -> Tensor:
    """The value on this worker, made if need be."""
    if value.known is None:
        inner = leaves_of(value)
        if value.function is not None and inner and all(leaf.known is not None for leaf in inner):
            value.known = replay(value, worth, lambda tensor: tensor)
        else:
            value.known = value.run.value(value)
    return value.known


def replay(
    value: Deferred,
    of: Callable[[Deferred], Tensor],
    other: Callable[[Tensor], Tensor],
    instead: dict[str, Any] | None = None,
) -> Tensor:
    """Do what was remembered of one value, with `of` those that it was made of, and `other` the other tensors.

    instead: arguments that are to be other than they were.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Deferred):
            return of(leaf)
        return other(leaf) if isinstance(leaf, Tensor) else leaf

    arguments, options = value.arguments, value.options
    if instead:
        arguments, options = (), {**bound(value), **instead}
    args, options = pytree.tree_map(changed, (arguments, options))
    assert value.function is not None
    with value.autocast.again():
        result = value.function(*args, **options)
    made: Tensor = result if value.place < 0 else result[value.place]
    return made


_BACKWARD = {torch.Tensor.backward}
_FORCING = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
}
_FORCING_NAMES = {
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__complex__",
    "is_nonzero",
    "equal",
    "allclose",
    "isclose",
}
_PLAIN = {
    _kind.shape.__get__,
    _kind.dtype.__get__,
    _kind.device.__get__,
    _kind.ndim.__get__,
    _kind.layout.__get__,
    _kind.is_sparse.__get__,
    _kind.is_leaf.__get__,
    _kind.grad_fn.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
}


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def bound(of: Deferred) -> dict[str, Any]:
    """The function's arguments by name, with defaults."""
    if of.named is None:
        try:
            given = _signature(of.function).bind(*of.arguments, **of.options)
            given.apply_defaults()
            of.named = given.arguments
        except (TypeError, ValueError):
            of.named = {}
    return of.named


def leaves_of(of: Deferred) -> list[Deferred]:
    """What a value was made of that is deferred as well."""
    if of.leaves is None:
        every = pytree.tree_leaves((of.arguments, of.options))
        of.leaves = [leaf for leaf in every if isinstance(leaf, Deferred)]
    return of.leaves
