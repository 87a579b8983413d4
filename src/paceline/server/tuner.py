"""Watches the workers' steps until a policy can be chosen for them."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.policies import Auto, Policy, parse_policy

if TYPE_CHECKING:
    from paceline.planner.choose import Choice

_LONG = 4
"""Times as many steps as wanted, of all workers, after which those that have made too few are left out of account."""


class Tuner:
    """For the policy `auto`; for others it has nothing to do."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy if isinstance(policy, Auto) and len(policy.workers) > 1 else None
        self._wanted = policy.steps if isinstance(policy, Auto) else 0
        self._lengths: defaultdict[int, list[float]] = defaultdict(list)
        self._updates: list[float] = []
        self._first: set[int] = set()
        self._thinking: Future[Choice] | None = None

    @property
    def watching(self) -> bool:
        return self._policy is not None

    def step(self, rank: int, seconds: float, update_seconds: float) -> Choice | None:
        """A worker's step took so long; the choice, if that was the last thing to know."""
        policy = self._policy
        assert policy is not None
        if self._thinking is not None:
            return self._settle(policy, self._thinking)
        if rank not in self._first:
            self._first.add(rank)  # with what only the first step needs
            return None
        self._lengths[rank].append(seconds)
        self._updates.append(update_seconds)
        known = {one: self._lengths[one] for one in sorted(policy.workers)}
        few = [one for one, lengths in known.items() if len(lengths) < self._wanted]
        total = sum(map(len, known.values()))
        if few and (total < _LONG * self._wanted * len(known) or any(len(known[one]) < 2 for one in few)):
            return None
        from paceline.planner.choose import (
            best_policy,  # with the whole simulator, which other policies need not wait for
        )

        middle = sorted(self._updates)[len(self._updates) // 2]
        thinker = ThreadPoolExecutor(1, "paceline-tuner")
        self._thinking = thinker.submit(best_policy, known, middle)
        thinker.shutdown(wait=False)
        return None

    def _settle(self, policy: Auto, thinking: Future[Choice]) -> Choice | None:
        if not thinking.done():
            return None
        choice, self._thinking = thinking.result(), None
        chosen = parse_policy(choice.strategy)
        try:
            chosen.for_workers(policy.workers)
        except UsageError:  # a worker has gone meanwhile; think again
            self._lengths = defaultdict(list, {rank: self._lengths[rank][:-1] for rank in policy.workers})
            return None
        policy.become(chosen)
        self._policy = None
        return choice
