"""A K that grows as the loss falls: few gradients per update at first, many once noise limits progress.

The rule is AdaSync's (Dutta et al., 'Slow and Stale Gradients Can Win the Race'): it minimises the bound on the error
at each moment, for a loss F that was F0 at the start, when K was K0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from paceline.config import STRATEGIES, strategy_class
from paceline.errors import UsageError
from paceline.policies.asynchronous import KAsync
from paceline.policies.base import Policy
from paceline.policies.wrapper import Wrapper


def best_k(family: type[Policy], start: int, workers: int, first: float, now: float) -> float:
    """The K, not rounded, that the rule asks for once the loss has gone from `first` to `now`."""
    if now <= 0 or start >= workers or not math.isfinite(fallen := max(first, 0.0) / now):
        return float(workers)
    return family.adapted_k(start, workers, fallen)


class Adaptive(Wrapper):
    """A policy with an option `k`, which grows from `start` as the loss falls."""

    spec = "adaptive"
    of: type[Policy] | str = KAsync
    """The policy whose K grows."""
    start: int = 1
    """The first K."""

    def __post_init__(self) -> None:
        super().__post_init__()
        of = strategy_class(self.of) if isinstance(self.of, str) else self.of
        if not (issubclass(of, Policy) and "k" in of.options()):
            known = ", ".join(f"'{name}'" for name in STRATEGIES if "k" in strategy_class(name).options())
            raise UsageError(f"option 'of' of strategy 'adaptive' is '{of.spec}'; it must be one of {known}")
        self.__dict__["of"] = of

    def begin(self) -> None:
        assert isinstance(self.of, type)
        try:
            self._wrap(self.of(k=self.start)._started(self.workers))  # type: ignore[call-arg]
        except UsageError as error:
            raise UsageError(str(error).replace("k is", "start is", 1)) from None
        self.fresh_only = self.of.fresh_only
        self._first: float | None = None
        self._spare = self.inner.spare

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return []  # how K grows depends on the loss, which a simulation of times does not have

    @property
    def spare(self) -> bool:
        return self._spare

    def state_dict(self) -> dict[str, Any]:
        return {"k": self.inner.k, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["first"]
        self.k = self.inner.k = max(self.inner.k, min(len(self.workers), state["k"]))

    def observe(self, loss: float) -> None:
        """K never falls: noise in the loss is no reason to."""
        if not math.isfinite(loss):
            return
        if self._first is None:
            self._first = loss
        wanted = best_k(type(self.inner), self.start, len(self.workers), self._first, loss)
        self.k = self.inner.k = max(self.inner.k, min(len(self.workers), math.floor(wanted)))
