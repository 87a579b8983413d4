"""Policies that make each version from gradients of the version before, and of no other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.base import Arrival, Decision, OfK, OfWorkers, Order, Policy, Rule, some


class _OfThisVersion(OfK):
    """The server waits for K gradients of the newest version; then workers that still compute are cancelled."""

    fresh_only = True
    after_push: ClassVar[Order]
    """The order for a worker whose gradient is held."""
    what: ClassVar[str]
    """What is counted, in reasons."""

    def arrive(self, push: Arrival) -> Decision:
        if push.version != self.version:
            return self.drop(push, f"computed on version {push.version}, and version {self.version} is the newest")
        decision = self.hold(push, self.after_push, "")
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
        return self.update(reason, late)


class WorkersOfThisVersion(_OfThisVersion, OfWorkers):
    """The gradients are of K distinct workers, which wait for the update."""

    after_push = Order.WAIT
    what = "workers' gradients"
    _rule = Rule.FRESH_WORKERS


class KSync(WorkersOfThisVersion):
    """The server updates once K workers have pushed; the others are cancelled, and all start on the new version."""

    spec = "k-sync"
    k: int
    """Workers whose gradients make an update."""

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return [cls(k=k) for k in some(range(1, workers))]

    @classmethod
    def adapted_k(cls, start: int, workers: int, fallen: float) -> float:
        # K^2 + bK - bP = 0 with b = start^2 / (P - start) * fallen, in a form that stays exact when b is large.
        b = start**2 / (workers - start) * fallen
        return 2 * workers / (1 + math.sqrt(1 + 4 * workers / b)) if b else 0.0


class Backup(WorkersOfThisVersion):
    """The server updates once all but `b` workers have pushed: K-sync with K = P - b, for any number P of workers.

    As in Chen et al. 2016, 'Revisiting Distributed Synchronous SGD'.
    """

    spec = "backup"
    b: int
    """Workers that an update does not wait for."""

    def begin(self) -> None:
        workers = len(self.workers)
        if isinstance(self.b, bool) or not isinstance(self.b, int) or not 0 <= self.b < workers:
            raise UsageError(
                f"b is {self.b!r}, with {workers} workers; it must be a whole number from 0 to {workers - 1}"
            )
        self.k = workers - self.b


class Sync(WorkersOfThisVersion):
    """The server updates once all workers have pushed."""

    spec = "sync"

    def begin(self) -> None:
        self.k = len(self.workers)

    @property
    def spare(self) -> bool:
        return False

    @property
    def lockstep(self) -> bool:
        return True

    def join(self, worker: int) -> Decision:
        decision = super().join(worker)
        self.k = len(self.workers)
        return decision

    def leave(self, worker: int) -> Decision:
        left = self.workers - {worker}
        # Gradients of workers that have left count besides those that all others will push.
        self.k = max(1, len(left) + sum(push.worker not in left for push in self.held))
        return super().leave(worker)

    def _advance(self, reason: str, last: int | None = None) -> Decision:
        decision = super()._advance(reason, last)
        self.k = max(1, len(self.workers))
        return decision


class KBatchSync(_OfThisVersion):
    """The server updates once K minibatches of this version have come, from any workers.

    A worker that has pushed goes on with its next minibatch on the same version; with the update all workers start on
    the new one.
    """

    spec = "k-batch-sync"
    after_push = Order.STAY
    what = "minibatches"
    _rule = Rule.FRESH_MINIBATCHES
    k: int
    """Minibatches that make an update."""

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return [cls(k=k) for k in some(range(2, workers + 1))]
