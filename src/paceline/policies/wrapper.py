"""A policy that lets another one decide."""

from __future__ import annotations

from paceline.policies.base import Arrival, Decision, Policy


class Wrapper(Policy):
    """Passes events to the running policy `inner`, and mirrors its state."""

    def _wrap(self, inner: Policy) -> None:
        """Lets this policy decide from here on."""
        self.inner = inner
        self._mirror(Decision(""))

    def arrive(self, push: Arrival) -> Decision:
        return self._mirror(self.inner.arrive(push))

    def join(self, worker: int) -> Decision:
        return self._mirror(self.inner.join(worker))

    def leave(self, worker: int) -> Decision:
        return self._mirror(self.inner.leave(worker))

    def rest(self, worker: int) -> Decision:
        return self._mirror(self.inner.rest(worker))

    def wake(self, worker: int) -> None:
        self.inner.wake(worker)

    def may_begin(self, worker: int) -> bool:
        return self.inner.may_begin(worker)

    def reconsider(self, why: str) -> Decision:
        return self._mirror(self.inner.reconsider(why))

    def _mirror(self, decision: Decision) -> Decision:
        inner = self.inner
        self.workers, self.version, self.k = inner.workers, inner.version, inner.k
        self.held, self.waiting, self.resting = inner.held, inner.waiting, inner.resting
        return decision
