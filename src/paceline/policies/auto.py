"""Begins as one policy and goes on as another, once somebody has seen enough to choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.policies.around import Around
from paceline.policies.asynchronous import Async
from paceline.policies.base import Arrival, Decision, Order, Policy


class Auto(Around):
    """Asynchronous at first, so that every worker shows its own pace."""

    def __init__(self, workers: Iterable[int]) -> None:
        super().__init__(Async(workers))
        self._next: Callable[[Iterable[int]], Policy] | None = None
        self.chosen = False
        """Whether it has become what it was told to be."""

    @property
    def cancels(self) -> bool:
        return True  # what is chosen may

    @property
    def spare(self) -> bool:
        return self.inner.spare

    def observe(self, loss: float) -> None:
        self.inner.observe(loss)

    def become(self, policy: Callable[[Iterable[int]], Policy]) -> None:
        """Go on as this one from the next update on."""
        self._next = policy

    def arrive(self, push: Arrival) -> Decision:
        decision = super().arrive(push)
        if self._next is None or not decision.use or self.held:
            return decision
        before, after = self.inner, self._next(sorted(self.workers))
        after.version, after.resting = before.version, set(before.resting)
        self._next, self.chosen = None, True
        self._take(after)
        orders = decision.orders
        if after.fresh_only:
            # What is being computed is of an older version.
            late = self.workers - before.waiting - before.resting - set(orders)
            orders = {**orders, **dict.fromkeys(sorted(late), Order.CANCEL)}
        return Decision(decision.reason, decision.use, decision.drop, orders, decision.together)
