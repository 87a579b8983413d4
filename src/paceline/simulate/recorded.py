"""The steps of each worker and the times of its messages, from the events of a run."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline import events
from paceline.events.omitted import Ranges
from paceline.simulate.cluster import Cores
from paceline.simulate.core_sharing import CoreShortage

Moments = NDArray[np.float64]
Span = tuple[float, float]

_NOTABLE = 0.05
"""The share of a step spent off the cores from which on its variation between steps is kept."""


@dataclasses.dataclass
class RecordedSteps:
    """The steps of one worker. Times in seconds."""

    lengths: list[float] = dataclasses.field(default_factory=list)
    """Lengths of completed steps: loading, computing, and the script's own work between them."""
    busy: list[Span] = dataclasses.field(default_factory=list)
    """Start and end of loading and computing in each of them, without sleep on purpose (`--slow`)."""
    core: list[float] = dataclasses.field(default_factory=list)
    """Core seconds of each of them."""
    left: list[float] = dataclasses.field(default_factory=list)
    """Lengths of cancelled steps until they were cancelled."""
    begun: list[float] = dataclasses.field(default_factory=list)
    """The start of each of those."""
    up: list[float] = dataclasses.field(default_factory=list)
    """Seconds from a gradient's end of computing to its arrival at the server."""
    down: list[float] = dataclasses.field(default_factory=list)
    """Seconds from the server's reply to the worker's next step."""
    forward: float = 0.0
    computing: float = 0.0
    samples: int = 0
    minibatches: int = 0

    @property
    def latency(self) -> float:
        """Mean seconds of a message one way; a mean, since a slow link may be slow only at times."""
        return (_trimmed(self.up) + _trimmed(self.down)) / 2 if self.up else 0.0

    def phases(self) -> Moments:
        """Start and end of loading and computing, cancelled steps included; a step computes first and sleeps last."""
        ended = np.array(self.busy).reshape(-1, 2)
        begun = np.array(self.begun)
        usual = float(np.median(ended[:, 1] - ended[:, 0])) if len(ended) else math.inf
        return np.concatenate([ended, np.stack([begun, begun + np.minimum(usual, self.left)], axis=1)])


def remove_contention(workers: Mapping[int, RecordedSteps], cores: Cores) -> Cores:
    """Removes from the steps the time that they waited for a shared core; returns the cores with each worker's shares.

    A step that took longer than its core seconds either waited for a core or for something else, such as a disk. While
    cores were short, it counts as having waited for a core.
    """
    count = len(cores.fixed)
    active, slept = [1.0] * count, [0.0] * count
    known = {rank: _Share(steps) for rank, steps in workers.items() if steps.busy}
    shares = np.concatenate([np.full(len(one.phases), one.share) for one in known.values()])
    shortage = CoreShortage(np.concatenate([one.phases for one in known.values()]), shares, cores.count)
    for rank, one in known.items():
        active[rank], slept[rank] = one.apply(workers[rank], shortage, fixed=cores.fixed[rank])
    return Cores(cores.count, tuple(active), tuple(slept), cores.fixed)


class _Share:
    """The share of a core, and of other waiting, in one worker's steps."""

    def __init__(self, steps: RecordedSteps) -> None:
        self.phases = steps.phases()
        self._start, self._end = np.array(steps.busy).T
        self._took = np.maximum(self._end - self._start, 1e-9)
        self._core = np.minimum(steps.core, self._took)
        if not self._core.any():
            self._core = self._took  # not recorded: assume all of it

    @property
    def share(self) -> float:
        """Core seconds per second of loading and computing."""
        return float(self._core.sum() / self._took.sum())

    def apply(self, steps: RecordedSteps, shortage: CoreShortage, *, fixed: bool) -> tuple[float, float]:
        """Rescales the steps to their lengths without contention; returns the shares on a core and slept on purpose."""
        lengths = np.array(steps.lengths)
        if fixed:
            return min(1.0, float(self._core.sum() / lengths.sum())), 0.0
        beyond = self._took - self._core - shortage.between(self._start, self._end)
        usual = max(0.0, float(beyond.mean()))
        elsewhere = np.full(len(beyond), usual)
        if usual > _NOTABLE * float(self._took.mean()):
            elsewhere = np.maximum(0.0, beyond)
            elsewhere *= usual / float(elsewhere.mean())
        alone = self._core + elsewhere
        # Including sleep, and the script's own work between steps.
        whole = float(lengths.sum() / self._took.sum())
        steps.lengths = (alone * whole).tolist()
        steps.left = (np.array(steps.left) * float(alone.sum() / self._took.sum())).tolist()
        return float(self._core.sum() / alone.sum()) / whole, 1.0 - 1.0 / whole


class Recording:
    """Collects the events of a run."""

    def __init__(self) -> None:
        self._by_rank: defaultdict[int, list[events.Event]] = defaultdict(list)
        self._pushes: defaultdict[int, list[float]] = defaultdict(list)
        self.updates: dict[int, Span] = {}
        """Start and end of the update that made each version."""
        self._metrics: list[events.Metric] = []
        self.strategy = ""
        self.omitted = 0
        """Events of which only sums were recorded."""
        self._versions = Ranges()
        self._last = -math.inf
        """The end of the last update, recorded or not."""
        self.size = 0
        self.gradients: list[int] = []
        self.ages: list[int] = []
        self._ends: Moments | None = None

    @property
    def served(self) -> bool:
        """True if gradients went to a server."""
        return bool(self._pushes)

    @property
    def count(self) -> int:
        """Workers of the run."""
        return max(self._by_rank) + 1 if self._by_rank else 0

    def take(self, block: Sequence[events.Event]) -> None:
        """Adds events."""
        for event in block:
            match event:
                case (
                    events.Compute() | events.Load() | events.Wait() | events.Pull() | events.Cancel() | events.Reduce()
                ):
                    self._by_rank[event.rank].append(event)
                case events.Push():
                    self._pushes[event.rank].append(event.start)
                    self.size = max(self.size, event.bytes + event.saved)
                    if event.outcome in ("used", "held"):
                        self.ages.append(event.staleness)
                case events.Update():
                    if event.rank <= 0:
                        self._versions.add(event.version, event.version)
                        self._last = max(self._last, _end(event))
                        self.updates[event.version] = (event.start, event.start + event.seconds)
                        self.gradients.append(event.workers)
                    if event.rank >= 0:
                        self._by_rank[event.rank].append(event)
                case events.Metric():
                    self._metrics.append(event)
                case events.Omitted():
                    self.omitted += event.events
                    for first, last, _ in event.updates if event.rank <= 0 else ():
                        self._versions.add(first, last)
                        self._last = max(self._last, event.start + event.updated)
                    if event.rank >= 0:
                        self._by_rank[event.rank].append(event)
                case events.Join():
                    self.strategy = event.strategy

    @property
    def seconds_per_update(self) -> float:
        """Mean seconds from the first update to the last, those that were not recorded included."""
        first = min(end for _, end in self.updates.values())
        return (self._last - first) / (self._versions.count - 1) if self._versions.count > 1 else math.nan

    def workers(self) -> dict[int, RecordedSteps]:
        """The steps of each worker, by rank."""
        return {rank: self._steps(rank) for rank in sorted(self._by_rank)}

    def _steps(self, rank: int) -> RecordedSteps:
        found, loaded = RecordedSteps(), 0.0
        ready: float | None = None
        free: float | None = None
        gaps: list[float] = []
        pieces: list[events.Compute] = []
        """Of a step that is not over: between them the worker waited for others."""
        pushes = sorted(self._pushes.get(rank, ()))
        for event in sorted(self._by_rank[rank], key=_end):
            match event:
                case events.Load():
                    loaded += event.seconds
                case events.Compute(minibatches=0) if not self.served:
                    pieces.append(event)
                case events.Compute():
                    if free is not None:
                        gaps.append((pieces[0] if pieces else event).start - loaded - free)
                    before = sum(piece.seconds for piece in pieces)
                    found.forward += sum(piece.forward for piece in pieces)
                    found.computing += before
                    pieces.clear()
                    found.lengths.append(event.seconds + loaded + before)
                    found.busy.append((event.start - loaded - before, _end(event) - event.slowed))
                    found.core.append(event.core)
                    found.forward += event.forward
                    found.computing += event.seconds - event.slowed
                    found.samples += event.samples
                    found.minibatches += event.minibatches
                    ready, loaded, free = _end(event), 0.0, None
                case events.Cancel():
                    found.left.append(event.seconds + loaded)
                    found.begun.append(event.start - loaded)
                    loaded, free = 0.0, None
                case events.Wait() | events.Pull() if self.served:
                    end = free = _end(event)
                    if ready is None or (arrived := _first_between(pushes, ready, end)) is None:
                        continue
                    found.up.append(arrived - ready)
                    ready = None
                    # The update that released it: the last one before.
                    released = max(arrived, self._last_update(end)) if isinstance(event, events.Wait) else arrived
                    found.down.append(max(0.0, end - released))
                case events.Omitted():
                    ready, loaded, free = None, 0.0, None
                    pieces.clear()
                case events.Update():
                    free = _end(event)
                    # Further gradients of the same minibatch are steps of their own.
                    found.lengths += [piece.seconds for piece in pieces]
                    found.busy += [(piece.start, _end(piece) - piece.slowed) for piece in pieces]
                    found.core += [piece.core for piece in pieces]
                    pieces.clear()
        usual = max(0.0, float(np.median(gaps))) if gaps else 0.0
        found.lengths = [length + usual for length in found.lengths]
        return found

    def _last_update(self, moment: float) -> float:
        if self._ends is None:
            self._ends = np.sort([end for _, end in self.updates.values()])
        index = int(np.searchsorted(self._ends, moment, "right")) - 1
        return float(self._ends[index]) if index >= 0 else -math.inf

    def exchange(self) -> float:
        """Median seconds of an all-reduce and its update, without waiting."""
        spent = [
            sum(event.seconds for event in found if isinstance(event, events.Reduce | events.Update))
            / max(1, sum(isinstance(event, events.Update) for event in found))
            for found in self._by_rank.values()
        ]
        return float(np.median(spent)) if spent else 0.0

    def losses(self) -> list[tuple[float, float]]:
        """Version and reported loss."""
        for name in ("loss", "train_loss", "training_loss"):
            values = [
                (float(metric.version), value)
                for metric in self._metrics
                if (value := metric.values.get(name)) is not None and math.isfinite(value)
            ]
            if values:
                return sorted(values)
        return []


def _first_between(moments: Sequence[float], begin: float, end: float) -> float | None:
    """The first of these moments, which are in order, in a span; None if it is not recorded."""
    place = bisect_left(moments, begin)
    return moments[place] if place < len(moments) and moments[place] <= end else None


def _end(event: events.Event) -> float:
    return event.start + float(getattr(event, "seconds", 0.0))


def _trimmed(values: Sequence[float]) -> float:
    """The mean without the largest hundredth, which are outliers."""
    ordered = np.sort(values)
    return float(ordered[: max(1, math.ceil(0.99 * len(ordered)))].mean())
