"""Policies in which a gradient is used whatever version it was computed on."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.policies.base import Arrival, Decision, OfWorkers, Order, Policy, count


class Async(Policy):
    """Every gradient is an update."""

    def arrive(self, push: Arrival) -> Decision:
        self.version += 1
        return Decision("every gradient is an update", use=(push,), orders={push.worker: Order.RENEW})


class KAsync(OfWorkers):
    """The server waits for K workers; those wait for the update, the rest go on, stale."""

    def arrive(self, push: Arrival) -> Decision:
        decision = self._hold(push, Order.WAIT, f"{len(self.held) + 1} of {self.k} workers have pushed")
        if len(self.held) >= self.needed:
            return self._update(decision.reason, {})
        return decision

    def reconsider(self, why: str) -> Decision:
        if self.held and len(self.held) >= self.needed:
            return self._update(f"{why}, and no more than {len(self.held)} workers can push", {})
        return Decision(why)


class KBatchAsync(Policy):
    """The server waits for K minibatches, from whomever; who has pushed goes on at once with the newest version."""

    def __init__(self, workers: Iterable[int], k: int) -> None:
        super().__init__(workers)
        self.k = count("k", k, self.size)

    def arrive(self, push: Arrival) -> Decision:
        decision = self._hold(push, Order.RENEW, f"{len(self.held) + 1} of {self.k} minibatches are here")
        if len(self.held) >= self.k:
            return self._update(decision.reason, decision.orders)
        return decision

    def reconsider(self, why: str) -> Decision:
        if self.held and not self.computing:
            return self._update(f"{why}, and no more than {len(self.held)} minibatches can come", {})
        return Decision(why)
