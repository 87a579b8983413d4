"""Groups that are synchronous inside, and push as one worker under another policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.errors import UsageError
from paceline.policies.base import Arrival, Decision, Order, Policy


class Groups(Policy):
    """Workers in groups of so many, in the order of their ranks; between the groups another policy decides."""

    def __init__(
        self,
        workers: Iterable[int],
        size: int,
        between: Callable[[Iterable[int]], Policy],
        staleness: int | None = None,
    ) -> None:
        super().__init__(workers)
        ranks = sorted(self.workers)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or not 1 <= size <= len(ranks) or len(ranks) % size:
            allowed = [str(n) for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
            raise UsageError(
                f"size is {size!r}, with {len(ranks)} workers; groups are of equal size, so it must be "
                f"{' or '.join(allowed)}"
            )
        if staleness is not None and staleness < 0:
            raise UsageError(f"staleness is {staleness}; it must be a whole number of updates, 0 or more")
        self.of = {rank: number // size for number, rank in enumerate(ranks)}
        """The group that each worker is in."""
        self.members: dict[int, set[int]] = {}
        for rank, group in self.of.items():
            self.members.setdefault(group, set()).add(rank)
        self.between = between(sorted(self.members))
        self.staleness = staleness
        """A group's gradient is dropped if it is older than that."""
        self.k = self.between.k
        self._inside: dict[int, list[Arrival]] = {group: [] for group in self.members}
        """What the members of a group that is not complete have pushed."""
        self._pushed: dict[int, tuple[Arrival, ...]] = {}
        """By the ticket under which a group pushed: what its members did."""

    @property
    def spare(self) -> bool:
        return self.between.spare

    @property
    def lockstep(self) -> bool:
        return self.between.lockstep or len(self.members) == 1

    def observe(self, loss: float) -> None:
        self.between.observe(loss)
        self.k = self.between.k

    def arrive(self, push: Arrival) -> Decision:
        group = self.of[push.worker]
        if self.between.fresh_only and push.version != self.version:
            return self._drop(push, f"computed on version {push.version}, and version {self.version} is the newest")
        inside = self._inside[group]
        inside.append(push)
        self.held.append(push)
        self.waiting.add(push.worker)
        if self._missing(group) or group in self.between.waiting:
            here = f"{len(inside)} of {len(inside) + self._missing(group)} of group {group} have pushed"
            return Decision(here, orders={push.worker: Order.WAIT})
        return self._push(group)

    def leave(self, worker: int) -> Decision:
        super().leave(worker)
        group = self.of[worker]
        self.members[group].discard(worker)
        return self._fewer(group, f"worker {worker} has gone")

    def rest(self, worker: int) -> Decision:
        self.resting.add(worker)
        return self._fewer(self.of[worker], f"worker {worker} has nothing to compute")

    def wake(self, worker: int) -> None:
        super().wake(worker)
        self.between.wake(self.of[worker])

    def join(self, worker: int) -> Decision:
        """It comes into the smallest group; there are never more groups than at the start."""
        group = min(self.members, key=lambda group: (len(self.members[group]), group))
        was_empty = not self.members[group]
        self.of[worker] = group
        self.members[group].add(worker)
        if was_empty:
            self.between.join(group)
        return super().join(worker)

    def _missing(self, group: int) -> int:
        """How many of a group compute."""
        return len(self.members[group] - self.waiting - self.resting)

    def _fewer(self, group: int, why: str) -> Decision:
        """A member computes no longer: the group may be complete without it, or have nobody left who computes."""
        pushed = Decision(why)
        if self._inside[group] and not self._missing(group) and group not in self.between.waiting:
            pushed = self._push(group)
        if self.members[group] - self.resting:
            return pushed
        ended = self._spread(self.between.rest(group) if self.members[group] else self.between.leave(group))
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
        stale = self.between.version - one.version
        if self.staleness is not None and stale > self.staleness:
            reason = f"the gradient of group {group} is {stale} updates old, and {self.staleness} are allowed"
            return self._spread(Decision(reason, drop=(one,), orders={group: Order.RENEW}))
        return self._spread(self.between.arrive(one), together)

    def _spread(self, decision: Decision, together: tuple[Arrival, ...] = ()) -> Decision:
        """What is said of groups, said of their members."""
        self.version = self.between.version
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
                # What came of a group that starts anew is of the version before.
                drop += tuple(self._inside[group])
                self._inside[group] = []
        gone = {push.ticket for push in (*use, *drop)}
        self.held = [push for push in self.held if push.ticket not in gone]
        return Decision(decision.reason, use=use, drop=drop, orders=orders, together=together)
