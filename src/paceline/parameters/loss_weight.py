"""What a loss was divided by, read from its graph.

A worker's loss is S / D: a sum over its items (samples, tokens that are not ignored, class weights) and their number.
The loss of the undivided batch is ΣS / ΣD, so a worker's gradient has the weight D / ΣD there; the gradient of a loss
that is a sum has the weight 1. Autograd keeps D: losses of torch save how they were reduced, and a division saves its
divisor.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import torch


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{number}" for name in names.split() for number in range(3))


_PASSING = _nodes("Neg View UnsafeView Squeeze Unsqueeze ToCopy Clone Alias Expand Add Sub Mul")
"""Operations that leave the terms of a scalar as they are, if they have one input."""
_OF_PARAMETERS = _PASSING | _nodes(
    "Pow Abs Norm LinalgVectorNorm Sum Mean Sqrt Exp Log Div Stack Cat Select Unbind Softplus Sigmoid"
)
"""Operations of a penalty on parameters, which does not depend on samples."""
_COMPILED = "CompiledFunction"
"""The start of the name of a compiled graph, which does not show its operations."""
_LEAF = "torch::autograd::AccumulateGrad"
_MOST = 4096
"""Operations after which a search is given up."""
_FEW = 64
"""Losses in a list that are looked at one by one."""
_AVERAGED, _SUMMED = 1, 2
"""Reductions, as torch numbers them."""


class Kind(enum.IntEnum):
    """How a loss follows from its items."""

    UNKNOWN = 0
    MEAN = 1
    SUM = 2
    CONSTANT = 3
    """It depends on parameters only."""


class _Role(enum.Enum):
    """What an operation does with the terms of a loss."""

    SUM = enum.auto()
    PRODUCT = enum.auto()
    PASSES = enum.auto()
    QUOTIENT = enum.auto()
    REDUCTION = enum.auto()
    LOSS = enum.auto()
    """It may be one of torch's own losses."""


_roles: dict[str, _Role] = {}
"""Of operations that were met, by name."""


class LossWeight(NamedTuple):
    """The weight of a gradient, before it is related to those of the other workers."""

    kind: Kind = Kind.UNKNOWN
    items: float = 0.0
    """The items that the loss is a mean over, or the terms of the sum."""
    by_sample: bool = True
    """True if every sample has the same number of items, so that samples can be counted instead."""
    whole: bool = True
    """False if items are left out or weighted, or may be, so that samples do not count alike."""
    guessed: bool = False
    """True if it was a sum, divided by a number that may count its samples, or be a constant that is equal to that."""

    @property
    def is_empty(self) -> bool:
        """True if the loss is a mean over nothing, which has no gradient."""
        return self.kind is Kind.MEAN and self.items == 0

    def counts_alike(self, samples: int) -> bool:
        """True if the loss is a mean over as many items of each of these samples."""
        return self.whole and self.items % samples == 0


class Batch(NamedTuple):
    """What is known of the minibatch of a loss."""

    samples: int
    """0 if their number is not known."""
    constants: set[float]
    """Divisors that were no numbers of samples before; new ones are added."""
    counts: set[float] = set()  # noqa: RUF012
    """Divisors that were taken for numbers of samples; new ones are added."""
    lists: set[int] = set()  # noqa: RUF012
    """Numbers of losses in a sum that may have one for each sample; new ones are added."""
    terms: set[int] = set()  # noqa: RUF012
    """Numbers of losses in a sum that are not as many as the samples; new ones are added."""


def loss_weight(loss: Any, batch: Batch) -> LossWeight:
    """The weight of a loss of a minibatch."""
    node = loss.grad_fn if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
    if node is None:
        return LossWeight()
    try:
        terms = _each_of_a_sample(_terms(node, batch), batch)
    except (AttributeError, RuntimeError, RecursionError):  # a saved tensor was changed since, or is not saved
        return LossWeight()
    return terms[0] if len(terms) == 1 and terms[0].kind is not Kind.CONSTANT else _combined(terms, batch)


def _each_of_a_sample(terms: list[LossWeight], batch: Batch) -> list[LossWeight]:
    """The terms of a sum; where each is the mean loss of one sample, it is a sum over samples."""
    samples = batch.samples
    if len(terms) != samples:
        batch.terms.add(len(terms))
    if samples < 2 or len(terms) != samples or any(term.kind is not Kind.MEAN or not term.whole for term in terms):
        return terms
    if all(_by_sample(term.items, samples) for term in terms):  # perhaps as many losses of all samples
        batch.lists.add(samples)
        return terms
    return [LossWeight(Kind.SUM, samples)]


def _combined(terms: list[LossWeight], batch: Batch) -> LossWeight:
    """The weight of a sum of terms."""
    first, *others = [term for term in terms if term.kind is not Kind.CONSTANT] or [LossWeight()]
    if first.kind is Kind.SUM and len(terms) > len(others) + 1:
        return LossWeight()  # a penalty is part of every worker's sum
    if any(term.kind is not first.kind for term in others):
        return LossWeight()
    if first.kind is Kind.MEAN and any(term.items != first.items for term in others):
        alike = all(_by_sample(term.items, batch.samples) for term in (first, *others))
        return LossWeight(Kind.MEAN, batch.samples) if alike else LossWeight()
    by_sample, whole, guessed = (all(flags) for flags in zip(*(term[2:] for term in (first, *others)), strict=True))
    return first._replace(by_sample=by_sample, whole=whole, guessed=guessed)


def is_compiled(loss: Any) -> bool:
    """True if a loss comes out of a compiled graph, perhaps scaled since."""
    node = getattr(loss, "grad_fn", None)
    while node is not None and (node.name() in _PASSING or node.name().startswith("DivBackward")):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(_COMPILED)


def _terms(node: Any, batch: Batch) -> list[LossWeight]:
    """The weights of the terms of a loss."""
    name = node.name()
    role = _roles.get(name) or _role(name)
    if role is _Role.LOSS:
        return [_of_loss(node, batch)]
    inputs = [following for following, _ in node.next_functions if following is not None]
    if role is _Role.REDUCTION:
        return _reduced(node, name.startswith("Mean"), inputs, batch)
    if role is _Role.QUOTIENT:
        return _quotient(node, batch)
    if role is _Role.SUM and len(inputs) > 1:
        parts = [[LossWeight(Kind.CONSTANT)] if _of_parameters(one) else _terms(one, batch) for one in inputs]
        return [term for part in parts for term in part]
    if role is _Role.PRODUCT and len(inputs) > 1:
        inputs = [following for following in inputs if not _of_parameters(following)]
    return _terms(inputs[0], batch) if len(inputs) == 1 else [_of_loss(node, batch)]


def _role(name: str) -> _Role:
    known = {
        ("AddBackward", "SubBackward"): _Role.SUM,
        ("MulBackward",): _Role.PRODUCT,
        ("DivBackward",): _Role.QUOTIENT,
        ("SumBackward", "MeanBackward"): _Role.REDUCTION,
    }
    other = _Role.PASSES if name in _PASSING else _Role.LOSS
    _roles[name] = role = next((role for start, role in known.items() if name.startswith(start)), other)
    return role


def _quotient(node: Any, batch: Batch) -> list[LossWeight]:
    """A sum that is divided by a number of items is a mean; a mean or sum that is divided by a constant stays one."""
    (dividend, _), *divisors = node.next_functions
    if dividend is None or any(following is not None for following, _ in divisors):
        return [LossWeight()]
    divisor = node._saved_other
    # Tensors are computed from the batch. Numbers of a script are constants, unless they count samples or terms.
    computed = isinstance(divisor, torch.Tensor) and not is_number(divisor)
    count = abs(float(divisor)) if not isinstance(divisor, torch.Tensor) or divisor.numel() == 1 else 0.0
    by_sample = not computed and _by_sample(count, batch.samples)
    return [
        LossWeight(Kind.MEAN, count, by_sample, whole=not computed, guessed=not computed)
        if term.kind is Kind.SUM and (computed or _is_count(count, term, batch))
        else term
        for term in _each_of_a_sample(_terms(dividend, batch), batch)
    ]


def _is_count(number: float, term: LossWeight, batch: Batch) -> bool:
    """True if a number of the script counts the samples or the terms of a sum, and not by chance."""
    if number not in (batch.samples, term.items):
        batch.constants.add(number)
    if number in batch.constants:
        return False
    batch.counts.add(number)
    return True


def _by_sample(count: float, samples: int) -> bool:
    return samples > 0 and count % samples == 0


def is_number(value: torch.Tensor) -> bool:
    """True if a saved tensor holds a Python number, which counts less than a tensor in type promotion."""
    small = torch.float16 if value.is_floating_point() else torch.int8
    return value.dim() == 0 and torch.result_type(torch.ones((), dtype=small), value) == small


def _reduced(node: Any, mean: bool, inputs: list[Any], batch: Batch) -> list[LossWeight]:
    """The terms of a sum or mean over all elements: those of its input, if that is a list of losses."""
    if not inputs:
        return [LossWeight()]
    if inputs[0].name().startswith(("StackBackward", "CatBackward")):
        parts = [following for following, _ in inputs[0].next_functions if following is not None]
        terms = [term for part in parts for term in _terms(part, batch)] if len(parts) <= _FEW else []
        if terms and mean and _count_samples(terms, batch.samples):
            return [LossWeight(Kind.MEAN, batch.samples)]
        if terms and all(term.kind is not Kind.UNKNOWN for term in terms):
            return terms
    count = math.prod(node._saved_self_sym_sizes)
    whole = not (mean and _selects(inputs[0]))
    by_sample = mean and whole and _by_sample(count, batch.samples)
    return [LossWeight(Kind.MEAN, count, by_sample, whole) if mean else LossWeight(Kind.SUM, count)]


def _count_samples(terms: list[LossWeight], samples: int) -> bool:
    """True if the mean of these is one over samples: each is of all samples, or of one."""
    means = all(term.kind is Kind.MEAN and term.whole for term in terms)
    return means and (len(terms) == samples or all(_by_sample(term.items, samples) for term in terms))


def _selects(node: Any) -> bool:
    """True if elements may be selected by their values or a mask, so that their number is another on each worker."""
    for _ in range(_FEW):
        if node.name().startswith(("MaskedSelect", "Index", "Take", "Gather", _COMPILED)):
            return True
        inputs = [following for following, _ in node.next_functions if following is not None]
        if len(inputs) != 1:
            return False
        node = inputs[0]
    return False


def _of_loss(node: Any, batch: Batch) -> LossWeight:
    """The weight of one of torch's own losses, which save how they were reduced."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_AVERAGED, _SUMMED):
        return LossWeight()
    classifies = hasattr(node, "_saved_total_weight")
    count = (node._saved_target if classifies else node._saved_self).numel()
    if reduction == _SUMMED:
        return LossWeight(Kind.SUM, count)
    if not classifies:
        return LossWeight(Kind.MEAN, count, _by_sample(count, batch.samples))
    # Samples of a classification may be ignored, too, but mostly none are.
    by_sample = node._saved_weight is None and count == batch.samples
    items = float(node._saved_total_weight)
    return LossWeight(Kind.MEAN, items, by_sample, whole=node._saved_weight is None and items == count)


def _of_parameters(node: Any) -> bool:
    """True if a term depends on parameters only: a penalty, or a learned weight."""
    seen, waiting = {node}, [node]
    while waiting and len(seen) < _MOST:
        one = waiting.pop()
        name = one.name()
        if name != _LEAF and name not in _OF_PARAMETERS:
            return False
        for factor in ("_saved_self", "_saved_other") if name.startswith("MulBackward") else ():
            value = getattr(one, factor, None)
            if isinstance(value, torch.Tensor) and value.dim() and not value.requires_grad:
                return False  # a product with data
        fresh = {following for following, _ in one.next_functions if following is not None} - seen
        seen |= fresh
        waiting += fresh
    return not waiting
