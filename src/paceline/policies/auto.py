"""A policy that starts as async, and becomes another one once the workers' paces are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.errors import UsageError
from paceline.policies.asynchronous import Async
from paceline.policies.base import Arrival, Decision, Order, Policy, parse_policy
from paceline.policies.wrapper import Wrapper


class Auto(Wrapper):
    """Asynchronous for `steps` steps of every worker, which shows their paces; then the policy that suits these."""

    spec = "auto"
    steps: int = 12
    """Steps of every worker that are measured before the choice."""

    def begin(self) -> None:
        self._wrap(Async()._started(self.workers))
        self._next: Policy | None = None
        self.chosen = False
        """True once it has become another policy."""

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return []  # it becomes one of the others

    @property
    def cancels(self) -> bool:
        return True  # the policy that it becomes may

    @property
    def spare(self) -> bool:
        return self.inner.spare

    def observe(self, loss: float) -> None:
        self.inner.observe(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": str(self.inner), "inner": self.inner.state_dict()} if self.chosen else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        try:
            inner = parse_policy(state["chosen"]).for_workers(sorted(self.workers))
        except UsageError:
            return  # it does not suit these workers, whose paces are measured anew
        inner.load_state_dict(state["inner"])
        self.chosen = True
        self._wrap(inner)

    @property
    def decided(self) -> bool:
        """True once it is known which policy it becomes."""
        return self.chosen or self._next is not None

    def become(self, policy: Policy) -> None:
        """Goes on as this policy from the next update on."""
        self._next = policy

    def arrive(self, push: Arrival) -> Decision:
        decision = super().arrive(push)
        if self._next is None or not decision.use or self.held:
            return decision
        before, after = self.inner, self._next.for_workers(sorted(self.workers))
        after.version, after.resting = before.version, set(before.resting)
        self._next, self.chosen = None, True
        self._wrap(after)
        orders = decision.orders
        if after.fresh_only:
            # The other workers compute on an older version.
            late = self.workers - before.waiting - before.resting - set(orders)
            orders = {**orders, **dict.fromkeys(sorted(late), Order.CANCEL)}
        return Decision(decision.reason, decision.use, decision.drop, orders, decision.together)
