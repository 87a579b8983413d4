"""Aggregates a run of any length for its figures, in bounded memory and in one pass."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.events import (
    ACTIVITIES,
    Event,
    Join,
    Leave,
    Lost,
    Message,
    Metric,
    Omitted,
    Pass,
    Recovery,
    Setup,
    Stages,
    StageTransfer,
    Wait,
)
from paceline.events.bubbles import Bubbles
from paceline.events.omitted import OmittedSums, Ranges
from paceline.events.transfers import Transfers
from paceline.report.attribution import WaitAttribution
from paceline.report.buckets import Buckets
from paceline.report.detail import Detail
from paceline.report.rows import (
    CANCELLED,
    COMMUNICATING,
    COMPUTING,
    KINDS,
    LOADING,
    PUSH,
    ROW,
    UPDATING,
    Numbers,
    Rows,
    by_kind,
    ends,
    pushes_of,
    rows_of,
)
from paceline.report.slowness import StepTimes

_FINE = math.log(1.02)
_BINS = 1500
_POINTS = 2000
"""The most points of a metric's curve."""
_KIND_OF = {kind.__name__.lower(): KINDS.index(activity) for kind, activity in ACTIVITIES.items()}
"""By kind of event, in the sums of omitted ones: its activity."""


@dataclasses.dataclass(slots=True)
class Tally:
    """The totals of one worker or server."""

    seconds: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(len(KINDS)))
    """By kind, in the order of `KINDS`."""
    forward: float = 0.0
    slowed: float = 0.0
    minibatches: int = 0
    samples: int = 0
    updates: int = 0
    cancelled: int = 0
    read: int = 0
    """Bytes read from other workers' memory."""
    pushed: int = 0
    saved: int = 0
    sent: int = 0
    """Bytes of observed messages."""
    steps: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(_BINS, np.int64))
    """A histogram of step lengths, on a fine logarithmic scale."""
    longest: float = 0.0
    state: str = "joined"
    heard: float = 0.0
    """The time of its last activity."""
    came: float = -math.inf
    """The time at which it joined; if several had this rank, the last one."""
    version: int = 0
    stale: float = 0.0
    """Staleness of its last push."""

    @property
    def own_seconds(self) -> float:
        """Seconds of a worker's own steps, without waiting and cancelled work."""
        return float(self.seconds[[COMPUTING, LOADING, COMMUNICATING, UPDATING]].sum())

    def quantile(self, share: float) -> float:
        """A quantile of the step lengths, in seconds."""
        total = int(self.steps.sum())
        if not total:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self.steps), share * total, "left"))
        return min(self.longest, 1e-6 * math.exp((index + 0.5) * _FINE))


@dataclasses.dataclass(slots=True)
class Curve:
    """A metric over time: moments, versions, values. In a long one each point is the mean of several values."""

    rank: int
    points: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    last: float = math.nan
    """The newest value."""
    _every: int = 1
    _rest: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)

    def add(self, moment: float, version: int, value: float) -> None:
        self.last = value
        if not math.isfinite(value):
            return
        self._rest.append((moment, float(version), value))
        if len(self._rest) < self._every:
            return
        self.points.append(_mean(self._rest))
        self._rest = []
        if len(self.points) >= 2 * _POINTS:
            self._every *= 2
            self.points = [_mean(pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]

    def series(self) -> tuple[list[float], list[float], list[float]]:
        """Moments, versions and values, the newest included."""
        points = [*self.points, *([_mean(self._rest)] if self._rest else [])]
        moments, versions, values = zip(*points, strict=True) if points else ((), (), ())
        return list(moments), list(versions), list(values)


def _mean(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    moments, versions, values = (sum(column) / len(points) for column in zip(*points, strict=True))
    return moments, versions, values


class SampleCounts:
    """Counts the samples between the first update and the last."""

    def __init__(self, name: str) -> None:
        self.key = (name,)
        self.inside = 0
        self._later = np.zeros((0, 2))
        """Moments and samples after the last update so far."""

    def add(self, moments: Numbers, samples: Numbers, first: float, last: float) -> None:
        """Adds samples; first, last: the times of the first and the last update so far."""
        self._later = np.concatenate([self._later, np.stack([moments, samples], axis=1)])
        inside = (self._later[:, 0] > first) & (self._later[:, 0] <= last)
        self.inside += int(self._later[inside, 1].sum())
        self._later = self._later[self._later[:, 0] > last]


class RunAggregate:
    """Aggregates events as they arrive; its memory does not grow with the run."""

    def __init__(self, limit: int = 100_000) -> None:
        """limit: single intervals to keep for the zoomed timeline."""
        self.tallies: defaultdict[int, Tally] = defaultdict(Tally)
        self.blame = WaitAttribution()
        self.steps = StepTimes()
        self.detail = Detail(limit)
        self.staleness: Counter[int] = Counter()
        self.curves: dict[str, Curve] = {}
        self.strategy: str | None = None
        self.wall: float | None = None
        """Unix time at the monotonic clock's 0."""
        self.served = False
        """True if gradients are pushed to a server."""
        self.is_set_up = False
        """True once the lead has given a model to the team."""
        self.recoveries: list[Recovery] = []
        """Servers that were killed and came back."""
        self.joined = math.inf
        """The time at which the first worker joined."""
        self.first, self.last = math.inf, -math.inf
        """The start of training, and its end as far as counted."""
        self.omitted = 0
        """Events of which only sums were recorded."""
        self._versions = Ranges()
        """Of the updates that are counted."""
        self._newest = -1
        """The newest counted version of a recorded update, if all workers make the same updates."""
        self._first_update: tuple[int, float] = (-1, math.inf)
        """Version and moment."""
        self._last_update = -math.inf
        self._computed, self._pushed = SampleCounts("computed"), SampleCounts("pushed")
        self.buckets: Buckets | None = None
        self.bubbles, self.transfers = Bubbles(), Transfers()
        self._pending = np.zeros(0, ROW)
        self._pushes = np.zeros(0, PUSH)
        self._sums: list[Omitted] = []
        """Those that are not counted so far."""

    @property
    def updates(self) -> int:
        return self._versions.count

    def feed(self, events: Sequence[Event]) -> None:
        """Adds events, in any order."""
        groups = by_kind(events)
        for join in groups.get(Join, ()):
            self.strategy = join.strategy
            self.wall = join.wall - join.start
            tally = self.tallies[join.rank]
            tally.heard = max(tally.heard, join.start)
            if join.start > tally.came:
                tally.came, tally.state = join.start, "joined"
            self.joined = min(self.joined, join.start)
        self.is_set_up = self.is_set_up or bool(groups.get(Setup))
        self.recoveries += groups.get(Recovery, ())
        for kind, word in ((Leave, "left"), (Lost, "died")):
            for event in groups.get(kind, ()):
                if event.start < self.tallies[event.rank].came:
                    continue  # about an earlier worker with this rank
                self.tallies[event.rank].state = word
                self.tallies[event.rank].heard = event.start
        for metric in groups.get(Metric, ()):
            self._report(metric)
        for message in groups.get(Message, ()):
            if message.direction == "send":
                self.tallies[message.rank].sent += message.bytes
        for one in groups.get(Pass, ()):
            self.bubbles.add(one)
        for moved in (*groups.get(StageTransfer, ()), *groups.get(Wait, ()), *groups.get(Omitted, ())):
            self.transfers.add(moved)
        for cut in groups.get(Stages, ()):
            self.bubbles.add_cut(cut)
        self._sums += groups.get(Omitted, ())
        rows, pushes = rows_of(groups), pushes_of(groups)
        for rank in np.unique(rows["rank"]):
            self._note_activity(self.tallies[int(rank)], rows[rows["rank"] == rank])
        self.served = self.served or len(pushes) > 0
        self._pending = np.concatenate([self._pending, rows])
        self._pushes = np.concatenate([self._pushes, pushes])

    @staticmethod
    def _note_activity(tally: Tally, rows: Rows) -> None:
        """Updates the state and the time of the last activity."""
        moments = ends(rows)
        final = int(np.argmax(moments))
        if moments[final] >= tally.heard:
            tally.heard = float(moments[final])
            if tally.state not in ("left", "died"):
                tally.state = KINDS[int(rows["kind"][final])]

    def advance(self, until: float = math.inf) -> None:
        """Counts all that began before `until`; no earlier event may follow."""
        now = self._pending["start"] < until
        rows = self._pending[now]
        if self.buckets is None:
            if not len(rows):
                return
            self.buckets = Buckets(float(rows["start"].min()))
        rows = rows[np.argsort(rows["start"], kind="stable")]
        early = self._pushes["start"] < until
        pushes = self._pushes[early]
        self._pending, self._pushes = self._pending[~now], self._pushes[~early]
        if len(rows):
            self.first = min(self.first, float(rows["start"].min()))
            self.last = max(self.last, min(until, float(ends(rows).max())))
        for rank in np.unique(rows["rank"]):
            self._count(int(rank), rows[rows["rank"] == rank])
        self._count_pushes(pushes)
        self._count_updates(rows, pushes)
        for one in [one for one in self._sums if one.start < until]:
            self._count_omitted(one)
        self._sums = [one for one in self._sums if one.start >= until]
        self.blame.add(rows, until)
        self.steps.add(rows)
        self.detail.add(rows, pushes)

    def _count(self, rank: int, rows: Rows) -> None:
        assert self.buckets is not None
        tally = self.tallies[rank]
        for kind in range(len(KINDS)):
            mine = rows[rows["kind"] == kind]
            tally.seconds[kind] += mine["seconds"].sum()
            self.buckets.add_intervals((rank, kind), mine["start"], mine["seconds"])
            if kind == COMPUTING and len(mine):
                self._count_steps(tally, mine)
        tally.cancelled += int((rows["kind"] == CANCELLED).sum())
        tally.updates += int((rows["kind"] == UPDATING).sum())
        tally.read += int(rows["bytes"].sum())
        tally.version = max(tally.version, int(rows["version"].max()))

    def _count_steps(self, tally: Tally, steps: Rows) -> None:
        tally.forward += float(steps["forward"].sum())
        tally.slowed += float(steps["slowed"].sum())
        tally.minibatches += int(steps["minibatches"].sum())
        tally.samples += int(steps["samples"].sum())
        tally.longest = max(tally.longest, float(steps["seconds"].max()))
        index = np.log(np.maximum(steps["seconds"], 1e-6) / 1e-6) / _FINE
        tally.steps += np.bincount(np.clip(index.astype(int), 0, _BINS - 1), minlength=_BINS)

    def _count_pushes(self, pushes: Rows) -> None:
        for age, count in zip(*np.unique(pushes["staleness"][pushes["used"]], return_counts=True), strict=True):
            self.staleness[int(age)] += int(count)
        for rank in np.unique(pushes["rank"]):
            mine, tally = pushes[pushes["rank"] == rank], self.tallies[int(rank)]
            tally.pushed += int(mine["bytes"].sum())
            tally.saved += int(mine["saved"].sum())
            tally.stale = float(mine["staleness"][-1])

    def _count_updates(self, rows: Rows, pushes: Rows) -> None:
        """Updates and samples over time."""
        assert self.buckets is not None
        updates = rows[(rows["kind"] == UPDATING) & ~rows["skipped"]]
        # If all workers make the same update, the first one counts; the version exists when the last one is done.
        counted = self._each_once(updates)
        moments = ends(counted)
        runs = np.split(counted["version"], np.flatnonzero(np.diff(counted["version"]) != 1) + 1)
        for run in runs if len(counted) else ():
            self._versions.add(int(run[0]), int(run[-1]))
        self.buckets.add_points(("updates",), moments, np.ones(len(moments)))
        if len(counted):
            self._span(counted if counted["rank"][0] < 0 else updates)
        steps, used = rows[rows["kind"] == COMPUTING], pushes[pushes["used"]]
        for samples, when, many in (
            (self._computed, ends(steps), steps["samples"]),
            (self._pushed, used["start"], used["samples"]),
        ):
            samples.add(when, many, *self.update_span)
            self.buckets.add_points(samples.key, when, many)

    def _count_omitted(self, one: Omitted) -> None:
        """Adds the sums of events that were not recorded, evenly over their time."""
        assert self.buckets is not None
        self.omitted += one.events
        end, updated = one.start + one.seconds, one.start + one.updated
        self.first, self.last = min(self.first, one.start), max(self.last, end)
        for rank, sums in one.sums.items():
            self._add_sums(rank, sums, one)
            for on, seconds in sums.waits.items():
                self.blame.add_unexplained(on, seconds)
        if one.rank >= 0:
            self.steps.interrupt(one.rank, one.start, end)
        new = sum(self._versions.add(first, last) for first, last, _ in one.updates)
        self.buckets.spread(("updates",), one.start, one.seconds, new)
        if one.updates:
            if self._first_update[1] == math.inf:
                self._first_update = one.updates[0][0], updated
            self._last_update = max(self._last_update, updated)
        for age, count in one.staleness.items():
            self.staleness[age] += count
        computed = sum(sums.samples for sums in one.sums.values())
        for samples, moment, many in (
            (self._computed, updated, computed - one.late),
            (self._computed, end, one.late),
            (self._pushed, updated, one.used),
        ):
            if many:
                samples.add(np.array([moment]), np.array([float(many)]), *self.update_span)
                self.buckets.spread(samples.key, one.start, one.seconds, many)

    def _add_sums(self, rank: int, sums: OmittedSums, one: Omitted) -> None:
        assert self.buckets is not None
        tally = self.tallies[rank]
        tally.heard = max(tally.heard, one.start + one.seconds)
        for kind, seconds in sums.seconds.items():
            if kind in _KIND_OF:
                tally.seconds[_KIND_OF[kind]] += seconds
                self.buckets.spread((rank, _KIND_OF[kind]), one.start, one.seconds, seconds)
        tally.forward += sums.forward
        tally.slowed += sums.slowed
        tally.minibatches += sums.minibatches
        tally.samples += sums.samples
        tally.longest = max(tally.longest, sums.longest)
        tally.cancelled += sums.events.get("cancel", 0)
        tally.updates += sums.events.get("update", 0)
        tally.read += sums.read
        tally.sent += sums.sent
        tally.pushed += sums.pushed
        tally.saved += sums.saved
        tally.version = max(tally.version, sums.version)
        self.served = self.served or "push" in sums.events

    def _each_once(self, updates: Rows) -> Rows:
        """One row per version: the first worker's or, if that is gone, the lowest remaining rank's."""
        if not (updates["rank"] >= 0).any():
            by_server: Rows = updates[updates["rank"] == -1]
            return by_server
        new: Rows = updates[(updates["rank"] >= 0) & (updates["version"] > self._newest)]
        if not len(new):
            return new
        order = np.lexsort((new["rank"], new["version"]))
        _, first = np.unique(new["version"][order], return_index=True)
        counted: Rows = new[order][first]
        self._newest = int(counted["version"].max())
        return counted

    def _span(self, updates: Rows) -> None:
        """Extends the span from the first update to the last."""
        first = updates[np.argmin(ends(updates))]
        same = updates["version"] == first["version"]
        version, moment = int(first["version"]), float(ends(updates[same]).max())
        # If all workers make the same update, the last one counts, and it may be in the next block.
        if not self.update_span[0] <= moment or version == self._first_update[0]:
            before = self._first_update[1] if version == self._first_update[0] else -math.inf
            self._first_update = version, max(moment, before)
        self._last_update = max(self._last_update, float(ends(updates).max()))

    @property
    def update_span(self) -> tuple[float, float]:
        """The times of the first and the last update."""
        return self._first_update[1], self._last_update

    @property
    def samples(self) -> SampleCounts:
        """The samples of gradients that a server used; without a server, of all gradients."""
        return self._pushed if self.served else self._computed

    def _report(self, metric: Metric) -> None:
        """Adds a metric; the lead's values replace those of others."""
        for name, value in metric.values.items():
            curve = self.curves.get(name)
            if curve is None or metric.rank < curve.rank:
                curve = self.curves[name] = Curve(metric.rank)
            if metric.rank == curve.rank:
                curve.add(metric.start, metric.version, math.nan if value is None else value)
