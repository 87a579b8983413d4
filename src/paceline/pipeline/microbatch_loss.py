"""The loss of a microbatch, as its share in that of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.errors import UsageError
from paceline.pipeline.deferred import Deferred, bound, leaves_of, replay

Tensor = torch.Tensor
Results = Sequence[Tensor] | Mapping[int, Tensor]
"""What a model returns for a microbatch, by numbers."""

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


ELEMENTWISE = _LINEAR | {"pow", "rpow", "rdiv", "rtruediv", "maximum", "minimum", "where", "lerp", "fmod", "remainder"}
ELEMENTWISE |= {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "and", "or", "masked_fill"}
"""What is done to the elements of tensors that are laid one upon the other, beginning with their last dimension."""


def spoken(function: Any) -> str:
    name = getattr(function, "__name__", str(function)).strip("_")
    return _SAME.get(name, name)


_BY_AND_BY = (
    "the loss takes means over samples and over other things one after the other, and it cannot be seen what each "
    "microbatch is to count in it; take the mean, or the sum, of everything at once, or write microbatches=1"
)
_BY_CLASS = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)


class MicrobatchLoss:
    """How what each microbatch gives to the loss adds up to the loss of the batch."""

    def __init__(self, batch: int, sizes: Sequence[int]) -> None:
        self._batch, self.sizes = batch, sizes
        self._counted: dict[int, Tensor | None] = {}
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def check(self, loss: Deferred) -> None:
        """Refuse a loss that cannot be put together from microbatches; the same on every worker."""
        seen: set[int] = set()
        left = [loss] if len(self.sizes) > 1 else []
        while left:
            of = left.pop()
            if id(of) in seen:
                continue
            seen.add(id(of))
            if of.function is None:
                if not of.outline.dim():
                    raise UsageError(
                        "the model returns a scalar for every microbatch, which cannot be put together to that of the "
                        "batch; let it return a row for every sample, or write microbatches=1"
                    )
                continue
            left += leaves_of(of)
            picked = _picked(of)
            if picked is not None and not torch.equal(picked, torch.arange(len(picked))):
                raise UsageError(
                    "the loss picks rows of the batch by their numbers, which are others in a microbatch; let it "
                    "count rows more or less by a weight or ignore_index instead, or write microbatches=1"
                )
            name, scalars = spoken(of.function), [leaf for leaf in leaves_of(of) if not leaf.outline.dim()]
            if of.outline.dim():
                if name == "mean" and _over_rows(of):
                    raise UsageError(_BY_AND_BY)
                continue
            if len(scalars) < len(leaves_of(of)):
                without = any(leaf.outline.dim() and leaf.outline.shape[0] % self._batch for leaf in leaves_of(of))
                if _reduction(of) == "mean" and without:
                    raise UsageError(_BY_AND_BY)
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
        return tensor[start : start + self.sizes[microbatch] * each]

    def loss(self, loss: Deferred, results: Results, microbatch: int) -> Tensor:
        """The part of the loss that is this microbatch's; those of all add up to it."""
        return _Made(self, results, microbatch).value(loss)

    def made(self, of: Deferred, value: Callable[[Deferred], Tensor], results: Results, microbatch: int) -> Tensor:
        """One step on the way to it; `value` knows those before."""
        if of.function is None:
            return results[of.number]
        if len(self.sizes) == 1:
            return replay(of, value, lambda tensor: tensor)
        # Another tensor goes with a value if it has as many rows, and the value's rows are the batch's.
        counts = set()
        for leaf in leaves_of(of):
            if leaf.outline.dim():
                whole, here = leaf.outline.shape[0], value(leaf).shape[0]
                if here * self._batch == whole * self.sizes[microbatch]:
                    counts.add(whole)
        of_classes = bound(of).get("weight" if of.function in _BY_CLASS else "pos_weight")
        picked = _picked(of)

        def other(tensor: Tensor) -> Tensor:
            if tensor is picked:
                return tensor[: self.sizes[microbatch] * len(tensor) // self._batch]
            with_rows = tensor.dim() and tensor.shape[0] in counts and tensor is not of_classes
            if with_rows and spoken(of.function) in ELEMENTWISE:
                with_rows = tensor.dim() == of.outline.dim()  # otherwise its first dimension meets a later one
            return self.rows(tensor, microbatch) if with_rows else tensor

        if of.outline.dim():
            return replay(of, value, other)
        if all(leaf.outline.dim() == 0 for leaf in leaves_of(of)):
            return self._after(of, replay(of, value, other), microbatch)
        if id(of) not in self._counted:
            self._counted[id(of)] = _counted(of)
        counted = self._counted[id(of)]
        if counted is not None:
            return replay(of, value, other, {"reduction": "sum"}) / counted
        return replay(of, value, other) * self._weight(of, microbatch)

    def _after(self, of: Deferred, made: Tensor, microbatch: int) -> Tensor:
        """A scalar that was made of scalars."""
        name, scalars = spoken(of.function), leaves_of(of)
        if name in ("add", "sub", "rsub") and len(scalars) == 1:
            # A constant counts once, not once for every microbatch.
            share = self.sizes[microbatch] / self._batch
            alone = replay(of, lambda leaf: torch.zeros((), dtype=leaf.outline.dtype), lambda tensor: tensor)
            return made - alone * (1 - share)
        return made

    def _weight(self, of: Deferred, microbatch: int) -> float:
        """What the mean over a microbatch counts in the mean over the batch."""
        return 1.0 if _reduction(of) == "sum" else self.sizes[microbatch] / self._batch


class _Made:
    """What has been made of one microbatch's results; a function that calls itself would hold on to all of it."""

    def __init__(self, shares: MicrobatchLoss, results: Results, microbatch: int) -> None:
        self._shares, self._results, self._microbatch = shares, results, microbatch
        self._known: dict[int, Tensor] = {}

    def value(self, of: Deferred) -> Tensor:
        if id(of) not in self._known:
            self._known[id(of)] = self._shares.made(of, self.value, self._results, self._microbatch)
        return self._known[id(of)]


def _picked(of: Deferred) -> Tensor | None:
    """The numbers of rows, where a value is made by picking these of another."""
    if spoken(of.function) != "getitem" or len(of.arguments) < 2:
        return None
    index = of.arguments[1]
    first = index[0] if isinstance(index, tuple) and index else index
    return first if isinstance(first, Tensor) and not isinstance(first, Deferred) and first.dim() else None


def _over_rows(of: Deferred) -> bool:
    """Whether a mean is taken over samples."""
    given = of.arguments[1] if len(of.arguments) > 1 else of.options.get("dim", of.options.get("axis"))
    dims = given if isinstance(given, tuple | list) else [given]
    return any(isinstance(dim, int) and dim % max(1, leaf.outline.dim()) == 0 for dim in dims for leaf in leaves_of(of))


def _reduction(of: Deferred) -> str | None:
    """How a scalar was made of what has rows: by their mean or their sum; None where by neither."""
    name = spoken(of.function)
    if name in ("sum", "nansum", "mean"):
        return "mean" if name == "mean" else "sum"
    found = bound(of).get("reduction")
    return found if isinstance(found, str) else None


def _counted(of: Deferred) -> Tensor | None:
    """What the mean of cross entropy divides by: the weights of the targets that it does not ignore."""
    if of.function not in (functional.cross_entropy, functional.nll_loss):
        return None
    given = bound(of)
    target, weight = given.get("target"), given.get("weight")
    if given.get("reduction") != "mean" or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    used = target[target != given.get("ignore_index", -100)]
    return torch.tensor(float(used.numel())) if weight is None else weight[used].sum()
