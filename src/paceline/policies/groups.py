"""Groups that are synchronous inside, and push as one worker under another policy."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import UsageError
from paceline.policies.asynchronous import Async
from paceline.policies.base import Arrival, Decision, Order, Policy, Rule, Timing, count, parse_policy


class Groups(Policy):
    """Workers in groups, in the order of their ranks, which push as one under the policy `between`.

    If `size` does not divide the number of workers, there is one group more, and they are as even as possible.
    """

    spec = "groups"
    size: int
    """Workers of a group, at most."""
    between: Policy | str = Async()
    """The policy between groups, which push as one worker each."""
    staleness: int | None = None
    """A group's gradient of a larger staleness is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            between = parse_policy(self.between)
        except UsageError as error:
            raise UsageError(f"option 'between' of strategy 'groups': {error}") from None
        if isinstance(between, Groups):
            raise UsageError(
                f"option 'between' of strategy 'groups' is '{between}'; it must be a policy without groups"
            )
        own = [name for name in between._given() if name in Policy.options()]
        if own:
            raise UsageError(
                f"option 'between' of strategy 'groups' is '{between}'; '{own[0]}' is an option of the groups"
            )
        self.__dict__["between"] = between

    def begin(self) -> None:
        ranks, size = sorted(self.workers), self.size
        count("size", size, len(ranks))
        if self.staleness is not None and self.staleness < 0:
            raise UsageError(f"staleness is {self.staleness}; it must be a whole number of updates, 0 or more")
        groups = self.group_count(len(ranks))
        self.group_of = {rank: number * groups // len(ranks) for number, rank in enumerate(ranks)}
        for rank, group in self.group_of.items():
            self.members.setdefault(group, set()).add(rank)
        assert isinstance(self.between, Policy)
        self.inner = self.between._started(sorted(self.members))
        """The running policy between the groups."""
        self.k = self.inner.k
        self._inside: dict[int, list[Arrival]] = {group: [] for group in self.members}
        """By group, pushed gradients of its members while it is not complete."""
        self._pushed: dict[int, tuple[Arrival, ...]] = {}
        """By the ticket of a group's push, the gradients of its members."""

    def group_count(self, workers: int) -> int:
        return -(-workers // self.size)

    @property
    def timing(self) -> Timing | None:
        even = self._started_with % self.size == 0
        return Timing(Rule.ASYNC_GROUPS, self.size) if even and self.between == Async() else None

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        return [cls(size=size) for size in range(2, workers) if workers % size == 0]

    @property
    def spare(self) -> bool:
        return self.inner.spare

    @property
    def cancels(self) -> bool:
        return self.inner.cancels

    @property
    def lockstep(self) -> bool:
        return self.inner.lockstep or len(self.members) == 1

    def observe(self, loss: float) -> None:
        self.inner.observe(loss)
        self.k = self.inner.k

    def arrive(self, push: Arrival) -> Decision:
        group = self.group_of[push.worker]
        if self.inner.fresh_only and push.version != self.version:
            return self.drop(push, f"computed on version {push.version}, and version {self.version} is the newest")
        inside = self._inside[group]
        inside.append(push)
        self.held.append(push)
        self.waiting.add(push.worker)
        if self._missing(group) or group in self.inner.waiting:
            here = f"{len(inside)} of {len(inside) + self._missing(group)} of group {group} have pushed"
            return Decision(here, orders={push.worker: Order.WAIT})
        return self._push(group)

    def leave(self, worker: int) -> Decision:
        super().leave(worker)
        group = self.group_of[worker]
        self.members[group].discard(worker)
        return self._fewer(group, f"worker {worker} has gone")

    def rest(self, worker: int) -> Decision:
        self.resting.add(worker)
        return self._fewer(self.group_of[worker], f"worker {worker} has nothing to compute")

    def wake(self, worker: int) -> None:
        super().wake(worker)
        self.inner.wake(self.group_of[worker])

    def may_begin(self, worker: int) -> bool:
        return self.inner.may_begin(self.group_of[worker])

    def join(self, worker: int) -> Decision:
        """A worker joins the smallest group; there are never more groups than at the start."""
        group = min(self.members, key=lambda group: (len(self.members[group]), group))
        was_empty = not self.members[group]
        self.group_of[worker] = group
        self.members[group].add(worker)
        if was_empty:
            self.inner.join(group)
        return super().join(worker)

    def _missing(self, group: int) -> int:
        """How many workers of a group compute."""
        return len(self.members[group] - self.waiting - self.resting)

    def _fewer(self, group: int, why: str) -> Decision:
        """A member computes no longer: the group may be complete without it, or no member may be left that computes."""
        pushed = Decision(why)
        if self._inside[group] and not self._missing(group) and group not in self.inner.waiting:
            pushed = self._push(group)
        if self.members[group] - self.resting:
            return pushed
        ended = self._spread(self.inner.rest(group) if self.members[group] else self.inner.leave(group))
        return Decision(
            pushed.reason if pushed.use else ended.reason if ended.use else why,
            use=pushed.use + ended.use,
            drop=pushed.drop + ended.drop,
            orders=pushed.orders | ended.orders,
            together=pushed.together,
        )

    def _push(self, group: int) -> Decision:
        together = tuple(sorted(self._inside[group], key=lambda push: push.worker))
        self._inside[group] = []
        one = Arrival(together[-1].ticket, group, min(push.version for push in together))
        self._pushed[one.ticket] = together
        stale = self.inner.version - one.version
        if self.staleness is not None and stale > self.staleness:
            reason = f"the gradient of group {group} is {stale} updates old, and {self.staleness} are allowed"
            return self._spread(Decision(reason, drop=(one,), orders={group: Order.RENEW}))
        return self._spread(self.inner.arrive(one), together)

    def _spread(self, decision: Decision, together: tuple[Arrival, ...] = ()) -> Decision:
        """A decision about groups as one about their members."""
        self.version = self.inner.version
        use = tuple(push for one in decision.use for push in self._pushed.pop(one.ticket))
        drop = tuple(push for one in decision.drop for push in self._pushed.pop(one.ticket))
        orders: dict[int, Order] = {}
        for group, order in decision.orders.items():
            for worker in sorted(self.members[group] - (self.resting - self.waiting)):
                orders[worker] = order
                if order is Order.WAIT:
                    self.waiting.add(worker)
                else:
                    self.waiting.discard(worker)
            if order is not Order.WAIT:
                # Gradients of a group that starts anew are of the version before.
                drop += tuple(self._inside[group])
                self._inside[group] = []
        gone = {push.ticket for push in (*use, *drop)}
        self.held[:] = [push for push in self.held if push.ticket not in gone]
        return Decision(decision.reason, use=use, drop=drop, orders=orders, together=together)
