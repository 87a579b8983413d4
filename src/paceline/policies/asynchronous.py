"""Policies that use a gradient of any version."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.policies.base import Arrival, Decision, OfK, OfWorkers, Order, Policy, Rule, some


class Async(Policy):
    """The server updates with every push; no worker waits."""

    spec = "async"
    _rule = Rule.STALE_MINIBATCHES

    def arrive(self, push: Arrival) -> Decision:
        self.version += 1
        return Decision("every gradient is an update", use=(push,), orders={push.worker: Order.RENEW})


class KAsync(OfWorkers):
    """The server updates once K workers have pushed, which wait for it; the others go on, stale."""

    spec = "k-async"
    _rule = Rule.STALE_WORKERS
    k: int
    """Workers whose gradients make an update."""

    def arrive(self, push: Arrival) -> Decision:
        decision = self.hold(push, Order.WAIT, f"{len(self.held) + 1} of {self.k} workers have pushed")
        if len(self.held) >= self.needed:
            return self.update(decision.reason, {})
        return decision

    def reconsider(self, why: str) -> Decision:
        if self.held and len(self.held) >= self.needed:
            return self.update(f"{why}, and no more than {len(self.held)} workers can push", {})
        return Decision(why)

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return [cls(k=k) for k in some(range(2, workers))]


class KBatchAsync(OfK):
    """The server updates once K minibatches have come, of any version; no worker waits."""

    spec = "k-batch-async"
    _rule = Rule.STALE_MINIBATCHES
    k: int
    """Minibatches that make an update."""

    def arrive(self, push: Arrival) -> Decision:
        decision = self.hold(push, Order.RENEW, f"{len(self.held) + 1} of {self.k} minibatches are here")
        if len(self.held) >= self.k:
            return self.update(decision.reason, decision.orders)
        return decision

    def reconsider(self, why: str) -> Decision:
        if self.held and not self.computing:
            return self.update(f"{why}, and no more than {len(self.held)} minibatches can come", {})
        return Decision(why)

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return [cls(k=k) for k in some(range(2, workers + 1))]
