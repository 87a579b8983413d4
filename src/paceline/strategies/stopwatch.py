"""Tells how long a worker computes, and makes it slow on purpose."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from paceline.config import Slowness
from paceline.events import Cancel, Compute, Recorder


def _sleep(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)


class Stopwatch:
    """Runs from when a worker has its batch until its gradient is ready."""

    def __init__(self, recorder: Recorder, rank: int, slowness: Slowness | None, seed: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._slowness = slowness
        self._source = random.Random(f"{seed}/{rank}")
        self._started: float | None = None
        self._last = time.perf_counter()
        self._drawn: float | None = None
        self._free: float | None = None
        """When the worker was told to go on."""
        self._samples = self._minibatches = 0
        self.sleep: Callable[[float], None] = _sleep
        """Sleeps so long; a strategy may put one here that is left early when the step is cancelled."""

    @property
    def samples(self) -> int:
        """Of the step that is under way."""
        return self._samples

    def start(self, samples: int) -> None:
        """A batch was handed out; the watch runs on if it runs already."""
        if self._started is None:
            self._started = time.perf_counter()
            self._drawn = self._draw()  # here, so that a step that is left early has had its turn, too
        self._samples += samples
        self._minibatches += 1

    def _draw(self) -> float:
        """The length of the step that is under way, where lengths are drawn; 0 where not."""
        if self._slowness is None:
            return 0.0
        drawn, self._drawn = self._drawn, None
        return self._slowness.seconds(0.0, self._source) if drawn is None else drawn

    def stop(self, version: int) -> tuple[float, int]:
        """The gradient is ready: seconds and samples since `start`, or since the last update without one."""
        start = self._last if self._started is None else self._started
        end = time.perf_counter()
        slowed = 0.0
        if self._slowness is not None:
            # A drawn length is that of all a worker does from when it may, getting its batch included.
            began = start if self._free is None or self._slowness.factor > 1 else self._free
            slowed = max((end - began) * self._slowness.factor, self._draw()) - (end - began)
            self.sleep(slowed)
            end = time.perf_counter()
        samples = self._samples
        self._recorder.add(Compute(self._rank, start, end - start, version, max(1, self._minibatches), samples, slowed))
        self._started = self._free = self._drawn = None
        self._samples = self._minibatches = 0
        return end - start, samples

    def cancel(self, version: int, leases: list[int]) -> None:
        """The step that is under way is left."""
        start = self._last if self._started is None else self._started
        now = time.perf_counter()
        self._recorder.add(Cancel(self._rank, start, now - start, version, leases))
        self._started = self._drawn = None
        self._free = now  # it may begin anew from here; asking for a batch is a part of that
        self._samples = self._minibatches = 0

    def restart(self, now: float) -> None:
        """An update is over: what comes next is computing again."""
        self._last = now

    def free(self) -> None:
        """The worker may go on with its next step, as soon as it has a batch."""
        self._free = time.perf_counter()
