"""The loss of a batch as a sum of terms, one per microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from paceline.errors import UsageError
from paceline.pipeline.deferred import Deferred, bound_arguments, deferred_inputs, replay
from paceline.tensor_parallel.partial_tensor import name_of

Tensor = torch.Tensor
Results = Sequence[Tensor] | Mapping[int, Tensor]
"""The model's results for a microbatch, by index."""

_SYNONYMS = {"rmul": "mul", "imul": "mul", "radd": "add", "iadd": "add", "isub": "sub"}
_SYNONYMS |= {"truediv": "div", "itruediv": "div", "true_divide": "div", "to_copy": "to"}
_LINEAR = {"mul", "div", "add", "sub", "rsub", "neg", "float", "double", "to", "type", "clone", "reshape", "view"}
"""Operations on a scalar that give the same before and after the sum over microbatches."""
ELEMENTWISE = _LINEAR | {"pow", "rpow", "rdiv", "rtruediv", "maximum", "minimum", "where", "lerp", "fmod", "remainder"}
ELEMENTWISE |= {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "and", "or", "masked_fill"}
"""Operations on the elements of tensors that are broadcast against each other, from the last dimension on."""


def operation_name(function: Any) -> str:
    """One name for all spellings of an operation: `__rmul__` and `mul_` are `mul`."""
    name = name_of(function).strip("_")
    return _SYNONYMS.get(name, name)


_NESTED_MEANS = (
    "the loss takes means over samples and over other dimensions one after the other, so the weight of each microbatch "
    "in it is unknown; take the mean, or the sum, over everything at once, or write microbatches=1"
)
_CLASS_WEIGHTED = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)


def microbatch_sizes(batch: int, count: int) -> tuple[int, ...]:
    """Samples of each microbatch, as equal as can be."""
    each, more = divmod(batch, min(count, batch))
    return (each + 1,) * more + (each,) * (min(count, batch) - more)


class MicrobatchLoss:
    """Computes each microbatch's term of a loss; the terms of all microbatches add up to the loss of the batch."""

    def __init__(self, batch: int, sizes: Sequence[int]) -> None:
        self._batch, self.sizes = batch, sizes
        self._divisors: dict[int, Tensor | None] = {}
        """Cache of `_divisor`, by the id of a deferred tensor."""
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def check(self, loss: Deferred) -> None:
        """Refuses a loss that is not a sum of terms of microbatches; it decides the same on every worker."""
        seen: set[int] = set()
        left = [loss] if len(self.sizes) > 1 else []
        while left:
            of = left.pop()
            if id(of) in seen:
                continue
            seen.add(id(of))
            if of.function is None:
                if not of.meta.dim():
                    raise UsageError(
                        "the model returns a scalar for every microbatch, which cannot be combined into that of the "
                        "batch; let it return a row for every sample, or write microbatches=1"
                    )
                continue
            left += deferred_inputs(of)
            if _divides_by_targets(of) and isinstance(bound_arguments(of)["target"], Deferred):
                raise UsageError(
                    "the targets of the loss are an output of the model, so the number of ignored ones is not known "
                    "in advance; use reduction='sum' and divide that by a number, or write microbatches=1"
                )
            indices = _row_indices(of)
            if indices is not None and not torch.equal(indices, torch.arange(len(indices))):
                raise UsageError(
                    "the loss selects rows of the batch by index, and a microbatch has other indices; give rows a "
                    "weight or use ignore_index instead, or write microbatches=1"
                )
            name, scalars = operation_name(of.function), [leaf for leaf in deferred_inputs(of) if not leaf.meta.dim()]
            if of.meta.dim():
                if name == "mean" and _over_rows(of):
                    raise UsageError(_NESTED_MEANS)
                continue
            if len(scalars) < len(deferred_inputs(of)):
                without = any(leaf.meta.dim() and leaf.meta.shape[0] % self._batch for leaf in deferred_inputs(of))
                if _reduction(of) == "mean" and without:
                    raise UsageError(_NESTED_MEANS)
                if _reduction(of) is None:
                    raise UsageError(
                        f"the loss takes '{name}' over the whole batch, which is not a sum over microbatches; use a "
                        "mean, a sum, or one of torch.nn.functional's losses, or write microbatches=1"
                    )
                continue
            divided = name == "div" and len(of.arguments) > 1 and isinstance(of.arguments[1], Deferred)
            if name not in _LINEAR or (name in ("mul", "div") and len(scalars) > 1) or divided:
                raise UsageError(
                    f"the loss applies '{name}' to a mean or sum over the batch, which cannot be applied to each "
                    "microbatch by itself; write microbatches=1"
                )

    def rows(self, tensor: Tensor, microbatch: int) -> Tensor:
        """A microbatch's rows of a tensor that has the same number of rows for every sample."""
        each = tensor.shape[0] // self._batch
        start = self._starts[microbatch] * each
        return tensor[start : start + self.sizes[microbatch] * each]

    def term(self, loss: Deferred, results: Results, microbatch: int) -> Tensor:
        """One microbatch's term of the loss."""
        return _TermEvaluation(self, results, microbatch).value(loss)

    def evaluate(self, of: Deferred, value: Callable[[Deferred], Tensor], results: Results, microbatch: int) -> Tensor:
        """A microbatch's share of one deferred tensor; `value` gives that of its inputs."""
        if of.function is None:
            return results[of.result_index]
        if len(self.sizes) == 1:
            return replay(of, value, lambda tensor: tensor)
        # Another tensor is divided like a deferred input if both have as many rows, and those are the batch's.
        counts = set()
        for leaf in deferred_inputs(of):
            if leaf.meta.dim():
                whole, here = leaf.meta.shape[0], value(leaf).shape[0]
                if here * self._batch == whole * self.sizes[microbatch]:
                    counts.add(whole)
        class_weights = bound_arguments(of).get("weight" if of.function in _CLASS_WEIGHTED else "pos_weight")
        indices = _row_indices(of)

        def other(tensor: Tensor) -> Tensor:
            if tensor is indices:
                return tensor[: self.sizes[microbatch] * len(tensor) // self._batch]
            with_rows = tensor.dim() and tensor.shape[0] in counts and tensor is not class_weights
            if with_rows and operation_name(of.function) in ELEMENTWISE:
                # A tensor of fewer dimensions has its first one broadcast against a later one.
                with_rows = tensor.dim() == of.meta.dim()
            return self.rows(tensor, microbatch) if with_rows else tensor

        if of.meta.dim():
            return replay(of, value, other)
        if all(leaf.meta.dim() == 0 for leaf in deferred_inputs(of)):
            return self._of_scalars(of, replay(of, value, other), microbatch)
        if id(of) not in self._divisors:
            self._divisors[id(of)] = _divisor(of)
        divisor = self._divisors[id(of)]
        if divisor is not None:
            return replay(of, value, other, {"reduction": "sum"}) / divisor
        # The weight of a microbatch's mean in the mean over the batch.
        weight = 1.0 if _reduction(of) == "sum" else self.sizes[microbatch] / self._batch
        return replay(of, value, other) * weight

    def _of_scalars(self, of: Deferred, computed: Tensor, microbatch: int) -> Tensor:
        """A microbatch's share of a scalar that is computed from scalars."""
        name, scalars = operation_name(of.function), deferred_inputs(of)
        if name in ("add", "sub", "rsub") and len(scalars) == 1:
            # A constant counts once per batch, not once per microbatch.
            share = self.sizes[microbatch] / self._batch
            alone = replay(of, lambda leaf: torch.zeros((), dtype=leaf.meta.dtype), lambda tensor: tensor)
            return computed - alone * (1 - share)
        return computed


class _TermEvaluation:
    """The values computed from one microbatch's results. A recursive closure would keep them all alive."""

    def __init__(self, microbatch_loss: MicrobatchLoss, results: Results, microbatch: int) -> None:
        self._microbatch_loss, self._results, self._microbatch = microbatch_loss, results, microbatch
        self._known: dict[int, Tensor] = {}

    def value(self, of: Deferred) -> Tensor:
        if id(of) not in self._known:
            self._known[id(of)] = self._microbatch_loss.evaluate(of, self.value, self._results, self._microbatch)
        return self._known[id(of)]


def _row_indices(of: Deferred) -> Tensor | None:
    """The row indices by which a value selects rows of another; None if it does not."""
    if operation_name(of.function) != "getitem" or len(of.arguments) < 2:
        return None
    index = of.arguments[1]
    first = index[0] if isinstance(index, tuple) and index else index
    return first if isinstance(first, Tensor) and not isinstance(first, Deferred) and first.dim() else None


def _over_rows(of: Deferred) -> bool:
    """True if a mean is taken over samples."""
    argument = of.arguments[1] if len(of.arguments) > 1 else of.options.get("dim", of.options.get("axis"))
    dims = argument if isinstance(argument, tuple | list) else [argument]
    return any(
        isinstance(dim, int) and dim % max(1, leaf.meta.dim()) == 0 for dim in dims for leaf in deferred_inputs(of)
    )


def _reduction(of: Deferred) -> str | None:
    """How a scalar reduces a tensor with rows: "mean", "sum", or None for neither."""
    name = operation_name(of.function)
    if name in ("sum", "nansum", "mean"):
        return "mean" if name == "mean" else "sum"
    found = bound_arguments(of).get("reduction")
    return found if isinstance(found, str) else None


def _divides_by_targets(of: Deferred) -> bool:
    """True if it is a mean of cross entropies with classes, of which some may be ignored or have weights."""
    if of.function not in (functional.cross_entropy, functional.nll_loss):
        return False
    arguments = bound_arguments(of)
    target = arguments.get("target")
    return arguments.get("reduction") == "mean" and isinstance(target, Tensor) and not target.is_floating_point()


def _divisor(of: Deferred) -> Tensor | None:
    """The divisor of cross entropy's mean: the total weight of the targets that are not ignored."""
    if not _divides_by_targets(of):
        return None
    arguments = bound_arguments(of)
    target, weight = arguments["target"], arguments.get("weight")
    used = target[target != arguments.get("ignore_index", -100)]
    return torch.tensor(float(used.numel())) if weight is None else weight[used].sum()
