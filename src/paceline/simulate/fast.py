"""The simple policies without a loop over events: all updates at once, where one does not depend on the last."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from paceline import config
from paceline.config import Strategy
from paceline.simulate.distributions import Distribution
from paceline.simulate.result import Result, result

_AT_ONCE = 4_000_000
"""Draws that are in memory at once."""


def simulate_fast(strategy: Strategy, workers: int, compute: Distribution, updates: int, seed: int) -> Result | None:
    """The same as the event loop gives, in distribution; None for policies that need the loop."""
    source = np.random.default_rng(seed)
    match strategy:
        case config.Sync():
            return _of_workers(strategy, workers, workers, compute, updates, source)
        case config.KSync():
            return _of_workers(strategy, workers, strategy.k, compute, updates, source)
        case config.KBatchSync():
            return _of_minibatches(strategy, workers, strategy.k, compute, updates, source)
        case config.Async():
            return _merged(strategy, workers, 1, compute, updates, source)
        case config.KBatchAsync():
            return _merged(strategy, workers, strategy.k, compute, updates, source)
    return None


def _of_workers(
    strategy: Strategy, workers: int, k: int, compute: Distribution, updates: int, source: np.random.Generator
) -> Result:
    """Every update begins with all workers, and ends with the K-th of them."""
    parts: list[NDArray[np.float64]] = []
    waited = 0.0
    for count in _blocks(updates, workers):
        draws = np.partition(compute.draw(source, (count, workers)), k - 1, axis=1)
        parts.append(draws[:, k - 1])
        waited += float((draws[:, k - 1 : k] - draws[:, :k]).sum())
    moments = np.cumsum(np.concatenate(parts))
    share = waited / workers / float(moments[-1])
    return result(
        strategy=str(strategy),
        workers=workers,
        moments=moments,
        used=k * updates,
        ages=Counter({0: k * updates}),
        cancelled=(workers - k) * updates,
        waiting=[share] * workers,
    )


def _of_minibatches(
    strategy: Strategy, workers: int, k: int, compute: Distribution, updates: int, source: np.random.Generator
) -> Result:
    """Every update begins with all workers, and ends with the K-th minibatch of whomever."""
    parts: list[NDArray[np.float64]] = []
    for count in _blocks(updates, workers * k):
        ends = np.cumsum(compute.draw(source, (count, workers, k)), axis=2).reshape(count, workers * k)
        parts.append(np.partition(ends, k - 1, axis=1)[:, k - 1])
    moments = np.cumsum(np.concatenate(parts))
    return result(
        strategy=str(strategy),
        workers=workers,
        moments=moments,
        used=k * updates,
        ages=Counter({0: k * updates}),
        cancelled=(workers - 1) * updates,
        waiting=[0.0] * workers,
    )


def _merged(
    strategy: Strategy, workers: int, k: int, compute: Distribution, updates: int, source: np.random.Generator
) -> Result:
    """Nobody waits: every worker's steps follow each other, and every K-th of all that end is an update."""
    needed = k * updates
    clock = np.zeros(workers)
    ends = np.zeros(0)
    who = np.zeros(0, np.int32)
    while True:
        steps = max(16, min(_AT_ONCE // workers, int(1.1 * (needed - len(ends)) / workers) + 16))
        more = clock[:, None] + np.cumsum(compute.draw(source, (workers, steps)), axis=1)
        clock = more[:, -1]
        ends = np.concatenate([ends, more.ravel()])
        who = np.concatenate([who, np.repeat(np.arange(workers, dtype=np.int32), steps)])
        # Until the first worker's draws end, all of them are known.
        if int((ends <= clock.min()).sum()) >= needed:
            break
    order = np.argsort(ends, kind="stable")[:needed]
    moments, ranks = ends[order][k - 1 :: k], who[order]
    return result(
        strategy=str(strategy),
        workers=workers,
        moments=moments,
        used=needed,
        ages=_ages(ranks, workers, k),
        waiting=[0.0] * workers,
    )


def _ages(ranks: NDArray[np.int32], workers: int, k: int) -> Counter[int]:
    """How many updates there were between each worker's pull, with its last push, and its push."""
    count = len(ranks)
    by_worker = np.argsort(ranks, kind="stable")
    sorted_ranks = ranks[by_worker]
    # The version at a push is how many updates there were before it; at the pull after it, with its own.
    before = by_worker // k
    after = (by_worker + 1) // k
    pulled = np.concatenate([[0], after[:-1]])
    pulled[np.concatenate([[True], sorted_ranks[1:] != sorted_ranks[:-1]])] = 0
    ages, times = np.unique(before - pulled, return_counts=True)
    assert count == int(times.sum())
    return Counter(dict(zip(ages.tolist(), times.tolist(), strict=True)))


def _blocks(updates: int, draws: int) -> list[int]:
    """How many updates to make at a time."""
    each = max(1, _AT_ONCE // draws)
    return [min(each, updates - done) for done in range(0, updates, each)]
