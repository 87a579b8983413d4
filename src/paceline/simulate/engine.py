"""The event loop: workers that compute for drawn times, and the very policy that a server would ask."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from paceline.policies import Order, Policy, Push
from paceline.simulate.distributions import Distribution
from paceline.simulate.result import Result, result

_AHEAD = 4096
"""Draws that are made at once: one at a time would take longer than the rest of the loop."""


def _stream(of: Distribution, factor: float, source: np.random.Generator, size: int) -> Callable[[], float]:
    """One draw after the other, each times a factor."""
    draws: list[float] = []

    def draw() -> float:
        if not draws:
            draws.extend((of.draw(source, size) * factor).tolist())
        return draws.pop()

    return draw


class Engine:
    """One run of one policy; messages and updates cost nothing."""

    def __init__(
        self, policy: Policy, compute: Distribution, seed: int, factors: Sequence[float] | None = None
    ) -> None:
        """factors: how many times as long as drawn each worker's steps take."""
        self._policy = policy
        ranks = sorted(policy.workers)
        factors = factors or [1.0] * len(ranks)
        sources = np.random.default_rng(seed).spawn(len(ranks))
        size = max(16, min(_AHEAD, 4_000_000 // len(ranks)))
        self._draw = [_stream(compute, factor, source, size) for factor, source in zip(factors, sources, strict=True)]
        self._version = [0] * len(ranks)
        self._step = [0] * len(ranks)
        """Counts a worker's steps, so that the end of one that was cancelled is known for what it is."""
        self._waits = [-1.0] * len(ranks)
        """Since when a worker waits; -1 if it does not."""
        self._waited = [0.0] * len(ranks)
        self._heap: list[tuple[float, int, int]] = []
        self.cancelled = self.dropped = self.used = 0
        self.ages: Counter[int] = Counter()
        self.moments: list[float] = []
        self.now = 0.0

    def run(self, updates: int, strategy: str) -> Result:
        for rank in range(len(self._draw)):
            self._begin(rank)
        arrive, heap, tickets = self._policy.arrive, self._heap, 0
        while len(self.moments) < updates:
            self.now, rank, step = heapq.heappop(heap)
            if step != self._step[rank]:
                continue  # it was cancelled
            tickets += 1
            version = self._version[rank]
            self.ages[self._policy.version - version] += 1
            self._waits[rank] = self.now
            decision = arrive(Push(tickets, rank, version))
            self.dropped += len(decision.drop)
            if decision.use:
                self.used += len(decision.use)
                self.moments.append(self.now)
            for other, order in decision.orders.items():
                if order is not Order.WAIT:
                    self._follow(other, order)
        total = self.now or 1.0
        waiting = [
            (waited + (self.now - since if since >= 0 else 0.0)) / total
            for waited, since in zip(self._waited, self._waits, strict=True)
        ]
        return result(
            strategy=strategy,
            workers=len(self._draw),
            moments=np.array(self.moments),
            used=self.used,
            ages=self.ages,
            cancelled=self.cancelled,
            dropped=self.dropped,
            waiting=waiting,
        )

    def _follow(self, rank: int, order: Order) -> None:
        """Let a worker begin its next step."""
        since = self._waits[rank]
        if since >= 0:
            self._waited[rank] += self.now - since
            self._waits[rank] = -1.0
        elif order is Order.CANCEL:
            self.cancelled += 1
        else:
            return  # it computes, and nothing changes for it
        if order is not Order.STAY:
            self._version[rank] = self._policy.version
        self._begin(rank)

    def _begin(self, rank: int) -> None:
        self._step[rank] += 1
        heapq.heappush(self._heap, (self.now + self._draw[rank](), rank, self._step[rank]))
