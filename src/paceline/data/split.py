"""How a batch is divided among workers. Pure: the same on every worker, from the same numbers."""

from __future__ import annotations

from collections.abc import Sequence


def even(total: int, workers: int) -> list[int]:
    """As even as can be; what is left over goes to the lowest ranks, so rank 0 always has a share."""
    return [total // workers + (rank < total % workers) for rank in range(workers)]


def proportional(total: int, paces: Sequence[float]) -> list[int]:
    """In proportion to how fast each worker is, by largest remainders; everybody gets a sample if there are enough."""
    workers = len(paces)
    if total <= workers or not all(pace > 0 for pace in paces):
        return even(total, workers)
    exact = [total * pace / sum(paces) for pace in paces]
    shares = [max(1, int(share)) for share in exact]
    # Hand out what rounding left, or take back what the smallest shares were lifted by.
    while (missing := total - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        takers = [rank for rank in range(workers) if step > 0 or shares[rank] > 1]
        taker = max(takers, key=lambda rank: (step * (exact[rank] - shares[rank]), -rank))
        shares[taker] += step
    return shares


def scaled(shares: Sequence[int], total: int) -> list[int]:
    """The same proportions for a batch of another size: the last, uneven one of an epoch."""
    if total == sum(shares):
        return list(shares)
    return proportional(total, [float(share) for share in shares])
