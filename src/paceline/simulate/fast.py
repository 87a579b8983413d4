"""Simulates simple policies without an event loop: all updates at once.

Only for workers that are all alike and never die, with messages that take no time, or an all-reduce of constant time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.policies import Policy, Rule
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.result import Result, TimeShares, result

Moments = NDArray[np.float64]

_AT_ONCE = 4_000_000
"""The most draws in memory at once."""
_MOST = 200_000_000
"""The most minibatches, where all must be in memory."""


def simulate_fast(policy: Policy, cluster: SimulatedCluster, updates: int, seed: int) -> Result | None:
    """The same result as the event loop's, in distribution; None for policies that need the loop."""
    timing = policy.timing
    if timing is None or timing.rule not in _WAYS:
        return None
    alike = _Alike(str(policy), cluster, updates, np.random.default_rng(seed))
    return _WAYS[timing.rule](alike, timing.number)


def simulate_collective(name: str, cluster: SimulatedCluster, updates: int, seed: int, seconds: float) -> Result:
    """Simulates updates that wait for all workers, each with an all-reduce of `seconds`."""
    outcome = _Alike(name, cluster, updates, np.random.default_rng(seed)).workers(cluster.workers, seconds)
    moved = 2 * (cluster.workers - 1) / cluster.workers * cluster.size * updates
    outcome.traffic = {"out": [moved] * cluster.workers, "in": [moved] * cluster.workers}
    return outcome


class _Alike:
    """A run of workers that are all alike."""

    def __init__(self, name: str, cluster: SimulatedCluster, updates: int, source: np.random.Generator) -> None:
        self._name, self._cluster, self._updates, self._source = name, cluster, updates, source
        self.count = cluster.workers

    def workers(self, k: int, after: float = 0.0) -> Result:
        """Every update begins with all workers, ends with the K-th of them, and takes `after` seconds more."""
        count = self.count
        parts: list[Moments] = []
        waited = computed = 0.0
        for block in self._blocks(count):
            draws = np.partition(self._cluster.compute.draw(self._source, (block, count)), k - 1, axis=1)
            parts.append(draws[:, k - 1])
            waited += float((draws[:, k - 1 : k] - draws[:, :k]).sum())
            computed += float(draws[:, :k].sum())
        moments = np.cumsum(np.concatenate(parts) + after)
        shares = TimeShares(computed / count, after * self._updates, waited / count)
        return self._result(moments, k, Counter({0: k * self._updates}), shares, (count - k) * self._updates)

    def minibatches(self, k: int) -> Result:
        """Every update begins with all workers, and ends with the K-th minibatch of any of them."""
        count = self.count
        each = min(k, 2 * -(-k // count) + 4)  # per worker: mostly enough, and far fewer than all K
        parts: list[Moments] = []
        computed = 0.0
        for block in self._blocks(count * each):
            ends = np.zeros((block, count, 1))
            while True:
                more = np.cumsum(self._cluster.compute.draw(self._source, (block, count, each)), axis=2)
                ends = np.concatenate([ends, ends[:, :, -1:] + more], axis=2)
                # The first of these is the start.
                last = np.partition(ends[:, :, 1:].reshape(block, -1), k - 1, axis=1)[:, k - 1]
                if ends.shape[2] > k or bool((last <= ends[:, :, -1].min(axis=1)).all()):
                    break
            parts.append(last)
            computed += float(np.where(ends <= last[:, None, None], ends, 0.0).max(axis=2).sum())
        moments = np.cumsum(np.concatenate(parts))
        shares = TimeShares(computing=computed / count)
        return self._result(moments, k, Counter({0: k * self._updates}), shares, (count - 1) * self._updates)

    def merged(self, k: int) -> Result:
        """No worker waits: each one's steps follow each other, and every K-th end of a step is an update."""
        count, needed = self.count, k * self._updates
        if needed > _MOST:
            raise UsageError(
                f"{self._name}: {self._updates} updates are {needed} minibatches, more than the {_MOST:,} that fit "
                "into memory; simulate fewer updates"
            )
        clock = np.zeros(count)
        ends = np.zeros(0)
        who = np.zeros(0, np.int32)
        while True:
            steps = max(16, min(_AT_ONCE // count, int(1.1 * (needed - len(ends)) / count) + 16))
            more = clock[:, None] + np.cumsum(self._cluster.compute.draw(self._source, (count, steps)), axis=1)
            clock = more[:, -1]
            ends = np.concatenate([ends, more.ravel()])
            who = np.concatenate([who, np.repeat(np.arange(count, dtype=np.int32), steps)])
            # All ends are known until the first worker's last draw.
            if int((ends <= clock.min()).sum()) >= needed:
                break
        order = np.argsort(ends, kind="stable")[:needed]
        moments, ranks = ends[order][k - 1 :: k], who[order]
        return self._result(moments, k, _ages(ranks, k), TimeShares(computing=float(moments[-1])), 0)

    def bounded(self, ahead: int) -> Result:
        """A worker begins its n-th step once it has ended its last one, and all have ended step n - 1 - ahead."""
        count = self.count
        steps = -(-self._updates // count) + ahead + 1  # the last ones may belong to workers that are ahead
        starts, ends = np.zeros((steps, count)), np.zeros((steps, count))
        all_done = np.zeros(steps)
        clock = np.zeros(count)
        for block in range(0, steps, 1024):
            size = min(1024, steps - block)
            for number, draws in enumerate(self._cluster.compute.draw(self._source, (size, count)), block):
                if number > ahead:
                    clock = np.maximum(clock, all_done[number - 1 - ahead])
                starts[number] = clock
                clock = ends[number] = clock + draws
                all_done[number] = clock.max()
        waited = starts[1:] - ends[:-1]
        order = np.argsort(ends, axis=None, kind="stable")
        moments = ends.ravel()[order]
        before = np.empty(ends.size, np.int64)
        before[order] = np.arange(ends.size)
        before = before.reshape(ends.shape)  # the number of pushes before each
        # A worker pulls the version of its own push or, if it had to wait, of the push that released it.
        pulled = np.zeros_like(before)
        pulled[1:] = np.where(waited > 0, np.searchsorted(moments, starts[1:], "right"), before[:-1] + 1)
        kept = before < self._updates
        ages = (before - pulled)[kept]
        moments = moments[: self._updates]
        total = float(moments[-1])
        histogram = Counter(dict(zip(*(part.tolist() for part in np.unique(ages, return_counts=True)), strict=True)))
        waiting = float(waited[kept[1:]].sum()) / count
        return self._result(moments, 1, histogram, TimeShares(total - waiting, 0.0, waiting), 0)

    def _result(self, moments: Moments, k: int, ages: Counter[int], shares: TimeShares, cancelled: int) -> Result:
        outcome = result(
            strategy=self._name,
            cluster=self._cluster,
            moments=moments,
            used=k * self._updates,
            ages=ages,
            shares=[shares] * self._cluster.workers,
            total=float(moments[-1]),
        )
        outcome.cancelled = cancelled
        return outcome

    def _blocks(self, draws: int) -> list[int]:
        """The numbers of updates to draw at a time."""
        each = max(1, _AT_ONCE // draws)
        return [min(each, self._updates - done) for done in range(0, self._updates, each)]


_WAYS: dict[Rule, Callable[[_Alike, int], Result]] = {
    Rule.FRESH_WORKERS: _Alike.workers,
    Rule.FRESH_MINIBATCHES: _Alike.minibatches,
    Rule.STALE_MINIBATCHES: _Alike.merged,
    Rule.BOUNDED: _Alike.bounded,
}


def _ages(ranks: NDArray[np.int32], k: int) -> Counter[int]:
    """Gradients by staleness: the updates between a worker's pull, after its last push, and its push."""
    by_worker = np.argsort(ranks, kind="stable")
    sorted_ranks = ranks[by_worker]
    # The version at a push is the number of updates before it; at the pull after it, its own update is included.
    before = by_worker // k
    after = (by_worker + 1) // k
    pulled = np.concatenate([[0], after[:-1]])
    pulled[np.concatenate([[True], sorted_ranks[1:] != sorted_ranks[:-1]])] = 0
    ages, times = np.unique(before - pulled, return_counts=True)
    return Counter(dict(zip(ages.tolist(), times.tolist(), strict=True)))
