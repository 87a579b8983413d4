"""A team whose workers push, rest, wake and leave, and which checks at every turn what must always hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from helpers.policy_table import WAIT, Worker, policy
from paceline.policies import Arrival, Decision


class Team:
    """Workers under the policy of a spec, who do what they are told."""

    def __init__(self, spec: str, workers: int) -> None:
        self.policy = policy(spec, workers)
        self.inner = spec.rpartition("between=")[2].removeprefix("adaptive:of=").partition(",")[0]
        name = self.inner.partition(":")[0]
        self.distinct = name in ("sync", "k-sync", "k-async")
        self.each = name in ("async", "ssp")
        self.fresh = name in ("sync", "k-sync", "k-batch-sync")
        self.size = int(spec.partition("size=")[2].partition(",")[0] or 1)
        self.here = {rank: Worker() for rank in range(workers)}
        self.resting: set[int] = set()
        self.open: dict[int, Arrival] = {}
        """Pushes that are neither used nor dropped."""
        self.units: dict[int, tuple[int, ...]] = {}
        """By ticket, the tickets that count as one with it: those of a whole group."""
        self.version = self.pushed = 0
        self.released: set[int] = set()

    # -- who may do what -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> list[int]:
        return sorted(self.here.keys() - self.resting)

    @property
    def waiting(self) -> set[int]:
        return {rank for rank, worker in self.here.items() if worker.waits}

    @property
    def computing(self) -> list[int]:
        return [rank for rank in self.active if not self.here[rank].waits]

    # -- what happens --------------------------------------------------------------------------------------------------

    def push(self, rank: int, late: bool = False) -> Decision:
        worker = self.here[rank]
        assert rank in self.computing
        push = Arrival(self.pushed, rank, min(worker.late) if late and worker.late else worker.version)
        self.pushed += 1
        worker.pushed()
        self.open[push.ticket] = push
        return self._happens(lambda: self.policy.arrive(push))

    def rest(self, rank: int) -> Decision:
        self.resting.add(rank)
        self.here[rank].pushed()  # nothing of it is on its way
        return self._happens(lambda: self.policy.rest(rank))

    def wake(self, rank: int) -> None:
        self.resting.discard(rank)
        self.here[rank].version = self.version
        self.policy.wake(rank)
        self._nobody_waits_for_ever()

    def leave(self, rank: int) -> Decision:
        del self.here[rank]
        self.resting.discard(rank)
        return self._happens(lambda: self.policy.leave(rank))

    def _happens(self, event: Callable[[], Decision]) -> Decision:
        k, before = self.policy.k, self.version
        decision = event()
        assert len(decision.reason.split()) >= 3
        assert "\n" not in decision.reason
        if decision.together:
            one = tuple(push.ticket for push in decision.together)
            self.units |= dict.fromkeys(one, one)
        for push in (*decision.use, *decision.drop):
            assert self.open.pop(push.ticket) == push  # never twice, and never what did not come
        self.version += bool(decision.use)
        assert self.policy.version == self.version
        if decision.use:
            self._is_what_an_update_may_be(decision.use, k)
            assert not self.fresh or {push.version for push in decision.use} == {before}
        for rank, order in decision.orders.items():
            self.here[rank].follow(order, self.version)
            if order is not WAIT:
                self.released.add(rank)
        assert self.policy.waiting == self.waiting
        self._nobody_waits_for_ever()
        return decision

    def _is_what_an_update_may_be(self, use: tuple[Arrival, ...], k: int) -> None:
        units = {self.units.get(push.ticket, (push.ticket,)) for push in use}
        assert sorted(ticket for unit in units for ticket in unit) == sorted(push.ticket for push in use)
        pushers = [{push.worker // self.size for push in use if push.ticket in unit} for unit in units]
        assert all(len(members) == 1 for members in pushers)
        others = {rank // self.size for rank in self.active}
        if self.each:
            assert len(units) == 1
        elif self.distinct:
            who = set().union(*pushers)
            assert len(who) == len(units), "one of them counts twice"
            assert len(who) == k or (len(who) < k and others <= who), "others could still push"
        else:
            assert len(units) == k or (len(units) < k and not others), "others could still push"

    def _nobody_waits_for_ever(self) -> None:
        assert self.computing or not self.active, "all who have something to compute wait"

    # -- whole runs ----------------------------------------------------------------------------------------------------

    def live(self, numbers: Iterable[int], *, rest_at_any_time: bool = False, leave: bool = True) -> None:
        """Each number is one event. Workers rest between steps, or `rest_at_any_time`: also while they wait."""
        for number in numbers:
            kind, pick = number % 20, number // 20
            if kind == 19 and leave and len(self.here) > 1 and pick % 3 == 0:
                self.leave(sorted(self.here)[pick % len(self.here)])
            elif kind == 18 and self.resting:
                self.wake(sorted(self.resting)[pick % len(self.resting)])
            elif kind in (16, 17) and self.active:
                resting = self.active if rest_at_any_time else self.computing
                self.rest(resting[pick % len(resting)])
            elif self.computing:
                self.push(self.computing[pick % len(self.computing)], late=kind % 4 == 3)

    def all_push_in_turn(self, rounds: int) -> None:
        for _ in range(rounds):
            for rank in self.computing:
                if rank in self.computing:
                    self.push(rank)

    def end_epoch(self, picks: Iterable[int] = ()) -> None:
        """All come to rest, each once it need not wait."""
        order = iter(picks)
        while self.active:
            self.rest(self.computing[next(order, 0) % len(self.computing)])
        assert self.open == {}
        assert self.waiting == set() == self.policy.waiting

    def begin_epoch(self, order: Iterable[int] = ()) -> None:
        for rank in [*order, *sorted(self.resting)]:
            if rank in self.resting:
                self.wake(rank)
