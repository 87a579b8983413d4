"""K grows as the loss falls: few gradients per update while there is much to gain, many when noise is what is left.

The rule is AdaSync's (Dutta et al., 'Slow and Stale Gradients Can Win the Race'): it minimises the bound on the error
at each moment, for a loss F that was F0 at the start, when K was K0.
"""

from __future__ import annotations

import math

from paceline.policies.around import Around
from paceline.policies.asynchronous import KAsync, KBatchAsync
from paceline.policies.base import Policy
from paceline.policies.synchronous import KBatchSync, KSync

Family = KSync | KBatchSync | KAsync | KBatchAsync


def best_k(family: type[Policy], start: int, workers: int, first: float, now: float) -> float:
    """K that the rule asks for, not rounded, once the loss has gone from `first` to `now`."""
    if now <= 0 or start >= workers or not math.isfinite(fallen := max(first, 0.0) / now):
        return float(workers)
    if issubclass(family, KSync):
        # K^2 + bK - bP = 0 with b = start^2 / (P - start) * fallen, in a form that stays exact when b is large.
        b = start**2 / (workers - start) * fallen
        return 2 * workers / (1 + math.sqrt(1 + 4 * workers / b)) if b else 0.0
    return min(float(workers), start * math.sqrt(fallen))


class Adaptive(Around):
    """Another policy, its K following the loss."""

    inner: Family

    def __init__(self, inner: Family) -> None:
        super().__init__(inner)
        self.start = inner.k
        self.fresh_only = inner.fresh_only
        self._first: float | None = None
        self._spare = inner.spare

    @property
    def spare(self) -> bool:
        return self._spare

    def observe(self, loss: float) -> None:
        """K never falls: noise in the loss is no reason to."""
        if not math.isfinite(loss):
            return
        if self._first is None:
            self._first = loss
        wanted = best_k(type(self.inner), self.start, self.size, self._first, loss)
        self.k = self.inner.k = max(self.inner.k, min(self.size, math.floor(wanted)))
