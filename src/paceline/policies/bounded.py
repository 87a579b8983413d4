"""Stale synchronous parallel: asynchronous, with a bound on how far a worker is ahead of the slowest."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import UsageError
from paceline.policies.base import Arrival, Decision, Order, Policy, Rule, Timing


class Ssp(Policy):
    """The server updates with every push; a worker may start step n once all have finished step n - 1 - s."""

    spec = "ssp"
    s: int
    """Steps that a worker may be ahead of the slowest."""

    def begin(self) -> None:
        if isinstance(self.s, bool) or not isinstance(self.s, int) or self.s < 0:
            raise UsageError(f"s is {self.s!r}; it must be a whole number of steps, 0 or more")
        self.finished = dict.fromkeys(sorted(self.workers), 0)
        """Steps that each worker has finished."""

    @property
    def timing(self) -> Timing:
        return Timing(Rule.BOUNDED, self.s)

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return [cls(s=s) for s in (1, 3, 8)]

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
        self.finished[worker] = self._slowest()  # as if it had been the slowest
        return super().join(worker)

    def leave(self, worker: int) -> Decision:
        self.finished.pop(worker, None)
        return super().leave(worker)

    def wake(self, worker: int) -> None:
        if worker in self.resting:
            # The others did not wait for it while it rested. They do again, but need not until it has caught up.
            self.finished[worker] = max(self.finished[worker], max(self.finished.values()) - self.s - 1)
        super().wake(worker)

    def may_begin(self, worker: int) -> bool:
        return self.finished[worker] - self.s <= self._slowest()

    def reconsider(self, why: str) -> Decision:
        return Decision(why, orders=self._released())

    def _slowest(self) -> int:
        """Steps that all workers with something to compute have finished."""
        active = [steps for worker, steps in self.finished.items() if worker not in self.resting]
        return min(active, default=max(self.finished.values(), default=0))

    def _released(self) -> dict[int, Order]:
        """Workers that need not wait any longer."""
        slowest = self._slowest()
        free = sorted(worker for worker in self.waiting if self.finished[worker] - self.s <= slowest)
        self.waiting.difference_update(free)
        return dict.fromkeys(free, Order.RENEW)
