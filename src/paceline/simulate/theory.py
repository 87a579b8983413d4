"""Closed forms: seconds per update and staleness under each policy, if messages and updates cost nothing.

P workers; the compute time of a minibatch is drawn anew for every worker and minibatch. Where there is no closed form a
function answers None, and a simulation must.
"""

from __future__ import annotations

import math

from paceline.errors import UsageError
from paceline.simulate.distributions import Distribution, Exponential, Pareto


def harmonic(n: int) -> float:
    return math.fsum(1 / i for i in range(1, n + 1))


def _check(workers: int, k: int) -> None:
    if workers < 1 or not 1 <= k <= workers:
        raise UsageError(f"k is {k} of {workers} workers; it must be from 1 to their number")


def order_statistic(of: Distribution, workers: int, k: int) -> float | None:
    """The mean of the K-th smallest of P draws."""
    _check(workers, k)
    if isinstance(of, Exponential):
        return of.shift + of.scale * (harmonic(workers) - harmonic(workers - k))
    if isinstance(of, Pareto):
        if workers - k + 1 <= 1 / of.shape:
            return math.inf
        gamma = math.lgamma
        return of.least * math.exp(
            gamma(workers + 1)
            + gamma(workers - k + 1 - 1 / of.shape)
            - gamma(workers - k + 1)
            - gamma(workers + 1 - 1 / of.shape)
        )
    return of.mean() if of.constant else None


def k_sync(of: Distribution, workers: int, k: int) -> float | None:
    return order_statistic(of, workers, k)


def k_batch_sync(of: Distribution, workers: int, k: int) -> float | None:
    """Memoryless steps only: whoever is cancelled loses nothing."""
    _check(workers, k)
    if isinstance(of, Exponential) and not of.shift:
        return k * of.scale / workers
    if k == 1:
        return order_statistic(of, workers, 1)
    return math.ceil(k / workers) * of.mean() if of.constant else None


def k_async(of: Distribution, workers: int, k: int) -> float | None:
    """With memoryless steps those who go on are no further than those who begin: as K-sync."""
    _check(workers, k)
    if isinstance(of, Exponential) and not of.shift:
        return order_statistic(of, workers, k)
    if k == 1:
        return of.mean() / workers
    return order_statistic(of, workers, k) if k == workers else None


def k_batch_async(of: Distribution, workers: int, k: int) -> float:
    """Nobody ever waits."""
    if k < 1:
        raise UsageError(f"k is {k}; it must be at least 1")
    return k * of.mean() / workers


def groups(of: Distribution, size: int, count: int) -> float | None:
    """Sync inside each of so many groups of this size, async between them."""
    slowest = order_statistic(of, size, size)
    return None if slowest is None else slowest / count


def staleness_k_async(workers: int, k: int) -> float:
    return workers / k - 1


def staleness_k_batch_async(workers: int, k: int) -> float:
    return (workers - 1) / k


def staleness_groups(count: int) -> float:
    return count - 1.0


def sync_over_async(of: Distribution, workers: int) -> float | None:
    """How many times as long as under async an update takes under sync."""
    slowest = order_statistic(of, workers, workers)
    return None if slowest is None else workers * slowest / of.mean()


def error_k_sync(
    *, rate: float, smooth: float, convex: float, variance: float, batch: int, k: int, start: float, updates: int
) -> float:
    """Dutta's bound on the error after so many updates, of which each is a mean of K gradients."""
    floor = rate * smooth * variance / (2 * convex * k * batch)
    return floor + (1 - rate * convex) ** updates * (start - floor)


def error_k_async(
    *,
    rate: float,
    smooth: float,
    convex: float,
    variance: float,
    batch: int,
    k: int,
    start: float,
    updates: int,
    gamma: float,
    fresh: float,
) -> float:
    """As `error_k_sync`; gamma: how much stale gradients differ, fresh: the least share of gradients that are not."""
    slowed = convex * (1 - gamma + fresh / 2)
    return error_k_sync(
        rate=rate, smooth=smooth, convex=slowed, variance=variance, batch=batch, k=k, start=start, updates=updates
    )
