"""Measures the workers' steps until a policy can be chosen for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline import events
from paceline.errors import UsageError
from paceline.events.recorder import Recorder
from paceline.policies import Auto, Policy, parse_policy
from paceline.server.journal import Journal
from paceline.server.sessions import Session, Sessions
from paceline.server.updates import Updates

if TYPE_CHECKING:
    from paceline.planner.choose import Choice

_LONG = 4
"""Multiple of the wanted steps, over all workers, after which workers with too few steps are ignored."""


class Tuner:
    """Chooses the policy of an `auto` run; does nothing under other policies."""

    def __init__(
        self,
        sessions: Sessions,
        policy: Policy,
        updates: Updates,
        recorder: Recorder,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self._of, self._sessions, self._made, self._recorder = policy, sessions, updates, recorder
        self._journal, self._say = journal, say
        self._policy = policy if isinstance(policy, Auto) else None
        self._wanted = policy.steps if isinstance(policy, Auto) else 0
        self._lengths: defaultdict[int, list[float]] = defaultdict(list)
        self._updates: list[float] = []
        self._first: set[int] = set()
        self._choosing: Future[Choice] | None = None

    @property
    def watching(self) -> bool:
        return self._policy is not None and not self._policy.decided and len(self._policy.workers) > 1

    def tune(self, session: Session, now: float) -> None:
        """Takes note of a worker that has pushed; follows the choice of a policy once there is one."""
        seconds = time.monotonic() - session.since
        choice = self._journal.value(lambda: self.step(session.rank, seconds, self._made.seconds))
        if choice is None or self._policy is None:
            return
        strategy, reason = choice
        self._policy.become(parse_policy(strategy))
        self._made.set_k(parse_policy(strategy).for_workers(range(len(self._sessions))).k)
        version = self._of.version
        self._recorder.add(events.Switch(-1, now, version, strategy, reason))
        self._say(f"after {version} updates, auto goes on as {strategy}: {reason}")

    def step(self, rank: int, seconds: float, update_seconds: float) -> tuple[str, str] | None:
        """Takes the length of a worker's step; returns the chosen policy and the reason once there is one."""
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

    def _take_choice(self, policy: Auto, choosing: Future[Choice]) -> tuple[str, str] | None:
        if not choosing.done():
            return None
        choice, self._choosing = choosing.result(), None
        chosen = parse_policy(choice.strategy)
        try:
            chosen.for_workers(policy.workers)
        except UsageError:  # a worker has left meanwhile; choose again
            self._lengths = defaultdict(list, {rank: self._lengths[rank][:-1] for rank in policy.workers})
            return None
        return choice.strategy, choice.reason
