"""Measures the workers' steps until a policy can be chosen for them."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.policies import Auto, Policy, parse_policy

if TYPE_CHECKING:
    from paceline.planner.choose import Choice

_LONG = 4
"""Multiple of the wanted steps, over all workers, after which workers with too few steps are ignored."""


class Tuner:
    """Chooses the policy of an `auto` run; does nothing under other policies."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy if isinstance(policy, Auto) and len(policy.workers) > 1 else None
        self._wanted = policy.steps if isinstance(policy, Auto) else 0
        self._lengths: defaultdict[int, list[float]] = defaultdict(list)
        self._updates: list[float] = []
        self._first: set[int] = set()
        self._choosing: Future[Choice] | None = None

    @property
    def watching(self) -> bool:
        return self._policy is not None

    def step(self, rank: int, seconds: float, update_seconds: float) -> Choice | None:
        """Takes the length of a worker's step; returns the choice once there is one."""
        policy = self._policy
        assert policy is not None
        if self._choosing is not None:
            return self._take_choice(policy, self._choosing)
        if rank not in self._first:
            self._first.add(rank)  # the first step also warms up
            return None
        self._lengths[rank].append(seconds)
        self._updates.append(update_seconds)
        known = {one: self._lengths[one] for one in sorted(policy.workers)}
        few = [one for one, lengths in known.items() if len(lengths) < self._wanted]
        total = sum(map(len, known.values()))
        if few and (total < _LONG * self._wanted * len(known) or any(len(known[one]) < 2 for one in few)):
            return None
        # Here, since it imports the whole simulator, which other policies need not wait for.
        from paceline.planner.choose import best_policy

        middle = sorted(self._updates)[len(self._updates) // 2]
        pool = ThreadPoolExecutor(1, "paceline-tuner")
        self._choosing = pool.submit(best_policy, known, middle)
        pool.shutdown(wait=False)
        return None

    def _take_choice(self, policy: Auto, choosing: Future[Choice]) -> Choice | None:
        if not choosing.done():
            return None
        choice, self._choosing = choosing.result(), None
        chosen = parse_policy(choice.strategy)
        try:
            chosen.for_workers(policy.workers)
        except UsageError:  # a worker has left meanwhile; choose again
            self._lengths = defaultdict(list, {rank: self._lengths[rank][:-1] for rank in policy.workers})
            return None
        policy.become(chosen)
        self._policy = None
        return choice
