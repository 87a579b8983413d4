"""Policies in which a version is made from gradients of the version before, and of no other."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.policies.base import Arrival, Decision, OfK, OfWorkers, Order


class _OfThisVersion(OfK):
    """The server waits for K gradients of the newest version; then whoever still computes is cancelled."""

    fresh_only = True
    after_push: Order
    """What a worker does that has pushed and whose gradient is held."""
    what: str

    def arrive(self, push: Arrival) -> Decision:
        if push.version != self.version:
            return self._drop(push, f"computed on version {push.version}, and version {self.version} is the newest")
        decision = self._hold(push, self.after_push, "")
        if len(self.held) >= self.needed:
            return self._advance(f"{len(self.held)} of {self.k} {self.what} are here", push.worker)
        return Decision(f"{len(self.held)} of {self.k} {self.what} are here", orders=decision.orders)

    def reconsider(self, why: str) -> Decision:
        if self.held and len(self.held) >= self.needed:
            return self._advance(f"{why}, and no more than {len(self.held)} {self.what} can come")
        return Decision(why)

    def _advance(self, reason: str, last: int | None = None) -> Decision:
        late = dict.fromkeys(sorted(self.workers - self.waiting - self.resting), Order.CANCEL)
        if last is not None:
            late[last] = Order.RENEW
        return self._update(reason, late)


class KSync(_OfThisVersion, OfWorkers):
    """The server waits for K workers; the rest are cancelled, and all start on the new version."""

    after_push = Order.WAIT
    what = "workers' gradients"


class Sync(KSync):
    """The server waits for all workers."""

    def __init__(self, workers: Iterable[int]) -> None:
        known = set(workers)
        super().__init__(known, len(known))

    @property
    def spare(self) -> bool:
        return False

    @property
    def lockstep(self) -> bool:
        return True

    def join(self, worker: int) -> Decision:
        decision = super().join(worker)
        self.k = self.size
        return decision

    def leave(self, worker: int) -> Decision:
        left = self.workers - {worker}
        # What was pushed by those who are gone counts besides what all others will bring.
        self.k = max(1, len(left) + sum(push.worker not in left for push in self.held))
        return super().leave(worker)

    def _advance(self, reason: str, last: int | None = None) -> Decision:
        decision = super()._advance(reason, last)
        self.k = max(1, self.size)
        return decision


class KBatchSync(_OfThisVersion):
    """The server waits for K minibatches, from whomever; who has pushed goes on with the next minibatch meanwhile."""

    after_push = Order.STAY
    what = "minibatches"

    @property
    def needed(self) -> int:
        """Fewer than K once nobody computes any more."""
        return self.k if self.computing else 1
