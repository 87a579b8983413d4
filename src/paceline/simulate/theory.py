"""Closed forms: seconds per update and staleness under each policy, if messages and updates take no time.

P workers; the compute time of each minibatch is drawn independently. A function returns None where there is no closed
form.
"""

from __future__ import annotations

import math

from paceline.config.distributions import Constant, Distribution, Exponential, Pareto
from paceline.errors import UsageError


def harmonic(n: int) -> float:
    """The n-th harmonic number."""
    return math.fsum(1 / i for i in range(1, n + 1))


def _check(workers: int, k: int) -> None:
    if workers < 1 or not 1 <= k <= workers:
        raise UsageError(f"k is {k} of {workers} workers; it must be from 1 to their number")


def _check_count(k: int) -> None:
    if k < 1:
        raise UsageError(f"k is {k}; it must be at least 1")


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
    return of.mean() if isinstance(of, Constant) else None


k_sync = order_statistic
"""Seconds per update: the K-th of P workers."""


def k_batch_sync(of: Distribution, workers: int, k: int) -> float | None:
    """Seconds per update; for memoryless steps, where a cancelled worker loses nothing, and for simple cases."""
    _check_count(k)
    if isinstance(of, Exponential) and not of.shift:
        return k * of.scale / workers
    if k == 1:
        return order_statistic(of, workers, 1)
    return math.ceil(k / workers) * of.mean() if isinstance(of, Constant) else None


def k_async(of: Distribution, workers: int, k: int) -> float | None:
    """Seconds per update; with memoryless steps, where a worker in mid-step is no closer to its end, as K-sync."""
    _check(workers, k)
    if isinstance(of, Exponential) and not of.shift:
        return order_statistic(of, workers, k)
    if k == 1:
        return of.mean() / workers
    return order_statistic(of, workers, k) if k == workers else None


def k_batch_async(of: Distribution, workers: int, k: int) -> float:
    """Seconds per update; no worker ever waits."""
    _check_count(k)
    return k * of.mean() / workers


def groups(of: Distribution, size: int, count: int) -> float | None:
    """Seconds per update of `count` groups of `size`, sync inside and async between them."""
    slowest = order_statistic(of, size, size)
    return None if slowest is None else slowest / count


def staleness_k_async(workers: int, k: int) -> float:
    """Mean staleness, in updates."""
    return workers / k - 1


def staleness_k_batch_async(workers: int, k: int) -> float:
    """Mean staleness, in updates."""
    return (workers - 1) / k


def staleness_groups(count: int) -> float:
    """Mean staleness, in updates, of groups that are asynchronous between each other."""
    return count - 1.0
