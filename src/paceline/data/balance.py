"""Splits batches by the workers' measured paces, so that uneven devices finish together.

Every worker has the same measurements (they are exchanged at each update), so all compute the same split. Loaders fetch
ahead, each worker by a different amount, so a new split applies from a round that none of them can have fetched yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.data.split import even, proportional

_FIRST = 3
"""Updates to measure before the first split."""
_EVERY = 10
"""Updates between later ones."""
_TOLERANCE = 0.05
"""The least relative gain of the slowest worker for which the split changes."""


class Balancer:
    """The split of a global batch through a run."""

    def __init__(self, workers: int, total: int, *, on: bool, changed: Callable[[int, list[int]], None]) -> None:
        self._workers, self._total, self._on, self._changed = workers, total, on, changed
        self._splits: list[tuple[int, list[int]]] = [(0, even(total, workers))]
        """First round and shares of each split."""
        self._seconds = [0.0] * workers
        self._samples = [0] * workers
        self._updates = 0
        self._due = _FIRST

    def shares(self, round_number: int) -> list[int]:
        """The samples of each worker in a round; rounds are counted over all epochs."""
        for start, shares in reversed(self._splits):
            if start <= round_number:
                return shares
        return self._splits[0][1]

    def measure(self, paces: Sequence[tuple[float, int]], round_number: int, ahead: int) -> None:
        """Adds each worker's seconds and samples of a round; loaders fetch up to `ahead` rounds in advance."""
        if not self._on or any(samples == 0 or seconds <= 0 for seconds, samples in paces):
            return
        self._updates += 1
        if self._updates > 1:  # the first includes start-up costs
            for rank, (seconds, samples) in enumerate(paces):
                self._seconds[rank] += seconds
                self._samples[rank] += samples
        if self._updates <= self._due or round_number < self._splits[-1][0]:
            if round_number < self._splits[-1][0]:
                self._forget()  # measured under the previous split
            return
        speeds = [samples / seconds for seconds, samples in zip(self._seconds, self._samples, strict=True)]
        current, wanted = self._splits[-1][1], proportional(self._total, speeds)
        if _slowest(wanted, speeds) < (1 - _TOLERANCE) * _slowest(current, speeds):
            start = round_number + ahead + 1
            self._splits.append((start, wanted))
            del self._splits[:-2]
            self._changed(start, wanted)
        self._due = self._updates + _EVERY
        self._forget()

    def _forget(self) -> None:
        self._seconds = [0.0] * self._workers
        self._samples = [0] * self._workers


def _slowest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))
