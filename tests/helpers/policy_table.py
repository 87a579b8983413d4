"""The table of policies read word by word, and a team of pretended workers that does what it is told.

Nothing here is clever: a row of the table keeps all that has come and counts it again at every push.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.policies import Arrival, Decision, Order, Policy, parse_policy

STAY, RENEW, WAIT, CANCEL = Order.STAY, Order.RENEW, Order.WAIT, Order.CANCEL


def policy(spec: str, workers: int) -> Policy:
    return parse_policy(spec).for_workers(range(workers))


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What the table says happens when a gradient comes."""

    use: tuple[Arrival, ...] = ()
    drop: tuple[Arrival, ...] = ()
    orders: dict[int, Order] = field(default_factory=dict)


class Row:
    """A row of the table, for so many workers."""

    fresh_only = False

    def __init__(self, workers: int, k: int = 1) -> None:
        self.everybody = tuple(range(workers))
        self.k = k
        self.version = 0
        self.here: tuple[Arrival, ...] = ()
        """What has come since the last update."""

    def push(self, push: Arrival) -> Answer:
        raise NotImplementedError

    def observe(self, loss: float) -> None:
        pass

    def key(self) -> object:
        """All that the future depends on, versions counted back from the newest."""
        return self.k, tuple(sorted((push.worker, self.version - push.version) for push in self.here))

    def clone(self) -> Row:
        return copy.copy(self)

    def who(self) -> set[int]:
        return {push.worker for push in self.here}

    def update(self, orders: dict[int, Order]) -> Answer:
        used, self.here = self.here, ()
        self.version += 1
        return Answer(use=used, orders=orders)


class KSyncRow(Row):
    """K distinct workers have pushed a gradient of this version; they wait, and the others are cancelled."""

    fresh_only = True

    def push(self, push: Arrival) -> Answer:
        if push.version != self.version:
            return Answer(drop=(push,), orders={push.worker: RENEW})
        self.here += (push,)
        if len(self.who()) < self.k:
            return Answer(orders={push.worker: WAIT})
        return self.update({worker: RENEW if worker in self.who() else CANCEL for worker in self.everybody})


class KBatchSyncRow(Row):
    """K minibatches of this version from anyone; who has pushed goes on with it, until all start on the new one."""

    fresh_only = True

    def push(self, push: Arrival) -> Answer:
        if push.version != self.version:
            return Answer(drop=(push,), orders={push.worker: RENEW})
        self.here += (push,)
        if len(self.here) < self.k:
            return Answer(orders={push.worker: STAY})
        # Only whoever has pushed just now has no step under way.
        return self.update({worker: RENEW if worker == push.worker else CANCEL for worker in self.everybody})


class AsyncRow(Row):
    """Every push; the others go on, stale."""

    def push(self, push: Arrival) -> Answer:
        self.here = (push,)
        return self.update({push.worker: RENEW})


class KAsyncRow(Row):
    """K distinct workers, of whatever version; they wait, the others go on, stale."""

    def push(self, push: Arrival) -> Answer:
        self.here += (push,)
        if len(self.who()) < self.k:
            return Answer(orders={push.worker: WAIT})
        return self.update(dict.fromkeys(self.who(), RENEW))


class KBatchAsyncRow(Row):
    """K minibatches, of whatever version; whoever has pushed pulls the newest and goes on at once."""

    def push(self, push: Arrival) -> Answer:
        self.here += (push,)
        return self.update({push.worker: RENEW}) if len(self.here) == self.k else Answer(orders={push.worker: RENEW})


class SspRow(Row):
    """Every push; step n may start once all have finished step n - 1 - s."""

    def __init__(self, workers: int, s: int) -> None:
        super().__init__(workers)
        self.s = s
        self.finished = (0,) * workers
        self.asking: frozenset[int] = frozenset()
        """Who would start its next step if it might."""

    def push(self, push: Arrival) -> Answer:
        self.finished = tuple(steps + (worker == push.worker) for worker, steps in enumerate(self.finished))
        self.asking |= {push.worker}
        started = {worker for worker in self.asking if self.may_start(worker, self.finished[worker] + 1)}
        self.asking -= started
        self.here = (push,)
        return self.update({push.worker: WAIT} | dict.fromkeys(started, RENEW))

    def may_start(self, worker: int, n: int) -> bool:
        return all(steps >= n - 1 - self.s for steps in self.finished)

    def key(self) -> object:
        return tuple(steps - min(self.finished) for steps in self.finished), self.asking


class GroupsRow(Row):
    """A group agrees inside itself, and pushes as one worker under the policy between the groups."""

    def __init__(self, sizes: Sequence[int], between: Row, staleness: float = math.inf) -> None:
        super().__init__(sum(sizes))
        self.group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        self.between, self.staleness = between, staleness
        self.pushed: tuple[tuple[Arrival, ...], ...] = ()
        """What members have pushed, by the push of their group, for those that are not used yet."""

    def push(self, push: Arrival) -> Answer:
        if self.between.fresh_only and push.version != self.version:
            return Answer(drop=(push,), orders={push.worker: RENEW})
        self.here += (push,)
        group = self.group_of[push.worker]
        inside = tuple(one for one in self.here if self.group_of[one.worker] == group)
        if len(inside) < len(self.members(group)):
            return Answer(orders={push.worker: WAIT})
        self.here = tuple(one for one in self.here if one not in inside)
        if self.version - push.version > self.staleness:
            return Answer(drop=inside, orders=dict.fromkeys(self.members(group), RENEW))
        self.pushed += (inside,)
        return self.said_of_members(self.between.push(Arrival(push.ticket, group, push.version)))

    def said_of_members(self, answer: Answer) -> Answer:
        self.version = self.between.version
        use = tuple(push for one in answer.use for push in self.took(one.worker))
        orders = {worker: order for group, order in answer.orders.items() for worker in self.members(group)}
        late = tuple(push for push in self.here if orders.get(push.worker) is CANCEL)
        self.here = tuple(push for push in self.here if push not in late)
        return Answer(use=use, drop=late, orders=orders)

    def took(self, group: int) -> tuple[Arrival, ...]:
        mine = next(pushes for pushes in self.pushed if self.group_of[pushes[0].worker] == group)
        self.pushed = tuple(pushes for pushes in self.pushed if pushes is not mine)
        return mine

    def members(self, group: int) -> list[int]:
        return [worker for worker, its in enumerate(self.group_of) if its == group]

    def clone(self) -> Row:
        other = copy.copy(self)
        other.between = self.between.clone()
        return other

    def key(self) -> object:
        return super().key(), self.between.key()


class AdaptiveRow(Row):
    """As its inner row, K growing as the loss falls."""

    def __init__(self, inner: Row) -> None:
        self.inner, self.start, self.first = inner, inner.k, math.nan
        self.everybody, self.version = inner.everybody, 0

    def push(self, push: Arrival) -> Answer:
        answer = self.inner.push(push)
        self.version = self.inner.version
        return answer

    def observe(self, loss: float) -> None:
        self.first = loss if math.isnan(self.first) else self.first
        fallen = self.first / loss
        workers = len(self.everybody)
        wanted = self.start * math.sqrt(fallen)
        if isinstance(self.inner, KSyncRow) and self.start < workers:
            b = self.start**2 * fallen / (workers - self.start)
            wanted = -b / 2 + math.sqrt(b * b / 4 + b * workers)
        self.inner.k = max(self.inner.k, min(workers, int(wanted)))

    def clone(self) -> Row:
        other = copy.copy(self)
        other.inner = self.inner.clone()
        return other

    def key(self) -> object:
        return self.inner.key(), self.version


# -- workers who do what they are told -------------------------------------------------------------------------------


@dataclass
class Worker:
    version: int = 0
    """That it computes on."""
    late: frozenset[int] = frozenset()
    """It was cancelled, but what it had computed on one of these versions may be on its way already."""
    waits: bool = False

    def pushes(self) -> Iterator[int]:
        """Versions of which its next gradient may be."""
        if not self.waits:
            yield self.version
            yield from {min(self.late), max(self.late)} if self.late else ()

    def pushed(self) -> None:
        self.late = frozenset()

    def follow(self, order: Order, newest: int) -> None:
        if order is CANCEL and not self.waits:
            self.late |= {self.version}
        self.waits = order is WAIT
        if order in (RENEW, CANCEL):
            self.version = newest


def tickets(pushes: Iterable[Arrival]) -> list[int]:
    return sorted(push.ticket for push in pushes)


@dataclass
class Moment:
    """A policy, its row of the table and the workers, at one moment of a run."""

    policy: Policy
    row: Row
    workers: list[Worker]
    history: tuple[tuple[int, int], ...] = ()

    def after(self, rank: int, version: int) -> tuple[Moment, Decision, Answer]:
        """What this worker's push leads to, in a run of its own."""
        next_one = Moment(
            copy.deepcopy(self.policy),
            self.row.clone(),
            [copy.copy(worker) for worker in self.workers],
            (*self.history, (rank, version)),
        )
        push = Arrival(len(self.history), rank, version)
        decision, answer = next_one.policy.arrive(push), next_one.row.push(push)
        next_one.workers[rank].pushed()
        for worker, order in answer.orders.items():
            next_one.workers[worker].follow(order, next_one.row.version)
        return next_one, decision, answer

    def key(self) -> object:
        now = self.row.version
        lags = tuple((now - one.version, one.waits, frozenset(now - late for late in one.late)) for one in self.workers)
        return self.row.key(), lags

    def waiting(self) -> set[int]:
        return {rank for rank, worker in enumerate(self.workers) if worker.waits}


def compare(moment: Moment, decision: Decision, answer: Answer) -> None:
    """The policy said what the table says, and remembers what follows from it."""
    trail = moment.history
    assert tickets(decision.use) == tickets(answer.use), trail
    assert tickets(decision.drop) == tickets(answer.drop), trail
    assert decision.orders == answer.orders, trail
    assert moment.policy.version == moment.row.version, trail
    assert moment.policy.waiting == moment.waiting(), trail


def walk(policy: Policy, row: Row, depth: int, losses: float = 1.0) -> int:
    """Compare a policy with its row in every order of so many arrivals; the number of moments that were unlike.

    A moment that differs from an earlier one only in how many updates there were is not walked on from: what the
    policy remembers was just compared. With `losses`, the loss becomes this many times smaller by every update.
    """
    moments = [Moment(policy, row, [Worker() for _ in row.everybody])]
    seen = {moments[0].key()}
    for _ in range(depth):
        reached = []
        for moment in moments:
            for rank, worker in enumerate(moment.workers):
                for version in worker.pushes():
                    after, decision, answer = moment.after(rank, version)
                    compare(after, decision, answer)
                    if losses != 1.0 and decision.use:
                        for listener in (after.policy, after.row):
                            listener.observe(losses**-after.row.version)
                    if after.key() not in seen:
                        seen.add(after.key())
                        reached.append(after)
        moments = reached
    return len(seen)
