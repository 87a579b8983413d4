"""What a simulation answers."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.events.summary import Staleness

_BATCHES = 20
"""Neighbouring updates depend on each other; means of so many long stretches hardly do."""


class Interval(msgspec.Struct, frozen=True):
    """Where the true value lies, in 95 of 100 simulations."""

    low: float
    high: float


class Result(msgspec.Struct, kw_only=True):
    """The names are stable: scripts rely on them."""

    strategy: str
    workers: int
    updates: int
    seconds: float
    seconds_per_update: float
    """Mean seconds between updates."""
    seconds_per_update_interval: Interval
    standard_error: float
    """Of `seconds_per_update`."""
    minibatches_per_second: float
    """That were used."""
    staleness: Staleness
    cancelled: int = 0
    dropped: int = 0
    waiting: list[float] = []
    """Per worker, the share of its time that it waits."""


def result(
    *,
    strategy: str,
    workers: int,
    moments: NDArray[np.float64],
    used: int,
    ages: Counter[int],
    cancelled: int = 0,
    dropped: int = 0,
    waiting: list[float] | None = None,
) -> Result:
    """Of updates that were made at these moments."""
    updates, seconds = len(moments), float(moments[-1]) if len(moments) else 0.0
    mean = seconds / updates if updates else math.nan
    error = _standard_error(moments)
    count = sum(ages.values())
    return Result(
        strategy=strategy,
        workers=workers,
        updates=updates,
        seconds=seconds,
        seconds_per_update=mean,
        seconds_per_update_interval=Interval(mean - 1.96 * error, mean + 1.96 * error),
        standard_error=error,
        minibatches_per_second=used / seconds if seconds else 0.0,
        staleness=Staleness(
            mean=sum(age * times for age, times in ages.items()) / count if count else 0.0,
            max=max(ages, default=0),
            histogram=dict(sorted(ages.items())),
        ),
        cancelled=cancelled,
        dropped=dropped,
        waiting=waiting or [],
    )


def _standard_error(moments: NDArray[np.float64]) -> float:
    """Of the mean time between updates, by the means of some long stretches."""
    each = len(moments) // _BATCHES
    if each < 2:
        return math.nan if len(moments) < 2 else float(np.diff(moments, prepend=0.0).std() / math.sqrt(len(moments)))
    edges = moments[each - 1 : each * _BATCHES : each]
    means = np.diff(edges, prepend=0.0) / each
    return float(means.std(ddof=1) / math.sqrt(_BATCHES))
