"""Checks, on random outputs, that the loss of a batch equals the sum of the terms of its microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.pipeline.deferred import Deferred, deferred_inputs
from paceline.pipeline.microbatch_loss import ELEMENTWISE, MicrobatchLoss, operation_name
from paceline.pipeline.stage_links import ResultExchange

Tensor = torch.Tensor

_CLOSE, _CLOSE_IN_HALF = 1e-3, 5e-2
"""Allowed relative difference by rounding, in single and in half precision."""
_CHECKED_USES = (1, 2, 4, 8, 16)
"""The uses of a kind of loss at which it is checked."""


class LossChecker:
    """Checks a kind of loss at some of its first uses."""

    def __init__(self, exchange: ResultExchange) -> None:
        self._exchange = exchange
        self._uses: Counter[Any] = Counter()

    def check(self, loss: Deferred, microbatch_loss: MicrobatchLoss) -> None:
        """Refuses, on all workers, a loss that the terms of its microbatches do not add up to; the root decides.

        One check would not do: with equal targets a loss is right even if it compares them with the wrong rows.
        """
        of_kind = kind(loss, microbatch_loss.sizes)
        self._uses[of_kind] += 1
        if self._uses[of_kind] not in _CHECKED_USES:
            return
        root = self._exchange.is_root
        if not self._exchange.broadcast(torch.tensor(adds_up(loss, microbatch_loss)) if root else None):
            raise UsageError(
                "the terms of the microbatches do not add up to the loss of the batch: it compares samples with each "
                "other, or their rows are not in the first dimension where it computes with them; keep samples in the "
                "first dimension, or write microbatches=1"
            )


def kind(loss: Deferred, sizes: Sequence[int]) -> Any:
    """A key, equal for losses that apply the same functions to values of the same shapes."""
    return (tuple(sizes), loss.autocast.key, *(_step_key(of) for of in _steps(loss)))


def _steps(loss: Deferred) -> list[Deferred]:
    """All values that a loss is computed from, in an order that depends only on its structure."""
    found: dict[int, Deferred] = {}
    left = [loss]
    while left:
        of = left.pop()
        if id(of) not in found:
            found[id(of)] = of
            left += deferred_inputs(of)
    return list(found.values())


def _step_key(of: Deferred) -> Any:
    # A factor, say, may be another number in every step.
    alike = (float, int) if operation_name(of.function) in ELEMENTWISE else (float,)
    facts = tuple(_fact(leaf, alike) for leaf in pytree.tree_leaves((of.arguments, of.options)))
    return (of.function, of.result_index, of.item_index, of.meta.shape, facts)


def _fact(leaf: Any, alike: tuple[type, ...]) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype)
    return None if isinstance(leaf, alike) else repr(leaf)


def loss_on_random_outputs(loss: Deferred, samples: int) -> Tensor:
    """The loss of a batch, with its graph, for random outputs of the model."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        # By a function that leaves them as they are: leaves of a graph would look like parameters, as in a penalty.
        results = {index: functional.hardtanh(one) for index, one in _random_results(loss).items() if one.requires_grad}
        return MicrobatchLoss(samples, [samples]).term(loss, _random_results(loss) | results, 0)


def _random_results(loss: Deferred) -> dict[int, Tensor]:
    return {of.result_index: _random_result(of.meta) for of in _steps(loss) if of.function is None}


def adds_up(loss: Deferred, microbatch_loss: MicrobatchLoss) -> bool:
    """True if loss and gradient of the batch equal those of the sum over microbatches.

    True also where that cannot be seen: if the loss is random, or not finite.
    """
    results = _random_results(loss)
    free = [result for result in results.values() if result.requires_grad]
    undivided = MicrobatchLoss(sum(microbatch_loss.sizes), [sum(microbatch_loss.sizes)])
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole, again = (undivided.term(loss, results, 0).reshape(()) for _ in range(2))
        except (RuntimeError, IndexError, ValueError):
            return True  # it cannot be computed on random outputs at all
        if not torch.equal(whole, again) or not torch.isfinite(whole):
            return True
        try:
            terms = [
                microbatch_loss.term(loss, _rows(microbatch_loss, results, microbatch), microbatch)
                for microbatch in range(len(microbatch_loss.sizes))
            ]
        except (RuntimeError, IndexError, ValueError):
            return False
        total = torch.stack([term.reshape(()) for term in terms]).sum()
        wanted, got = _gradients(whole, free), _gradients(total, free)
    whole, total = whole.detach(), total.detach()
    if not all(bool(torch.isfinite(one).all()) for one in wanted):
        return True
    scale = max(
        [float(whole.abs()), *(float((one * of.detach()).abs().sum()) for one, of in zip(wanted, free, strict=True))]
    )
    coarse = loss.autocast.on or any(one.dtype in (torch.bfloat16, torch.float16) for one in [whole, *free])
    allowed = _CLOSE_IN_HALF if coarse else _CLOSE
    return _close(whole, total, allowed * scale) and all(
        _close(one, other, allowed * float(one.abs().max())) for one, other in zip(wanted, got, strict=True)
    )


def _gradients(loss: Tensor, results: list[Tensor]) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(result) for result in results]
    return list(torch.autograd.grad(loss, results, allow_unused=True, materialize_grads=True))


def _rows(microbatch_loss: MicrobatchLoss, results: dict[int, Tensor], microbatch: int) -> dict[int, Tensor]:
    return {index: microbatch_loss.rows(result, microbatch) for index, result in results.items()}


def _random_result(meta: Tensor) -> Tensor:
    """Values between 0 and 1, where logarithms, roots and probabilities are defined; the same on every call."""
    generator = torch.Generator().manual_seed(meta.numel())
    if meta.dtype.is_complex or meta.is_floating_point():
        values = torch.rand(meta.shape, generator=generator) * 0.9 + 0.05
        return values.to(meta.dtype).requires_grad_()
    return torch.randint(0, 2, meta.shape, generator=generator).to(meta.dtype)


def _close(wanted: Tensor, got: Tensor, limit: float) -> bool:
    return wanted.numel() == 0 or float((wanted - got).abs().max()) <= limit
