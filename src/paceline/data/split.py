"""Divides a batch among workers. Pure: the same on every worker, from the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def even(total: int, workers: int) -> list[int]:
    """As even as possible; the remainder goes to the lowest ranks, so rank 0 always has a share."""
    return [total // workers + (rank < total % workers) for rank in range(workers)]


def divided(batch: Sequence[Any], workers: int) -> list[Sequence[Any]]:
    """A batch as one part per worker, as even as possible; fewer if it has fewer samples than there are workers."""
    ends = itertools.accumulate(even(len(batch), workers), initial=0)
    return [batch[start:end] for start, end in itertools.pairwise(ends) if end > start]


def proportional(total: int, paces: Sequence[float]) -> list[int]:
    """In proportion to each worker's speed, by largest remainders; each gets a sample if there are enough."""
    workers = len(paces)
    if total <= workers or not all(pace > 0 for pace in paces):
        return even(total, workers)
    exact = [total * pace / sum(paces) for pace in paces]
    shares = [max(1, int(share)) for share in exact]
    # Distribute the rounding remainder, or take back what the smallest shares were raised by.
    while (missing := total - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        takers = [rank for rank in range(workers) if step > 0 or shares[rank] > 1]
        taker = max(takers, key=lambda rank: (step * (exact[rank] - shares[rank]), -rank))
        shares[taker] += step
    return shares


def scaled(shares: Sequence[int], total: int) -> list[int]:
    """The same proportions for a batch of another size, such as the last one of an epoch."""
    if total == sum(shares):
        return list(shares)
    return proportional(total, [float(share) for share in shares])
