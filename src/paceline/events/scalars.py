"""The values that loggers show, from a run's events: reported metrics, and the run's own. The names are stable.

| name | value |
|---|---|
| the script's | reported by the lead with `team.report` |
| `paceline/updates` | updates of the parameters so far |
| `paceline/updates_per_second` | in the last window |
| `paceline/samples_per_second` | samples of used gradients, in the last window |
| `paceline/staleness` | mean over the pushes of the last window, in updates |
| `paceline/waiting` | share of the workers' time in the last window that they waited |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from paceline.events import Compute, Event, Join, Leave, Lost, Metric, Omitted, Pass, Push, Roster, Setup, Update, Wait

_WINDOW = 2.0
"""Seconds over which the run's own values are averaged."""


class Values(NamedTuple):
    """Named values at one version of the parameters."""

    version: int
    wall: float
    """Unix time."""
    values: dict[str, float]


@dataclasses.dataclass(slots=True)
class _Window:
    """Sums over the events that end in a window."""

    version: int = 0
    """The newest one."""
    computed: int = 0
    pushed: int = 0
    """Samples, of gradients and of pushes."""
    ages: list[int] = dataclasses.field(default_factory=list)
    waited: float = 0.0
    workers: int = 1
    whole: bool = True
    """True if all its events are recorded."""


class RunScalars:
    """Turns the events of a run into values, as they are read."""

    def __init__(self, *, each_worker: bool = False) -> None:
        """each_worker: also the pace and the staleness of every worker, at every step."""
        self._each_worker = each_worker
        self._wall: float | None = None
        """Unix time at the monotonic clock's 0."""
        self._workers: set[int] = set()
        self._lead = 0
        self._windows: dict[int, _Window] = {}
        self._next = 0
        """The first window that is not complete; what comes later than it should counts there."""
        self._first, self._last = math.inf, -math.inf
        """Start of the first event and end of the last one of a training."""
        self._version = 0
        """The newest version of the windows that are complete."""
        self._served = False
        """True if gradients are pushed to a server."""
        self.config: dict[str, Any] = {}
        """Strategy and hyperparameters, once they are known."""

    def add(self, events: Iterable[Event]) -> list[Values]:
        """Adds events; returns the values that they tell at once."""
        found = []
        for event in events:
            version, scalars = self._add(event)
            if scalars:
                values = {name: math.nan if value is None else float(value) for name, value in scalars.items()}
                found.append(Values(version, (self._wall or 0.0) + event.start, values))
        return found

    def _add(self, event: Event) -> tuple[int, dict[str, Any]]:
        match event:
            case Join() | Leave() | Lost() | Roster():
                self._change_members(event)
            case Setup():
                self.config |= described(event)
            case Metric() if event.rank == self._lead:
                return event.version, dict(event.values)
            case Compute() | Pass():
                self._window(event).computed += event.samples
                if self._each_worker and isinstance(event, Compute):
                    pace = event.seconds / max(1, event.minibatches)
                    return event.version, {f"seconds_per_minibatch/worker_{event.rank}": pace}
            case Wait():
                self._window(event).waited += event.seconds
            case Update() if not event.skipped:
                window = self._window(event)
                window.version = max(window.version, event.version)
            case Omitted():
                window = self._window(event)
                window.version = max([window.version, *(last for _, last, _ in event.updates)])
                window.whole = False
                if (begun := self._windows.get(int(event.start // _WINDOW))) is not None:
                    begun.whole = False
            case Push():
                self._served = True
                if event.outcome in ("used", "held"):
                    window = self._window(event)
                    window.pushed += event.samples
                    window.ages.append(event.staleness)
                if self._each_worker:
                    return event.version, {f"staleness/worker_{event.rank}": event.staleness}
        return 0, {}

    def _change_members(self, event: Join | Leave | Lost | Roster) -> None:
        match event:
            case Join():
                self._wall = event.wall - event.start if self._wall is None else self._wall
                self._workers.add(event.rank)
                self.config.setdefault("strategy", event.strategy)
            case Roster():
                self._workers = set(event.workers)
            case _:
                self._workers.discard(event.rank)
        if isinstance(event, Lost | Roster) and self._lead not in self._workers:
            self._lead = min(self._workers, default=self._lead)

    def _window(self, event: Event) -> _Window:
        end = event.start + getattr(event, "seconds", 0.0)
        self._first, self._last = min(self._first, event.start), max(self._last, end)
        window = self._windows.setdefault(max(self._next, int(end // _WINDOW)), _Window())
        window.workers = max(window.workers, len(self._workers))
        return window

    def settle(self, until: float = math.inf) -> list[Values]:
        """The run's own values of all windows before a time; no event may follow that ends in one of them."""
        found = []
        for index in sorted(self._windows):
            if (index + 1) * _WINDOW > until:
                break
            window, self._next = self._windows.pop(index), index + 1
            begin, end = max(self._first, index * _WINDOW), min(self._last, (index + 1) * _WINDOW)
            seconds, newest = end - begin, max(self._version, window.version)
            if seconds > 0:
                values = self._of(window, newest, seconds)
                found.append(Values(newest, (self._wall or 0.0) + end, values))
            self._version = newest
        return found

    def _of(self, window: _Window, newest: int, seconds: float) -> dict[str, float]:
        samples = window.pushed if self._served else window.computed
        if not window.whole:
            return {"paceline/updates": newest}
        return {
            "paceline/updates": newest,
            "paceline/updates_per_second": (newest - self._version) / seconds,
            "paceline/samples_per_second": samples / seconds,
            "paceline/staleness": sum(window.ages) / max(1, len(window.ages)),
            "paceline/waiting": min(1.0, window.waited / (seconds * window.workers)),
        }


def described(setup: Setup) -> dict[str, Any]:
    """The configuration that loggers show."""
    known: dict[str, Any] = {
        "world_size": setup.world_size,
        "model": setup.model,
        "parameters": setup.parameters,
        "optimizer": setup.optimizer,
        "batch": setup.batch,
    }
    known |= {f"optimizer.{name}": value for name, value in setup.hyperparameters.items()}
    return {name: value for name, value in known.items() if value is not None}


def all_scalars(events: Iterable[Event]) -> Iterator[Values]:
    """All values of a run that is over, those of each worker too."""
    scalars = RunScalars(each_worker=True)
    for event in events:
        yield from scalars.add([event])
    yield from scalars.settle()
