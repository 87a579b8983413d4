"""Sums of events that were omitted from the record of a long run, and ranges of numbers in few values."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

Range = tuple[int, int]
"""The first and the last of successive numbers."""


class OmittedSums(msgspec.Struct, omit_defaults=True):
    """Sums over the omitted events of one worker or server."""

    events: dict[str, int] = {}
    """Events by kind."""
    seconds: dict[str, float] = {}
    """Seconds by kind of event."""
    waits: dict[int, float] = {}
    """Seconds of waiting by the worker that was waited for."""
    gradients: int = 0
    minibatches: int = 0
    """Minibatches that it computed."""
    whole: int = 0
    """Those of them that count for the run: the stages of a pipeline share one."""
    samples: int = 0
    forward: float = 0.0
    slowed: float = 0.0
    core: float = 0.0
    longest: float = 0.0
    """Seconds of the longest gradient."""
    read: int = 0
    """Bytes read from other workers' memory."""
    sent: int = 0
    """Bytes of observed messages."""
    received: int = 0
    """Bytes of values and gradients that came from other machines' stages."""
    pushed: int = 0
    """Bytes of pushes."""
    saved: int = 0
    """Bytes saved by compression."""
    pushed_minibatches: int = 0
    pushed_samples: int = 0
    dropped: int = 0
    """Pushes that were dropped."""
    version: int = 0
    """The newest version."""


class Ranges:
    """A set of whole numbers that are mostly successive."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.count = 0

    def __contains__(self, number: int) -> bool:
        place = bisect_left(self._lasts, number)
        return place < len(self._firsts) and self._firsts[place] <= number

    def add(self, first: int, last: int) -> int:
        """Adds all numbers from the first to the last; returns how many of them are new."""
        low = bisect_left(self._lasts, first - 1)
        high = low
        before = 0
        while high < len(self._firsts) and self._firsts[high] <= last + 1:
            first, last = min(first, self._firsts[high]), max(last, self._lasts[high])
            before += self._lasts[high] - self._firsts[high] + 1
            high += 1
        self._firsts[low:high], self._lasts[low:high] = [first], [last]
        new = last - first + 1 - before
        self.count += new
        return new
