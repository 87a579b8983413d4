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
from torch.nn import functional
from torch.utils import _pytree as pytree

from paceline.errors import UsageError

Tensor = torch.Tensor
_kind: Any = torch.Tensor
"""The class itself, whose attributes are descriptors."""


class Run(Protocol):
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

    run: Run
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

    @staticmethod
    def made(run: Run, outline: Tensor, number: int) -> Deferred:
        return Deferred._new(run, outline, number, None, (), {}, -1)

    @staticmethod
    def _new(
        run: Run,
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
    try:
        result = _outlined(func, args, options)
    except NotImplementedError:
        raise UsageError(
            f"'{name}' of a split model's output depends on its values, which are not there before loss.backward(); "
            "do it after that, or under torch.no_grad()"
        ) from None
    (run,) = runs.values()
    if isinstance(result, Tensor):
        return Deferred._new(run, result, 0, func, args, options, -1)
    if isinstance(result, tuple | list) and any(isinstance(one, Tensor) for one in result):
        made = [Deferred._new(run, one, 0, func, args, options, place) for place, one in enumerate(result)]
        return type(result)(made) if type(result) in (tuple, list) else tuple(made)
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
    result = func(*outlines[0], **outlines[1])
    if key is not None and len(_shapes) < 10_000:
        _shapes[key] = result
    return result


def _outline(tensor: Tensor) -> Tensor:
    return tensor.outline if isinstance(tensor, Deferred) else tensor.detach().to("meta")


def _settled(value: Deferred) -> Tensor:
    """The value itself, if the run is over that it belongs to: what is summed over steps must not keep them all."""
    return worth(value) if value.run.over or value.known is not None else value


def worth(value: Deferred) -> Tensor:
    """The value on this worker, made if need be."""
    if value.known is None:
        inner = [leaf for leaf in pytree.tree_leaves((value.arguments, value.options)) if isinstance(leaf, Deferred)]
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
        arguments, options = (), {**_bound(value), **instead}
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


# -- the loss of a microbatch, as its share in that of the batch -----------------------------------------------------

_SAME = {
    "rmul": "mul",
    "imul": "mul",
    "radd": "add",
    "iadd": "add",
    "isub": "sub",
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
}
_LINEAR = {"mul", "div", "add", "sub", "rsub", "neg", "float", "double", "to", "type", "clone", "reshape", "view"}
"""What may be done to a scalar of every microbatch and be summed after: it comes to the same."""


def _spoken(function: Any) -> str:
    name = getattr(function, "__name__", str(function)).strip("_")
    return _SAME.get(name, name)


_BY_CLASS = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)


class Shares:
    """How what each microbatch gives to the loss adds up to the loss of the batch."""

    def __init__(self, batch: int, sizes: Sequence[int]) -> None:
        self._batch, self._sizes = batch, sizes
        self._counted: dict[int, Tensor | None] = {}
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def check(self, loss: Deferred) -> None:
        """Refuse a loss that cannot be put together from microbatches; the same on every worker."""
        seen: set[int] = set()
        left = [loss] if len(self._sizes) > 1 else []
        while left:
            of = left.pop()
            if id(of) in seen or of.function is None:
                continue
            seen.add(id(of))
            left += _deferred(of)
            if of.outline.dim():
                continue
            name, scalars = _spoken(of.function), [leaf for leaf in _deferred(of) if not leaf.outline.dim()]
            if len(scalars) < len(_deferred(of)):
                if _reduction(of) is None:
                    raise UsageError(
                        f"the loss takes '{name}' over the whole batch, which cannot be put together from "
                        "microbatches; use a mean, a sum, or one of torch.nn.functional's losses, or write "
                        "microbatches=1"
                    )
                continue
            divided = name == "div" and len(of.arguments) > 1 and isinstance(of.arguments[1], Deferred)
            if name not in _LINEAR or (name in ("mul", "div") and len(scalars) > 1) or divided:
                raise UsageError(
                    f"the loss does '{name}' to a mean or sum over the batch, which cannot be done to each microbatch "
                    "by itself; write microbatches=1"
                )

    def rows(self, tensor: Tensor, microbatch: int) -> Tensor:
        """A microbatch's rows of a tensor with so many for every sample."""
        each = tensor.shape[0] // self._batch
        start = self._starts[microbatch] * each
        return tensor[start : start + self._sizes[microbatch] * each]

    def loss(self, loss: Deferred, results: Sequence[Tensor], microbatch: int) -> Tensor:
        """The part of the loss that is this microbatch's; those of all add up to it."""
        made: dict[int, Tensor] = {}

        def value(of: Deferred) -> Tensor:
            if id(of) not in made:
                made[id(of)] = self._value(of, value, results, microbatch)
            return made[id(of)]

        return value(loss)

    def _value(
        self, of: Deferred, value: Callable[[Deferred], Tensor], results: Sequence[Tensor], microbatch: int
    ) -> Tensor:
        if of.function is None:
            return results[of.number]
        if len(self._sizes) == 1:
            return replay(of, value, lambda tensor: tensor)
        # Another tensor goes with a value if it has as many rows, and the value's rows are the batch's.
        counts = set()
        for leaf in _deferred(of):
            if leaf.outline.dim():
                whole, here = leaf.outline.shape[0], value(leaf).shape[0]
                if here * self._batch == whole * self._sizes[microbatch]:
                    counts.add(whole)
        of_classes = _bound(of).get("weight") if of.function in _BY_CLASS else None

        def other(tensor: Tensor) -> Tensor:
            with_rows = tensor.dim() and tensor.shape[0] in counts and tensor is not of_classes
            return self.rows(tensor, microbatch) if with_rows else tensor

        if of.outline.dim():
            return replay(of, value, other)
        if all(leaf.outline.dim() == 0 for leaf in _deferred(of)):
            return self._after(of, replay(of, value, other), microbatch)
        if id(of) not in self._counted:
            self._counted[id(of)] = _counted(of)
        counted = self._counted[id(of)]
        if counted is not None:
            return replay(of, value, other, {"reduction": "sum"}) / counted
        return replay(of, value, other) * self._weight(of, microbatch)

    def _after(self, of: Deferred, made: Tensor, microbatch: int) -> Tensor:
        """A scalar that was made of scalars."""
        name, scalars = _spoken(of.function), _deferred(of)
        if name in ("add", "sub", "rsub") and len(scalars) == 1:
            # A constant counts once, not once for every microbatch.
            share = self._sizes[microbatch] / self._batch
            alone = replay(of, lambda leaf: torch.zeros((), dtype=leaf.outline.dtype), lambda tensor: tensor)
            return made - alone * (1 - share)
        return made

    def _weight(self, of: Deferred, microbatch: int) -> float:
        """What the mean over a microbatch counts in the mean over the batch."""
        return 1.0 if _reduction(of) == "sum" else self._sizes[microbatch] / self._batch


def _deferred(of: Deferred) -> list[Deferred]:
    return [leaf for leaf in pytree.tree_leaves((of.arguments, of.options)) if isinstance(leaf, Deferred)]


def _reduction(of: Deferred) -> str | None:
    """How a scalar was made of what has rows: by their mean or their sum; None where by neither."""
    name = _spoken(of.function)
    if name in ("sum", "nansum", "mean"):
        return "mean" if name == "mean" else "sum"
    found = _bound(of).get("reduction")
    return found if isinstance(found, str) else None


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _bound(of: Deferred) -> dict[str, Any]:
    """The function's arguments by name, with defaults."""
    try:
        bound = _signature(of.function).bind(*of.arguments, **of.options)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return bound.arguments


def _counted(of: Deferred) -> Tensor | None:
    """What the mean of cross entropy divides by: the weights of the targets that it does not ignore."""
    if of.function not in (functional.cross_entropy, functional.nll_loss):
        return None
    bound = _bound(of)
    target, weight = bound.get("target"), bound.get("weight")
    if bound.get("reduction") != "mean" or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    used = target[target != bound.get("ignore_index", -100)]
    return torch.tensor(float(used.numel())) if weight is None else weight[used].sum()
