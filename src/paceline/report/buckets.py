"""Sums over time in a bounded number of buckets, which get wider as a run gets longer."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from paceline.report.rows import Numbers, busy_until

MOST = 4096
_NARROWEST = 2.0**-10


class Buckets:
    """Series of sums over the same buckets."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.width = _NARROWEST
        self._used = 0
        """Buckets in use, counted from the first."""
        self._series: defaultdict[tuple[object, ...], Numbers] = defaultdict(lambda: np.zeros(MOST))

    def add_intervals(self, key: tuple[object, ...], starts: Numbers, seconds: Numbers) -> None:
        """Adds the seconds of successive intervals to the buckets that they overlap."""
        if not len(starts):
            return
        first, last = float(starts.min()), float((starts + seconds).max())
        self._reach(first, last)
        low, high = self._index(first), self._index(last)
        edges: Numbers = self.start + self.width * np.arange(low, high + 2, dtype=np.float64)
        busy = busy_until(starts, seconds)(edges)
        self._series[key][low : high + 1] += np.diff(busy)

    def add_points(self, key: tuple[object, ...], moments: Numbers, amounts: Numbers) -> None:
        """Adds amounts to the buckets of their moments."""
        if not len(moments):
            return
        self._reach(float(moments.min()), float(moments.max()))
        index = np.clip(((moments - self.start) / self.width).astype(int), 0, MOST - 1)
        np.add.at(self._series[key], index, amounts)

    def spread(self, key: tuple[object, ...], start: float, seconds: float, amount: float) -> None:
        """Adds an amount evenly to the buckets that a span overlaps."""
        seconds = max(seconds, 1e-9)
        self._reach(start, start + seconds)
        low, high = self._index(start), self._index(start + seconds)
        edges: Numbers = self.start + self.width * np.arange(low, high + 2, dtype=np.float64)
        self._series[key][low : high + 1] += amount / seconds * np.diff(np.clip(edges, start, start + seconds))

    def get(self, key: tuple[object, ...], count: int) -> list[float]:
        """The first `count` sums."""
        series = self._series.get(key)
        return [0.0] * count if series is None else [float(value) for value in series[:count]]

    def count(self, last: float) -> int:
        """Buckets from the start until a moment."""
        return self._index(last) + 1

    def _index(self, moment: float) -> int:
        return max(0, min(MOST - 1, int((moment - self.start) / self.width)))

    def _reach(self, first: float, last: float) -> None:
        """Widens and shifts the buckets until they contain these moments."""
        while first < self.start:
            more = math.ceil((self.start - first) / self.width)
            if self._used + more > MOST:
                self._widen()
                continue
            for series in self._series.values():
                series[more:] = series[: MOST - more].copy()
                series[:more] = 0.0
            self.start -= more * self.width
            self._used += more
        while last - self.start >= self.width * MOST:
            self._widen()
        self._used = max(self._used, self._index(last) + 1)

    def _widen(self) -> None:
        self.width *= 2
        self._used = (self._used + 1) // 2
        for series in self._series.values():
            series[: MOST // 2] = series[::2] + series[1::2]
            series[MOST // 2 :] = 0.0
