"""Ranks the candidates by simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import msgspec

from paceline.config import AllReduce, Pipeline, Tensor, between_replicas, parse_strategy, workers_of
from paceline.errors import UsageError
from paceline.planner.candidates import Candidate, candidates
from paceline.policies import Policy
from paceline.simulate.calibrate import cluster_of
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.convergence import Convergence
from paceline.simulate.predict import simulate
from paceline.simulate.replica import Model
from paceline.simulate.result import Result

_GLANCE, _STEPS = 6_000, 60_000
"""Steps of all workers in a candidate's first simulation, and in a second one of candidates near the best."""
_NEAR = 1.3
"""Ratio to the best first score up to which a candidate is near the best."""
_ABOUT = 1.02
"""Ratio to the best score up to which a candidate counts as equally good."""
_USUAL_GAIN, _USUAL_PENALTY = 0.33, 0.05
"""Typical exponent of the worth of gradients in an update, and cost of staleness; used without measured losses."""


class Choice(msgspec.Struct, kw_only=True):
    """A candidate with its predicted speed, memory and score."""

    strategy: str
    servers: str
    balance: bool
    runnable: bool
    seconds_per_update: float
    samples_per_second: float
    staleness: float
    waiting: float
    memory: float
    """Bytes of parameters, gradients and versions of all workers and servers."""
    score: float | None
    """Seconds to the goal, or for throughput, seconds per sample; None if it is never reached."""
    low: float | None = None
    high: float | None = None
    gain: float | None = None
    """Speed relative to plain all-reduce."""
    reason: str = ""
    place: int = 0
    """Index among the candidates, simple ones first."""

    @property
    def is_plain(self) -> bool:
        """True if it is plain all-reduce, the baseline of the comparison."""
        return self.strategy == "all-reduce" and not self.balance

    @property
    def spoken(self) -> str:
        return Candidate(self.strategy, self.servers, self.balance).spoken


def worth(gradients: float, staleness: float) -> float:
    """The typical worth of an update of so many gradients of this staleness, in fresh updates of one gradient."""
    return float(gradients**_USUAL_GAIN / (1 + _USUAL_PENALTY * staleness))


def rank(
    cluster: SimulatedCluster,
    *,
    convergence: Convergence | None = None,
    goal: float | None = None,
    memory: float | None = None,
    model: Model | None = None,
    split: bool = False,
    seed: int = 0,
    tick: Callable[[int, int], None] = lambda _done, _all: None,
    among: Sequence[Candidate] | None = None,
    also: Sequence[Candidate] = (),
) -> list[Choice]:
    """The choices, best first: by time to a loss if `goal` and `convergence` are given, else by samples per second."""
    if goal is not None and convergence is None:
        raise UsageError("a loss as the goal needs runs that reported theirs")
    usual = list(among) if among is not None else candidates(cluster, split=split)
    every = list(dict.fromkeys([*usual, *also]))

    def judge(place: int, steps: int) -> Choice:
        candidate = every[place]
        where = dataclasses.replace(cluster, servers=candidate.servers)
        if candidate.balance:
            where = _balanced(where)
        updates = max(300, min(5000, steps // cluster.workers))
        outcome, _ = simulate(candidate.strategy, where, updates=updates, seed=seed, model=model)
        choice = Choice(
            strategy=candidate.strategy,
            servers=candidate.servers,
            balance=candidate.balance,
            runnable=candidate.runnable,
            seconds_per_update=outcome.seconds_per_update,
            samples_per_second=outcome.samples_per_second,
            staleness=outcome.staleness.mean,
            waiting=sum(outcome.waiting) / len(outcome.waiting) if outcome.waiting else 0.0,
            memory=_memory(candidate, cluster, outcome),
            score=1 / outcome.samples_per_second if outcome.samples_per_second else None,
            place=place,
        )
        if outcome.verdict is not None:
            choice.score, choice.reason = None, outcome.verdict
        elif goal is not None and convergence is not None:
            reached = convergence.reach(goal, outcome)
            choice.score, choice.low, choice.high = reached.seconds, reached.low, reached.high
        return choice

    found = []
    for number in range(len(every)):
        tick(number, len(every))
        found.append(judge(number, _GLANCE))
    best = min((choice.score for choice in found if choice.score is not None), default=math.inf)
    close = [one for one in found if one.score is not None and (one.score <= _NEAR * best or one.is_plain)]
    for choice in close:
        found[choice.place] = judge(choice.place, _STEPS)
    tick(len(every), len(every))
    if memory is not None:
        kept = [choice for choice in found if choice.memory <= memory]
        if not kept:
            least = min(choice.memory for choice in found)
            raise UsageError(
                f"nothing fits into {memory / 1e6:.4g} MB; the least that is needed is {least / 1e6:.4g} MB"
            )
        found = kept
    plain = next((one for one in found if one.is_plain), None)
    for choice in found:
        if plain is not None and plain.score and choice.score:
            choice.gain = plain.score / choice.score
        choice.reason = _reason(choice, cluster)
    return sorted(found, key=lambda choice: math.inf if choice.score is None else choice.score)


def best_policy(lengths: dict[int, list[float]], update_seconds: float) -> Choice:
    """The policy of a parameter server with the most typical progress per second.

    lengths: seconds of each worker's steps, messages included, by rank.
    """
    ranks = sorted(lengths)
    cluster = cluster_of([lengths[rank] for rank in ranks], update_seconds)
    every = [
        one for one in candidates(cluster) if one.servers == "1" and isinstance(parse_strategy(one.strategy), Policy)
    ]
    choices = rank(cluster, among=every)
    for choice in choices:
        gradients = choice.samples_per_second * choice.seconds_per_update / cluster.batch
        choice.score = choice.seconds_per_update / worth(gradients, choice.staleness)
    best = simplest(choices)
    assert best is not None
    slow = [(ranks[place], factor) for place, factor in enumerate(cluster.factors) if factor > 1.0]
    if slow:
        who = ", ".join(f"worker {number} takes {factor:.1f} times as long" for number, factor in slow[:3])
        best.reason = f"{who} as the others; {best.reason}"
    return best


def simplest(choices: Sequence[Choice]) -> Choice | None:
    """The first of the candidates among the runnable choices that are about as good as the best."""
    able = [choice for choice in choices if choice.runnable and choice.score is not None]
    if not able:
        return None
    best = min(choice.score or 0.0 for choice in able)
    return min((one for one in able if (one.score or 0.0) <= best * _ABOUT), key=lambda one: one.place)


def _balanced(cluster: SimulatedCluster) -> SimulatedCluster:
    """The cluster with batches split by the workers' paces, so that all steps take equally long."""
    means = [of.mean() * factor for of, factor in map(cluster.steps_of, range(cluster.workers))]
    even = cluster.workers / sum(1 / mean for mean in means)
    return dataclasses.replace(cluster, factors=(even / cluster.compute.mean(),) * cluster.workers, own=())


def _memory(candidate: Candidate, cluster: SimulatedCluster, outcome: Result) -> float:
    """Bytes on one machine: a gradient per worker, and the versions that exist at once."""
    strategy = parse_strategy(candidate.strategy)
    if isinstance(strategy, Pipeline | Tensor):
        return 2.0 * cluster.size
    between, replicas = between_replicas(strategy, cluster.workers)
    fresh = isinstance(between, AllReduce) or (isinstance(between, Policy) and between.fresh_only)
    versions = 2 if fresh else min(replicas + 2, outcome.staleness.max + 2)
    return float(cluster.size * (replicas + versions))


def _reason(choice: Choice, cluster: SimulatedCluster) -> str:
    if choice.reason:
        return choice.reason
    parts = []
    strategy = parse_strategy(choice.strategy)
    if choice.waiting > 0.02:
        parts.append(f"workers wait {choice.waiting:.0%} of the time")
    elif workers_of(strategy) is None:
        parts.append("workers hardly wait")
    if choice.staleness > 0.05:
        parts.append(f"gradients are {choice.staleness:.1f} updates old")
    if isinstance(strategy, Policy) and strategy.for_workers(range(cluster.workers)).cancels:
        parts.append("late ones are cancelled")
    if choice.balance:
        parts.append("slow workers get smaller batches")
    return ", ".join(parts)
