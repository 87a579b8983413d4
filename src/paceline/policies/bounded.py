"""Stale synchronous parallel: asynchronous, but nobody runs away from the slowest."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import UsageError
from paceline.policies.base import Arrival, Decision, Order, Policy


class Ssp(Policy):
    """Every gradient is an update; a worker may start its step n once all have finished step n - 1 - s."""

    def __init__(self, workers: Iterable[int], s: int) -> None:
        super().__init__(workers)
        if isinstance(s, bool) or not isinstance(s, int) or s < 0:
            raise UsageError(f"s is {s!r}; it must be a whole number of steps, 0 or more")
        self.s = s
        self.finished = dict.fromkeys(sorted(self.workers), 0)
        """Steps that each worker has finished."""

    def arrive(self, push: Arrival) -> Decision:
        self.finished[push.worker] += 1
        self.version += 1
        self.waiting.add(push.worker)
        orders = self._released()
        reason = "every gradient is an update"
        if push.worker not in orders:
            orders[push.worker] = Order.WAIT
            ahead = self.finished[push.worker] - self._slowest()
            reason = f"{reason}; its worker is {ahead} steps ahead of the slowest, and {self.s} are allowed"
        return Decision(reason, use=(push,), orders=orders)

    def join(self, worker: int) -> Decision:
        self.finished[worker] = self._slowest()  # it can not have been ahead of anybody
        return super().join(worker)

    def leave(self, worker: int) -> Decision:
        self.finished.pop(worker, None)
        return super().leave(worker)

    def wake(self, worker: int) -> None:
        if worker in self.resting:
            # While it had nothing to do, nobody waited for it.
            self.finished[worker] = max(self.finished[worker], self._slowest())
        super().wake(worker)

    def reconsider(self, why: str) -> Decision:
        return Decision(why, orders=self._released())

    def _slowest(self) -> int:
        """Steps that all have finished, of those who have something to compute."""
        active = [steps for worker, steps in self.finished.items() if worker not in self.resting]
        return min(active, default=max(self.finished.values(), default=0))

    def _released(self) -> dict[int, Order]:
        """Those who need not wait any longer."""
        slowest = self._slowest()
        free = sorted(worker for worker in self.waiting if self.finished[worker] - self.s <= slowest)
        self.waiting.difference_update(free)
        return dict.fromkeys(free, Order.RENEW)
