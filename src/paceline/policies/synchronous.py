"""Policies in which a version is made from gradients of the version before, and of no other."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.policies.base import Decision, Order, Policy, Push, count


class KSync(Policy):
    """The server waits for K workers; the rest are cancelled, and all start on the new version."""

    def __init__(self, workers: Iterable[int], k: int) -> None:
        super().__init__(workers)
        self.k = count("k", k, self.size)

    @property
    def needed(self) -> int:
        """How many gradients make an update: fewer once there are fewer workers than that."""
        return max(1, min(self.k, self.size))

    def arrive(self, push: Push) -> Decision:
        if push.version != self.version:
            return self._drop(push, f"computed on version {push.version}, and version {self.version} is the newest")
        if len(self.held) + 1 < self.needed:
            return self._hold(push, Order.WAIT, f"{len(self.held) + 1} of {self.needed} gradients are here")
        self.held.append(push)
        self.waiting.add(push.worker)
        return self._advance(f"{len(self.held)} of {self.needed} gradients are here")

    def reconsider(self, why: str) -> Decision:
        if self.held and len(self.held) >= self.needed:
            return self._advance(f"{why}, and {len(self.held)} gradients are enough now")
        return Decision(why)

    def _advance(self, reason: str) -> Decision:
        late = dict.fromkeys(sorted(self.workers - self.waiting), Order.CANCEL)
        return self._update(reason, late)


class Sync(KSync):
    """The server waits for all workers."""

    def __init__(self, workers: Iterable[int]) -> None:
        known = set(workers)
        super().__init__(known, len(known))

    @property
    def needed(self) -> int:
        return max(1, self.size)


class KBatchSync(KSync):
    """The server waits for K minibatches, from whomever; whoever has pushed goes on with the next minibatch meanwhile."""

    def __init__(self, workers: Iterable[int], k: int) -> None:
        Policy.__init__(self, workers)
        self.k = count("k", k, max(self.size, k if isinstance(k, int) else 0))

    @property
    def needed(self) -> int:
        return self.k

    def arrive(self, push: Push) -> Decision:
        if push.version != self.version:
            return self._drop(push, f"computed on version {push.version}, and version {self.version} is the newest")
        if len(self.held) + 1 < self.needed:
            return self._hold(push, Order.STAY, f"{len(self.held) + 1} of {self.needed} minibatches are here")
        self.held.append(push)
        orders = dict.fromkeys(sorted(self.workers), Order.CANCEL)
        orders[push.worker] = Order.RENEW
        return self._update(f"{self.needed} of {self.needed} minibatches are here", orders)

    def reconsider(self, why: str) -> Decision:
        return Decision(why)
