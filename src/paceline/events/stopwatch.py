"""Measures how long a worker loads and computes, and slows it down on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from paceline.config import Slowness
from paceline.events import Cancel, Compute, Load, Reduce
from paceline.events.kernel import KernelMeter
from paceline.events.recorder import Recorder

_NOTABLE = 2e-5
"""Seconds of loading that are worth an event."""


def pause(seconds: float) -> None:
    """Sleeps for at least so many seconds."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)


class Stopwatch:
    """Runs from when a worker has its batch until its gradient is ready."""

    def __init__(self, recorder: Recorder, rank: int, slowness: Slowness | None, seed: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._slowness = slowness if slowness is not None and slowness.where == "computing" else None
        """Of a step as a whole."""
        self._parts = {} if slowness is None or self._slowness is not None else {slowness.where: slowness}
        """Of one part of it."""
        self._source = np.random.default_rng((seed, rank))
        self._started: float | None = None
        self._last = time.perf_counter()
        self._drawn: float | None = None
        self._free: float | None = None
        """When the worker was allowed to go on."""
        self._samples = self._minibatches = 0
        self._asked: float | None = None
        """When the script asked for its next batch."""
        self._away = 0.0
        self._forward = 0.0
        self._since = self._last
        """When the forward pass began."""
        self._backward: float | None = None
        """When the backward pass began that is under way, or was the last."""
        self._exchanged, self._read = 0.0, 0
        """Seconds of the step that were not computing but exchanging, and the bytes that came."""
        self._core: float | None = None
        """CPU seconds of this process at the start of the step."""
        self._kernel = KernelMeter()
        self.sleep: Callable[[float], None] = pause
        """Sleeps so long; a strategy may put one here that is left early when the step is cancelled."""

    @property
    def samples(self) -> int:
        """Of the step that is under way."""
        return self._samples

    @property
    def turned(self) -> bool:
        """True if the current step has had a backward pass."""
        return self._backward is not None

    # -- getting a batch ---------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """The script asks for its next batch."""
        self._asked = time.perf_counter()
        self._away = 0.0
        if self._core is None:
            self._core = time.process_time()

    def away(self, seconds: float) -> None:
        """Seconds since `ask` in which the worker waited for a lease instead of loading."""
        self._away += seconds

    def start(self, samples: int) -> None:
        """A batch was handed out; the watch runs on if it runs already."""
        self._loaded()
        if self._started is None:
            self._started = self._since = time.perf_counter()
            self._exchanged, self._read = 0.0, 0
            self._forward = 0.0
            if self._core is None:
                self._core = time.process_time()
            self._drawn = self._draw()  # here, so that a step that is left early has had its turn, too
        self._samples += samples
        self._minibatches += 1

    def pass_over(self, samples: int, minibatches: int) -> None:
        """Samples and minibatches whose gradient was discarded."""
        self._samples -= samples
        self._minibatches -= minibatches
        if not self._minibatches:
            self._started = None

    def _loaded(self) -> None:
        if self._asked is None:
            return
        now = time.perf_counter()
        seconds = now - self._asked - self._away
        self._asked = None
        if "loading" in self._parts:
            self._slow_down("loading", seconds)
            seconds += time.perf_counter() - now
        if seconds > _NOTABLE:
            self._recorder.add(Load(self._rank, time.perf_counter() - seconds, seconds))

    # -- computing ---------------------------------------------------------------------------------------------------

    def exchanged(self, seconds: float, read: int) -> None:
        """In the middle of a pass, the worker has exchanged something: so long, and so many bytes came."""
        self._exchanged += seconds
        self._read += read

    def _now(self) -> float:
        """The time without the seconds of the step that were exchanges."""
        return time.perf_counter() - self._exchanged

    def turn(self) -> None:
        """The forward pass is over, the backward pass begins."""
        now = self._now()
        self._forward += now - self._since
        if "forward" in self._parts:
            self._slow_down("forward", now - self._since)
            now, before = self._now(), now
            self._forward += now - before
        self._backward = now

    def turn_back(self) -> None:
        """The backward pass is over; there may be another one in the same step."""
        self._since = self._now()

    def _draw(self) -> float:
        """The length of the step that is under way, where lengths are drawn; 0 where not."""
        if self._slowness is None:
            return 0.0
        drawn, self._drawn = self._drawn, None
        return self._slowness.seconds(0.0, self._source) if drawn is None else drawn

    def stop(self, version: int, *, again: bool = False) -> tuple[float, int]:
        """The gradient is ready: seconds and samples since `start`, or since the last update without one.

        again: of the same minibatch, which has had one before.
        """
        start = self._last if self._started is None else self._started
        end = self._now()
        core = 0.0 if self._core is None else time.process_time() - self._core
        kernel = self._kernel.counts() if self._recorder.on else None
        slowed = 0.0
        if self._slowness is not None:
            # A drawn length is that of all a worker does from when it may, getting its batch included.
            began = start if self._free is None or self._slowness.factor > 1 else self._free
            slowed = max((end - began) * self._slowness.factor, self._draw()) - (end - began)
            self.sleep(slowed)
            end = self._now()
        elif "backward" in self._parts:
            self._slow_down("backward", end - (start if self._backward is None else self._backward))
            end = self._now()
        samples, forward = self._samples, self._forward if self._backward is not None else 0.0
        minibatches = self._minibatches or (0 if again else 1)
        self._recorder.add(
            Compute(self._rank, start, end - start, version, minibatches, samples, slowed, forward, core, kernel)
        )
        if self._exchanged:
            self._recorder.add(Reduce(self._rank, end, self._exchanged, self._read))
        self.drop()
        self._free = None
        return end - start, samples

    def cancel(self, version: int, leases: list[int], since: float) -> None:
        """The step that is under way is left, since the server said so at that moment."""
        start = self._last if self._started is None else self._started
        now = time.perf_counter()
        self._recorder.add(Cancel(self._rank, start, now - start, version, leases))
        self.drop()
        self._kernel.begin()
        self._free = since  # it may begin anew from there; the notice and the request of a batch are parts of that

    def drop(self) -> None:
        """Discards the current measurement; the passes of a pipeline are measured instead."""
        self._started = self._drawn = self._backward = self._asked = self._core = None
        self._samples = self._minibatches = self._read = 0
        self._forward = self._exchanged = 0.0

    def slow_pass(self, seconds: float) -> None:
        """A stage has computed for so long: let it take longer, if the worker is slow."""
        if self._slowness is not None:
            self.sleep(max(0.0, self._slowness.seconds(seconds, self._source) - seconds))

    def restart(self, now: float) -> None:
        """An update is over; the worker computes again."""
        self._last = self._since = now
        self._exchanged, self._read = 0.0, 0
        self._kernel.begin()

    def free(self) -> None:
        """The worker may go on with its next step, as soon as it has a batch."""
        self._free = time.perf_counter()

    # -- slowness of a part ------------------------------------------------------------------------------------------

    def slow_link(self, seconds: float) -> None:
        """The worker has exchanged something, which took so long: let it take longer, if its link is slow."""
        if "link" in self._parts:
            self._slow_down("link", seconds)

    def _slow_down(self, part: str, seconds: float) -> None:
        self.sleep(max(0.0, self._parts[part].seconds(seconds, self._source) - seconds))
