"""Learns from the events of a real run what a simulation needs: how long steps are, how uneven the workers, how long
messages and updates take."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline import events
from paceline.errors import UsageError
from paceline.events.reader import read_run
from paceline.simulate.cluster import Cluster, Link
from paceline.simulate.distributions import Distribution, Draws, Empirical

_FEW = 8
"""Steps of a worker that are too few to say anything."""
_UNEVEN = 0.02
"""A worker's mean that differs by less from the others' is not called uneven."""
_SURE = 3.0
"""Standard errors that a difference must have."""
_POINTS = 2000
"""Values that an empirical distribution has at most."""

Moments = NDArray[np.float64]


@dataclasses.dataclass
class Steps:
    """Of one worker."""

    lengths: list[float] = dataclasses.field(default_factory=list)
    """Of steps that were ended: loading, computing, and what the script does besides."""
    left: list[float] = dataclasses.field(default_factory=list)
    """Of steps that were cancelled, when they were: they would have been longer."""
    up: list[float] = dataclasses.field(default_factory=list)
    """From when a gradient was ready until the server had it."""
    down: list[float] = dataclasses.field(default_factory=list)
    """From when the server let the worker go until it went."""
    forward: float = 0.0
    computing: float = 0.0
    samples: int = 0
    minibatches: int = 0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a run says about the cluster that it ran on."""

    cluster: Cluster
    strategy: str
    updates: int
    seconds_per_update: float
    """As measured."""
    losses: list[tuple[float, float]]
    """Version and loss, as the script reported it."""
    uneven: dict[int, float]
    """Workers that are persistently slower or faster than the others, and how many times."""
    jitter: float
    """The standard deviation of a worker's steps, as a share of their mean."""
    gradients: float = 1.0
    """In an update, on average."""
    staleness: float = 0.0
    """Of a gradient, on average."""
    forward: float | None = None
    """The forward pass's share of computing, where it is known."""

    @property
    def words(self) -> str:
        """What was learned, in a sentence."""
        cluster = self.cluster
        uneven = ", ".join(f"worker {rank} × {factor:g}" for rank, factor in self.uneven.items())
        return (
            f"learned from {self.updates} updates of {cluster.workers} workers under {self.strategy}: a step takes "
            f"{cluster.compute.mean():.3g} s (jitter {self.jitter:.0%}); persistently uneven: {uneven or 'nobody'}; "
            f"a message {cluster.link.latency:.2g} s, an update {cluster.update_seconds:.2g} s"
        )

    def for_workers(self, count: int | None) -> Cluster:
        """The same kind of cluster with so many workers.

        Those beyond the recorded ones are like most of them; where there is no such most, like the recorded in turn.
        """
        cluster = self.cluster
        if count is None or count == cluster.workers:
            return cluster
        if count < 1:
            raise UsageError(f"there are {count} workers; there must be at least 1")
        recorded = cluster.workers
        in_turn = 2 * len(self.uneven) >= recorded
        like = [rank if rank < recorded else rank % recorded if in_turn else None for rank in range(count)]
        links = dict(cluster.links)
        return dataclasses.replace(
            cluster,
            workers=count,
            factors=tuple(1.0 if one is None else cluster.factors[one] for one in like) if cluster.factors else (),
            own=tuple(None if one is None else cluster.own[one] for one in like) if cluster.own else (),
            links=tuple((rank, links[one]) for rank, one in enumerate(like) if one in links),
        )


def calibrate(path: Path) -> Calibration:
    """From a run's folder, or its events file."""
    seen = _Seen()
    for block in read_run(path):
        seen.take(block)
    return seen.calibration(path)


def cluster_of(lengths: Sequence[Sequence[float]], update_seconds: float) -> Cluster:
    """Of workers whose steps took so long each, messages included."""
    workers = {rank: Steps(lengths=list(steps)) for rank, steps in enumerate(lengths)}
    typical, factors, own, _ = _fit(workers, len(workers))
    return Cluster(
        workers=len(workers),
        compute=typical,
        factors=tuple(factors) if any(factor != 1.0 for factor in factors) else (),
        own=tuple(own) if any(one is not None for one in own) else (),
        update_seconds=update_seconds,
    )


class _Seen:
    """What has been read so far."""

    def __init__(self) -> None:
        self.by_rank: defaultdict[int, list[events.Event]] = defaultdict(list)
        self.pushes: defaultdict[int, list[float]] = defaultdict(list)
        self.updates: dict[int, tuple[float, float]] = {}
        """When each version was made: beginning and end."""
        self.metrics: list[events.Metric] = []
        self.strategy = ""
        self.size = 0
        self.gradients: list[int] = []
        self.ages: list[int] = []

    def take(self, block: Sequence[events.Event]) -> None:
        for event in block:
            match event:
                case events.Compute() | events.Load() | events.Wait() | events.Pull() | events.Cancel():
                    self.by_rank[event.rank].append(event)
                case events.Reduce():
                    self.by_rank[event.rank].append(event)
                case events.Push():
                    self.pushes[event.rank].append(event.start)
                    self.size = max(self.size, event.bytes + event.saved)
                    self.ages.append(event.staleness)
                case events.Update():
                    if event.rank < 0 or event.rank == 0:
                        self.updates[event.version] = (event.start, event.start + event.seconds)
                        self.gradients.append(event.workers)
                    if event.rank >= 0:
                        self.by_rank[event.rank].append(event)
                case events.Metric():
                    self.metrics.append(event)
                case events.Join():
                    self.strategy = event.strategy

    def calibration(self, path: Path) -> Calibration:
        served = bool(self.pushes)
        workers = {rank: self._steps(rank, served) for rank in sorted(self.by_rank)}
        workers = {rank: steps for rank, steps in workers.items() if len(steps.lengths) + len(steps.left) >= _FEW}
        if not workers or not self.updates or all(not steps.lengths for steps in workers.values()):
            raise UsageError(f"{path} has too few steps to learn from; every worker should make at least {_FEW}")
        count = max(self.by_rank) + 1
        moments = np.sort([end for _, end in self.updates.values()])
        begun = [end - start for start, end in self.updates.values()]
        exchange = 0.0 if served else self._exchange()
        typical, factors, own, jitter = _fit(workers, count)
        latencies = {rank: _latency(steps) for rank, steps in workers.items()} if served else {}
        usual = float(np.median(list(latencies.values()))) if latencies else 0.0
        computing = sum(steps.computing for steps in workers.values())
        forward = sum(steps.forward for steps in workers.values())
        samples = sum(steps.samples for steps in workers.values())
        minibatches = sum(steps.minibatches for steps in workers.values())
        cluster = Cluster(
            workers=count,
            compute=typical,
            factors=tuple(factors) if any(factor != 1.0 for factor in factors) else (),
            own=tuple(own) if any(one is not None for one in own) else (),
            batch=max(1, round(samples / minibatches)) if minibatches else 1,
            size=float(self.size),
            link=Link(usual),
            links=tuple(
                (rank, Link(latency)) for rank, latency in latencies.items() if abs(latency - usual) > 0.2 * usual
            ),
            update_seconds=float(np.median(begun)) if served else exchange,
        )
        return Calibration(
            cluster=cluster,
            strategy=self.strategy,
            updates=len(moments),
            seconds_per_update=float((moments[-1] - moments[0]) / (len(moments) - 1)) if len(moments) > 1 else math.nan,
            losses=self._losses(),
            uneven={rank: round(factor, 3) for rank, factor in enumerate(factors) if factor != 1.0},
            jitter=jitter,
            gradients=float(np.mean(self.gradients)) if served else float(count),
            staleness=float(np.mean(self.ages)) if self.ages else 0.0,
            forward=forward / computing if computing and forward else None,
        )

    def _steps(self, rank: int, served: bool) -> Steps:
        found = Steps()
        ready = math.nan
        loaded = 0.0
        free: float | None = None
        gaps: list[float] = []
        pushes = iter(sorted(self.pushes.get(rank, ())))
        for event in sorted(self.by_rank[rank], key=_end):
            match event:
                case events.Load():
                    loaded += event.seconds
                case events.Compute():
                    if free is not None:
                        gaps.append(event.start - loaded - free)
                    found.lengths.append(event.seconds + loaded)
                    found.forward += event.forward
                    found.computing += event.seconds - event.slowed
                    found.samples += event.samples
                    found.minibatches += event.minibatches
                    ready, loaded, free = _end(event), 0.0, None
                case events.Cancel():
                    found.left.append(event.seconds + loaded)
                    loaded, free = 0.0, None
                case events.Wait() | events.Pull() if served:
                    arrived = next((moment for moment in pushes if moment >= ready), None)
                    end = free = _end(event)
                    if arrived is None:
                        continue
                    found.up.append(arrived - ready)
                    # With which update it was let go: the last one before.
                    let_go = max(arrived, self._last_update(end)) if isinstance(event, events.Wait) else arrived
                    found.down.append(max(0.0, end - let_go))
                case events.Update():
                    free = _end(event)
        usual = max(0.0, float(np.median(gaps))) if gaps else 0.0
        found.lengths = [length + usual for length in found.lengths]
        return found

    def _last_update(self, moment: float) -> float:
        if not hasattr(self, "_ends"):
            self._ends: Moments = np.sort([end for _, end in self.updates.values()])
        index = int(np.searchsorted(self._ends, moment, "right")) - 1
        return float(self._ends[index]) if index >= 0 else -math.inf

    def _exchange(self) -> float:
        """What an all-reduce and its update take, of workers that wait for nobody any more."""
        spent = [
            sum(event.seconds for event in found if isinstance(event, events.Reduce | events.Update))
            / max(1, sum(isinstance(event, events.Update) for event in found))
            for found in self.by_rank.values()
        ]
        return float(np.median(spent)) if spent else 0.0

    def _losses(self) -> list[tuple[float, float]]:
        for name in ("loss", "train_loss", "training_loss"):
            values = [
                (float(metric.version), value)
                for metric in self.metrics
                if (value := metric.values.get(name)) is not None and math.isfinite(value)
            ]
            if values:
                return sorted(values)
        return []


def _end(event: events.Event) -> float:
    return event.start + float(getattr(event, "seconds", 0.0))


def _latency(steps: Steps) -> float:
    """One way, as a mean: a slow link is slow now and then, too."""
    if not steps.up:
        return 0.0
    return (_trimmed(steps.up) + _trimmed(steps.down)) / 2


def _trimmed(values: Sequence[float]) -> float:
    """The mean without the largest hundredth, which is of stretches in which something else happened."""
    ordered = np.sort(values)
    return float(ordered[: max(1, math.ceil(0.99 * len(ordered)))].mean())


def _fit(workers: dict[int, Steps], count: int) -> tuple[Distribution, list[float], list[Distribution | None], float]:
    """What most steps are like; how many times as long each worker's are; and who is of a kind of its own."""
    draws = {rank: survival(steps.lengths, steps.left) for rank, steps in workers.items() if steps.lengths}
    means = {rank: float(of.mean()) for rank, of in draws.items()}
    typical = float(np.median(list(means.values())))
    # By how much a worker's mean can be off: by as much as steps vary, over the root of how many there are.
    errors = {rank: float(of.std()) / math.sqrt(len(workers[rank].lengths)) for rank, of in draws.items()}
    factors = [1.0] * count
    for rank, mean in means.items():
        rest = [other for other in means if other != rank]
        if not rest:
            continue
        beside = float(np.median([means[other] for other in rest]))
        error = math.hypot(errors[rank], float(np.median([errors[other] for other in rest])) / math.sqrt(len(rest)))
        if abs(mean - beside) > max(_SURE * error, _UNEVEN * beside):
            factors[rank] = mean
    even = [means[rank] for rank in means if factors[rank] == 1.0]
    weights = [len(workers[rank].lengths) for rank in means if factors[rank] == 1.0]
    base = float(np.average(even, weights=weights)) if even else typical
    factors = [1.0 if factor == 1.0 else factor / base for factor in factors]
    scaled = {rank: of * (base / means[rank] if factors[rank] != 1.0 else 1.0) for rank, of in draws.items()}
    pooled = np.concatenate([_thinned(of, _POINTS // len(scaled) + 1) for of in scaled.values()])
    own: list[Distribution | None] = [None] * count
    for rank, of in scaled.items():
        if len(scaled) > 1 and _differs(of, np.concatenate([scaled[other] for other in scaled if other != rank])):
            own[rank] = Empirical.of((of * factors[rank]).tolist())
    alike = [of for rank, of in scaled.items() if own[rank] is None]
    if alike and len(alike) < len(scaled):
        pooled = np.concatenate([_thinned(of, _POINTS // len(alike) + 1) for of in alike])
        pooled = pooled * (base / float(pooled.mean()))
    jitter = float(np.mean([of.std() / of.mean() for of in scaled.values()]))
    return Empirical.of(pooled.tolist()), factors, own, jitter


def survival(lengths: Sequence[float], left: Sequence[float]) -> Draws:
    """As if no step had been cancelled: the weight of those that were goes to longer ones (Kaplan and Meier).

    What is cancelled is known to be longer than when it was left; if that is longer than any step that was ended, the
    rest is taken to be of that length.
    """
    ended = np.sort(lengths)
    if not len(left):
        return ended
    moments = np.concatenate([ended, np.asarray(left, float)])
    kind = np.concatenate([np.ones(len(ended)), np.zeros(len(left))])
    order = np.lexsort((-kind, moments))
    moments, kind = moments[order], kind[order]
    at_risk = len(moments) - np.arange(len(moments))
    alive = np.cumprod(1 - kind / at_risk)
    mass = -np.diff(alive, prepend=1.0)
    mass[-1] += alive[-1]
    # As so many equally likely values.
    count = min(_POINTS, max(200, len(moments)))
    places = (np.arange(count) + 0.5) / count
    return np.asarray(moments[np.minimum(np.searchsorted(np.cumsum(mass), places), len(moments) - 1)], float)


def _thinned(values: Draws, count: int) -> Draws:
    """The same distribution in fewer values, of the same mean."""
    if len(values) <= count:
        return values
    fewer = np.quantile(values, (np.arange(count) + 0.5) / count)
    return np.asarray(fewer * (values.mean() / fewer.mean()))


def _differs(one: Draws, other: Draws) -> bool:
    """Whether two samples are of different distributions, by the test of Kolmogorov and Smirnov at one in a thousand;
    and by more than a little."""
    one, other = np.sort(one), np.sort(other)
    both = np.concatenate([one, other])
    distance = np.abs(
        np.searchsorted(one, both, "right") / len(one) - np.searchsorted(other, both, "right") / len(other)
    ).max()
    spread = abs(float(one.std() / one.mean() - other.std() / other.mean()))
    return bool(distance > 1.95 * math.sqrt(1 / len(one) + 1 / len(other)) and distance > 0.2 and spread > 0.05)


class Sheet(msgspec.Struct, kw_only=True):
    """A calibration in words and numbers, as `--json` shows it."""

    workers: int
    seconds_per_step: float
    jitter: float
    uneven: dict[int, float]
    latency: float
    update_seconds: float
    size: float
    measured_seconds_per_update: float


def sheet(known: Calibration) -> Sheet:
    cluster = known.cluster
    return Sheet(
        workers=cluster.workers,
        seconds_per_step=cluster.compute.mean(),
        jitter=known.jitter,
        uneven=known.uneven,
        latency=cluster.link.latency,
        update_seconds=cluster.update_seconds,
        size=cluster.size,
        measured_seconds_per_update=known.seconds_per_update,
    )
