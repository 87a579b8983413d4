"""K grows as the loss falls: few gradients per update while there is much to gain, many when noise is what is left.

The rule is AdaSync's (Dutta et al., 'Slow and Stale Gradients Can Win the Race'): it minimises the bound on the error at
each moment, for a loss F that was F0 at the start, when K was K0.
"""

from __future__ import annotations

import math

from paceline.policies.asynchronous import KAsync, KBatchAsync
from paceline.policies.base import Decision, Order, Policy, Push
from paceline.policies.synchronous import KBatchSync, KSync

Family = KSync | KBatchSync | KAsync | KBatchAsync


def best_k(family: type[Policy], start: int, workers: int, first: float, now: float) -> float:
    """K that the rule asks for, not rounded, once the loss has gone from `first` to `now`."""
    if now <= 0:
        return float(workers)
    if issubclass(family, KSync) and not issubclass(family, KBatchSync):
        if start >= workers:
            return float(workers)
        b = start**2 * first / ((workers - start) * now)
        return (math.sqrt(b * b + 4 * b * workers) - b) / 2
    return min(float(workers), start * math.sqrt(first / now))


class Adaptive(Policy):
    """Another policy, its K following the loss."""

    def __init__(self, inner: Family) -> None:
        super().__init__(inner.workers)
        self.inner = inner
        self.start = inner.k
        self._first: float | None = None

    def observe(self, loss: float) -> int:
        """The loss is this now; returns K from here on. It never falls, as noise in the loss is not a reason."""
        if math.isfinite(loss):
            if self._first is None:
                self._first = loss
            wanted = best_k(type(self.inner), self.start, self.size, self._first, loss)
            self.inner.k = max(self.inner.k, min(self.size, math.floor(wanted)))
        return self.inner.k

    def arrive(self, push: Push) -> Decision:
        return self._mirror(self.inner.arrive(push))

    def join(self, worker: int) -> Decision:
        return self._mirror(self.inner.join(worker))

    def leave(self, worker: int) -> Decision:
        return self._mirror(self.inner.leave(worker))

    def _mirror(self, decision: Decision) -> Decision:
        self.workers, self.version = self.inner.workers, self.inner.version
        self.held, self.waiting = self.inner.held, self.inner.waiting
        return decision


__all__ = ["Adaptive", "Order", "best_k"]
