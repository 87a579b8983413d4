"""The result of a simulation."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.events.summary import Staleness
from paceline.simulate.cluster import SimulatedCluster

_BATCHES = 20
"""Batch means for the standard error: neighbouring updates are correlated, means of long batches hardly are."""


class Interval(msgspec.Struct, frozen=True):
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclasses.dataclass(slots=True)
class TimeShares:
    """A worker's time by activity, in seconds."""

    computing: float = 0.0
    communicating: float = 0.0
    waiting: float = 0.0


class Result(msgspec.Struct, kw_only=True):
    """The result of a simulated run. The names are stable: scripts rely on them."""

    strategy: str
    workers: int
    updates: int
    seconds: float
    seconds_per_update: float
    """Mean seconds between updates, from the first to the last."""
    seconds_per_update_interval: Interval
    standard_error: float
    """The standard error of `seconds_per_update`."""
    minibatches_per_second: float
    """Used minibatches per second."""
    samples_per_second: float
    staleness: Staleness
    cancelled: int = 0
    dropped: int = 0
    failures: int = 0
    waiting: list[float] = []
    """The share of its time that each worker waits: its bubbles."""
    communicating: list[float] = []
    """The share of its time that each worker sends and receives."""
    computing: list[float] = []
    """The share of its time in which each worker computes gradients that it pushes."""
    traffic: dict[str, list[float]] = {}
    """Bytes through every port: `out` and `in` of each machine, `server_in` and `server_out` of all servers."""
    verdict: str | None = None
    """The reason for an early end, if it ended early."""
    starved: list[int] = []
    """Workers none of whose gradients was used."""
    bubble: float | None = None
    """The idle share of a pipeline's device time."""
    in_flight: list[int] = []
    """The most microbatches whose activations each device of a pipeline keeps."""
    predicted: bool = True


def result(
    *,
    strategy: str,
    cluster: SimulatedCluster,
    moments: NDArray[np.float64],
    used: int,
    ages: Counter[int],
    shares: list[TimeShares],
    total: float,
) -> Result:
    """The result of a run whose updates were made at these moments."""
    updates, seconds = len(moments), float(moments[-1]) if len(moments) else 0.0
    mean = float(moments[-1] - moments[0]) / (updates - 1) if updates > 1 else seconds if updates else math.nan
    error = _standard_error(moments)
    rate = used / seconds if seconds else 0.0
    total = total or 1.0
    return Result(
        strategy=strategy,
        workers=cluster.workers,
        updates=updates,
        seconds=seconds,
        seconds_per_update=mean,
        seconds_per_update_interval=Interval(mean - 1.96 * error, mean + 1.96 * error),
        standard_error=error,
        minibatches_per_second=rate,
        samples_per_second=rate * cluster.batch,
        staleness=Staleness.of(ages),
        waiting=[one.waiting / total for one in shares],
        communicating=[one.communicating / total for one in shares],
        computing=[one.computing / total for one in shares],
    )


def _standard_error(moments: NDArray[np.float64]) -> float:
    """The standard error of the mean time between updates, by batch means."""
    each = len(moments) // _BATCHES
    if each < 2:
        return math.nan if len(moments) < 2 else float(np.diff(moments, prepend=0.0).std() / math.sqrt(len(moments)))
    edges = moments[each - 1 : each * _BATCHES : each]
    means = np.diff(edges, prepend=0.0) / each
    return float(means.std(ddof=1) / math.sqrt(_BATCHES))
