"""Policies in which a gradient is used whatever version it was computed on."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.policies.base import Decision, Order, Policy, Push, count


class Async(Policy):
    """Every gradient is an update."""

    def arrive(self, push: Push) -> Decision:
        self.held.append(push)
        return self._update("every gradient is an update", {push.worker: Order.RENEW})


class KAsync(Policy):
    """The server waits for K workers; those wait for the update, the rest go on, stale."""

    def __init__(self, workers: Iterable[int], k: int) -> None:
        super().__init__(workers)
        self.k = count("k", k, self.size)

    @property
    def needed(self) -> int:
        """How many gradients make an update: fewer once there are fewer workers than that."""
        return max(1, min(self.k, self.size))

    def arrive(self, push: Push) -> Decision:
        if any(known.worker == push.worker for known in self.held):
            # It did not wait, as it was told to: its older gradient counts, and two of one worker never do.
            return self._drop(push, f"worker {push.worker} has pushed for this update before")
        if len(self.held) + 1 < self.needed:
            return self._hold(push, Order.WAIT, f"{len(self.held) + 1} of {self.needed} workers have pushed")
        self.held.append(push)
        return self._update(f"{len(self.held)} of {self.needed} workers have pushed", {push.worker: Order.RENEW})

    def reconsider(self, why: str) -> Decision:
        if self.held and len(self.held) >= self.needed:
            return self._update(f"{why}, and {len(self.held)} gradients are enough now", {})
        return Decision(why)


class KBatchAsync(Policy):
    """The server waits for K minibatches, from whomever; whoever has pushed goes on at once with the newest version."""

    def __init__(self, workers: Iterable[int], k: int) -> None:
        super().__init__(workers)
        self.k = count("k", k, max(self.size, k if isinstance(k, int) else 0))

    def arrive(self, push: Push) -> Decision:
        if len(self.held) + 1 < self.k:
            return self._hold(push, Order.RENEW, f"{len(self.held) + 1} of {self.k} minibatches are here")
        self.held.append(push)
        return self._update(f"{self.k} of {self.k} minibatches are here", {push.worker: Order.RENEW})


class Bounded(Policy):
    """Every gradient is an update, but nobody runs more than `s` steps ahead of the slowest.

    A worker may start its step n once all have finished step n - 1 - s.
    """

    def __init__(self, workers: Iterable[int], s: int) -> None:
        super().__init__(workers)
        self.s = s
        self.finished = dict.fromkeys(self.workers, 0)
        """Steps that each worker has finished."""

    def arrive(self, push: Push) -> Decision:
        self.held.append(push)
        self.finished[push.worker] = self.finished.get(push.worker, 0) + 1
        use, self.held = tuple(self.held), []
        self.version += 1
        self.waiting.add(push.worker)
        orders = self._released()
        if push.worker in orders:
            reason = "every gradient is an update"
        else:
            orders[push.worker] = Order.WAIT
            slowest = min(self.finished.values())
            reason = f"every gradient is an update; its worker is {self.finished[push.worker] - slowest} steps ahead"
        return Decision(reason, use=use, orders=orders)

    def join(self, worker: int) -> Decision:
        # It starts with the slowest: it can not have been ahead of anybody.
        self.finished[worker] = min(self.finished.values(), default=0)
        return super().join(worker)

    def leave(self, worker: int) -> Decision:
        self.finished.pop(worker, None)
        return super().leave(worker)

    def reconsider(self, why: str) -> Decision:
        return Decision(why, orders=self._released())

    def _released(self) -> dict[int, Order]:
        """Those who need not wait any longer."""
        if not self.finished:
            return {}
        slowest = min(self.finished.values())
        free = sorted(worker for worker in self.waiting if self.finished[worker] - self.s <= slowest)
        self.waiting.difference_update(free)
        return dict.fromkeys(free, Order.RENEW)
