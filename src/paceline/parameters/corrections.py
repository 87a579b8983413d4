"""Corrections of gradients that were computed on an older version. They compose.

Some multiply the learning rate for a gradient, some change the gradient itself, one drops it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from paceline.config import Correction, DcAsgd, DcAsgdAdaptive, DropAbove, DuttaRate, RateOverStaleness

_EPSILON = 1e-7


class Corrections:
    """The corrections of one run."""

    def __init__(self, corrections: Iterable[Correction]) -> None:
        self._all = list(corrections)
        self.needs_distance = any(isinstance(one, DuttaRate) for one in self._all)
        """True if the distance between the gradient's version and the newest is needed."""
        self.compensates = any(isinstance(one, DcAsgd | DcAsgdAdaptive) for one in self._all)
        """True if the gradient itself is changed."""

    def bound(self) -> int | None:
        """The staleness above which a gradient is dropped."""
        return min((one.above for one in self._all if isinstance(one, DropAbove)), default=None)

    def rate(self, staleness: int, squared_distance: float, rate: float) -> float:
        """The factor on the learning rate, which is `rate`, for one gradient."""
        factor = 1.0
        for one in self._all:
            if isinstance(one, RateOverStaleness):
                factor /= max(1, staleness)
            elif rate == 0:
                continue  # nothing to multiply: a schedule may begin or end there
            elif isinstance(one, DuttaRate) and squared_distance > 0:
                most = rate if one.max is None else one.max
                factor *= min(one.c / squared_distance, most) / rate
            elif isinstance(one, DuttaRate) and one.max is not None:
                factor *= one.max / rate
        return factor if math.isfinite(factor) else 1.0

    def compensator(self, counts: list[tuple[int, torch.dtype]]) -> Compensator | None:
        for one in self._all:
            if isinstance(one, DcAsgd):
                return Compensator(one.strength)
            if isinstance(one, DcAsgdAdaptive):
                squares = [torch.zeros(count, dtype=dtype) for count, dtype in counts]
                return Compensator(one.strength, one.mean, squares)
        return None


class Compensator:
    """DC-ASGD: adds to a gradient its estimated change since its version."""

    def __init__(self, strength: float, mean: float = 0.0, squares: list[torch.Tensor] | None = None) -> None:
        self._strength, self._mean, self._squares = strength, mean, squares
        self.remembers = squares is not None
        """True if it must see every gradient, also one that needs no correction."""

    def __call__(
        self, gradient: torch.Tensor, newest: torch.Tensor, base: torch.Tensor, flat: int, start: int, stop: int
    ) -> torch.Tensor:
        """g + lambda * g * g * (w - w_base); adaptive: lambda over the root of the mean square of the gradients."""
        square = gradient * gradient
        change = newest - base
        if self._squares is None:
            return torch.addcmul(gradient, square, change, value=self._strength)
        seen = self._squares[flat][start:stop]
        seen.mul_(self._mean).add_(square, alpha=1 - self._mean)
        return gradient + self._strength * square * change / torch.sqrt(seen + _EPSILON)
