"""Whether a loss is what its microbatches give to it: tried with numbers of no meaning, before the real ones come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.pipeline.deferred import Deferred, leaves_of
from paceline.pipeline.microbatch_loss import ELEMENTWISE, MicrobatchLoss, spoken

Tensor = torch.Tensor

_CLOSE, _CLOSE_IN_HALF = 1e-3, 5e-2
"""By how much of itself one way may differ from the other, by rounding alone."""


def kind(loss: Deferred, sizes: Sequence[int]) -> Any:
    """Equal for losses that are made the same way of values of the same shapes."""
    return (tuple(sizes), loss.autocast.key, *(_step(of) for of in _steps(loss)))


def _steps(loss: Deferred) -> list[Deferred]:
    """All values that it is made of, in an order that depends on nothing but how."""
    found: dict[int, Deferred] = {}
    left = [loss]
    while left:
        of = left.pop()
        if id(of) not in found:
            found[id(of)] = of
            left += leaves_of(of)
    return list(found.values())


def _step(of: Deferred) -> Any:
    # What a value is multiplied by, say, may be another number in every step, and changes nothing of how it is made.
    alike = (float, int) if spoken(of.function) in ELEMENTWISE else (float,)
    facts = tuple(_fact(leaf, alike) for leaf in pytree.tree_leaves((of.arguments, of.options)))
    return (of.function, of.number, of.place, of.outline.shape, facts)


def _fact(leaf: Any, alike: tuple[type, ...]) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype)
    return None if isinstance(leaf, alike) else repr(leaf)


def adds_up(loss: Deferred, shares: MicrobatchLoss) -> bool:
    """Whether loss and gradient come out the same for the batch at once and for the sum over microbatches.

    True also where it cannot be seen: of what is drawn anew each time, or is no number.
    """
    results = {of.number: _made_up(of.outline) for of in _steps(loss) if of.function is None}
    free = [result for result in results.values() if result.requires_grad]
    at_once = MicrobatchLoss(sum(shares.sizes), [sum(shares.sizes)])
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole, again = (at_once.loss(loss, results, 0).reshape(()) for _ in range(2))
        except (RuntimeError, IndexError, ValueError):
            return True  # with numbers of no meaning it cannot be done at all
        if not torch.equal(whole, again) or not torch.isfinite(whole):
            return True
        try:
            parts = [shares.loss(loss, _rows(shares, results, number), number) for number in range(len(shares.sizes))]
        except (RuntimeError, IndexError, ValueError):
            return False
        total = torch.stack([part.reshape(()) for part in parts]).sum()
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


def _rows(shares: MicrobatchLoss, results: dict[int, Tensor], microbatch: int) -> dict[int, Tensor]:
    return {number: shares.rows(result, microbatch) for number, result in results.items()}


def _made_up(outline: Tensor) -> Tensor:
    """Between 0 and 1, where logarithms, roots and probabilities are; the same on every call."""
    generator = torch.Generator().manual_seed(outline.numel())
    if outline.dtype.is_complex or outline.is_floating_point():
        drawn = torch.rand(outline.shape, generator=generator) * 0.9 + 0.05
        return drawn.to(outline.dtype).requires_grad_()
    return torch.randint(0, 2, outline.shape, generator=generator).to(outline.dtype)


def _close(wanted: Tensor, got: Tensor, limit: float) -> bool:
    return wanted.numel() == 0 or float((wanted - got).abs().max()) <= limit
