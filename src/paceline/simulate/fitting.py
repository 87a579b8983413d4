"""Fits the lengths of recorded steps: a common distribution, factors of uneven workers, and workers of another kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.simulate.distributions import Distribution, Draws, Empirical
from paceline.simulate.recorded import RecordedSteps

_UNEVEN = 0.02
"""The least relative difference of a worker's mean from the others' that counts as uneven."""
_SURE = 3.0
"""The least difference that counts, in standard errors."""
_POINTS = 2000
"""The most values of an empirical distribution."""


def fit_steps(
    workers: Mapping[int, RecordedSteps], count: int
) -> tuple[Distribution, tuple[float, ...], tuple[Distribution | None, ...], float]:
    """The common distribution, each worker's factor, distributions of workers that differ in kind, and the jitter.

    The factors, or the distributions, are empty if no worker has one.
    """
    draws = {rank: survival(steps.lengths, steps.left) for rank, steps in workers.items() if steps.lengths}
    means = {rank: float(of.mean()) for rank, of in draws.items()}
    typical = float(np.median(list(means.values())))
    # The standard error of each worker's mean.
    errors = {rank: float(of.std()) / math.sqrt(len(workers[rank].lengths)) for rank, of in draws.items()}
    factors = [1.0] * count
    for rank, mean in means.items():
        rest = [other for other in means if other != rank]
        if not rest:
            continue
        beside = float(np.median([means[other] for other in rest]))
        error = math.hypot(errors[rank], float(np.median([errors[other] for other in rest])) / math.sqrt(len(rest)))
        if abs(mean - beside) > max(_SURE * error, _UNEVEN * beside):
            factors[rank] = mean
    even = [means[rank] for rank in means if factors[rank] == 1.0]
    weights = [len(workers[rank].lengths) for rank in means if factors[rank] == 1.0]
    base = float(np.average(even, weights=weights)) if even else typical
    factors = [1.0 if factor == 1.0 else factor / base for factor in factors]
    scaled = {rank: of * (base / means[rank] if factors[rank] != 1.0 else 1.0) for rank, of in draws.items()}
    pooled = np.concatenate([_thinned(of, _POINTS // len(scaled) + 1) for of in scaled.values()])
    own: list[Distribution | None] = [None] * count
    for rank, of in scaled.items():
        if len(scaled) > 1 and _differs(of, np.concatenate([scaled[other] for other in scaled if other != rank])):
            own[rank] = Empirical.of((of * factors[rank]).tolist())
    alike = [of for rank, of in scaled.items() if own[rank] is None]
    if alike and len(alike) < len(scaled):
        pooled = np.concatenate([_thinned(of, _POINTS // len(alike) + 1) for of in alike])
        pooled = pooled * (base / float(pooled.mean()))
    jitter = float(np.mean([of.std() / of.mean() for of in scaled.values()]))
    uneven = tuple(factors) if any(factor != 1.0 for factor in factors) else ()
    return Empirical.of(pooled.tolist()), uneven, tuple(own) if any(own) else (), jitter


def survival(lengths: Sequence[float], left: Sequence[float]) -> Draws:
    """The lengths as if no step had been cancelled (the Kaplan-Meier estimate).

    lengths: of completed steps; left: of cancelled ones, each at least that long. Its weight goes to longer steps; if
    there is none, to its own length.
    """
    ended = np.sort(lengths)
    if not len(left):
        return ended
    moments = np.concatenate([ended, np.asarray(left, float)])
    kind = np.concatenate([np.ones(len(ended)), np.zeros(len(left))])
    order = np.lexsort((-kind, moments))
    moments, kind = moments[order], kind[order]
    at_risk = len(moments) - np.arange(len(moments))
    alive = np.cumprod(1 - kind / at_risk)
    mass = -np.diff(alive, prepend=1.0)
    mass[-1] += alive[-1]
    # As equally likely values.
    count = min(_POINTS, max(200, len(moments)))
    places = (np.arange(count) + 0.5) / count
    return np.asarray(moments[np.minimum(np.searchsorted(np.cumsum(mass), places), len(moments) - 1)], float)


def _thinned(values: Draws, count: int) -> Draws:
    """The same distribution with fewer values and the same mean."""
    if len(values) <= count:
        return values
    fewer = np.quantile(values, (np.arange(count) + 0.5) / count)
    return np.asarray(fewer * (values.mean() / fewer.mean()))


def _differs(one: Draws, other: Draws) -> bool:
    """True if two samples differ by the Kolmogorov-Smirnov test at 0.1 %, and by a notable amount."""
    one, other = np.sort(one), np.sort(other)
    both = np.concatenate([one, other])
    distance = np.abs(
        np.searchsorted(one, both, "right") / len(one) - np.searchsorted(other, both, "right") / len(other)
    ).max()
    spread = abs(float(one.std() / one.mean() - other.std() / other.mean()))
    return bool(distance > 1.95 * math.sqrt(1 / len(one) + 1 / len(other)) and distance > 0.2 and spread > 0.05)
