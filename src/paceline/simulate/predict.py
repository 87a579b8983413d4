"""One question, and its answers: by formula, where there is one, and by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline import config
from paceline.config import Strategy, parse_strategy
from paceline.errors import UsageError
from paceline.policies import POLICIES, make_policy
from paceline.simulate import theory
from paceline.simulate.distributions import Distribution
from paceline.simulate.engine import Engine
from paceline.simulate.fast import simulate_fast
from paceline.simulate.result import Result


class Theory(msgspec.Struct, frozen=True):
    """What the closed forms say; None where there is none."""

    seconds_per_update: float | None
    staleness: float | None


def policy_of(spec: str | Strategy, workers: int) -> Strategy:
    """The strategy, if a parameter server of so many workers can follow it."""
    if workers < 1:
        raise UsageError(f"there are {workers} workers; there must be at least 1")
    strategy = parse_strategy(spec)
    if type(strategy) not in POLICIES:
        raise UsageError(f"'{strategy}' is not a policy of a parameter server, and only those can be simulated so far")
    make_policy(strategy, range(workers))
    return strategy


def simulate(
    spec: str | Strategy,
    workers: int,
    compute: Distribution,
    *,
    updates: int,
    seed: int = 0,
    factors: Sequence[float] | None = None,
) -> Result:
    """A run of so many updates; factors: how many times as long as drawn each worker's steps take."""
    if updates < 1:
        raise UsageError(f"there are {updates} updates to simulate; there must be at least 1")
    strategy = policy_of(spec, workers)
    if factors is None:
        quick = simulate_fast(strategy, workers, compute, updates, seed)
        if quick is not None:
            return quick
    engine = Engine(make_policy(strategy, range(workers)), compute, seed, factors)
    return engine.run(updates, str(strategy))


def predict(spec: str | Strategy, workers: int, compute: Distribution) -> Theory:
    """The closed forms, with which a simulation can be compared."""
    strategy = policy_of(spec, workers)
    form = _FORMS.get(type(strategy))
    return Theory(None, None) if form is None else form(strategy, workers, compute)


def _groups(strategy: config.Groups, workers: int, compute: Distribution) -> Theory:
    count = workers // strategy.size
    if str(parse_strategy(strategy.between)) != "async":
        return Theory(None, None)
    return Theory(theory.groups(compute, strategy.size, count), theory.staleness_groups(count))


_FORMS: dict[type[Strategy], Callable[[Any, int, Distribution], Theory]] = {
    config.Sync: lambda s, n, x: Theory(theory.k_sync(x, n, n), 0.0),
    config.KSync: lambda s, n, x: Theory(theory.k_sync(x, n, s.k), 0.0),
    config.KBatchSync: lambda s, n, x: Theory(theory.k_batch_sync(x, n, s.k), 0.0),
    config.Async: lambda s, n, x: Theory(theory.k_batch_async(x, n, 1), n - 1.0),
    config.KAsync: lambda s, n, x: Theory(theory.k_async(x, n, s.k), theory.staleness_k_async(n, s.k)),
    config.KBatchAsync: lambda s, n, x: Theory(theory.k_batch_async(x, n, s.k), theory.staleness_k_batch_async(n, s.k)),
    config.Groups: _groups,
}
