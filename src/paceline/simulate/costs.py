"""What communication costs: N ranks, S bytes, B bytes per second each way, alpha seconds per message."""

from __future__ import annotations

import math

from paceline.errors import UsageError


def lower_bound(ranks: int, size: float, bandwidth: float) -> float:
    """No all-reduce can be faster (Patarasuk and Yuan)."""
    return 2 * (ranks - 1) / ranks * size / bandwidth


def ring(ranks: int, size: float, bandwidth: float, alpha: float) -> float:
    return 2 * (ranks - 1) * (alpha + size / (ranks * bandwidth))


def tree(ranks: int, size: float, bandwidth: float, alpha: float) -> float:
    """Binary, not pipelined: to the root and back."""
    return 2 * math.ceil(math.log2(ranks)) * (alpha + size / bandwidth) if ranks > 1 else 0.0


def halving_doubling(ranks: int, size: float, bandwidth: float, alpha: float) -> float:
    return 2 * math.log2(ranks) * alpha + lower_bound(ranks, size, bandwidth)


def hub(ranks: int, size: float, bandwidth: float, alpha: float) -> float:
    """One server: everybody pushes, then everybody pulls, all through its port."""
    return 2 * alpha + 2 * ranks * size / bandwidth


def sharded(ranks: int, servers: int, size: float, bandwidth: float, alpha: float) -> float:
    """Servers on machines of their own, each with an equal shard."""
    if servers < 1:
        raise UsageError(f"there are {servers} servers; there must be at least 1")
    return 2 * alpha + 2 * max(1.0, ranks / servers) * size / bandwidth


def direct(ranks: int, size: float, bandwidth: float, alpha: float) -> float:
    """Fully connected: everybody owns a shard."""
    return 2 * alpha + lower_bound(ranks, size, bandwidth)


TOPOLOGIES = {"ring": ring, "tree": tree, "halving-doubling": halving_doubling, "hub": hub, "direct": direct}


def byteps(machines: int, spare: int, size: float, bandwidth: float) -> float:
    """The best split over n machines that compute and k that only serve."""
    n, k = machines, spare
    return 2 * n * (n - 1) * size / ((n * n + k * n - 2 * k) * bandwidth)


def byteps_shares(machines: int, spare: int) -> tuple[float, float]:
    """Of the parameters, what each spare machine and what each computing machine holds."""
    n, k = machines, spare
    whole = n * n + k * n - 2 * k
    return 2 * (n - 1) / whole, (n - k) / whole
