"""Calibrates a simulation from the events of a real run: lengths of steps, unevenness of workers, messages, updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from paceline.config import parse_slowness
from paceline.config.distributions import Distribution, Draws, Empirical
from paceline.errors import UsageError
from paceline.events.reader import read_run
from paceline.simulate.cluster import Cores, SimulatedCluster
from paceline.simulate.recorded import RecordedSteps, Recording, remove_contention
from paceline.topologies import Link

_FEW = 8
"""Steps of a worker below which it is left out."""
_UNEVEN = 0.02
"""The least relative difference of a worker's mean from the others' that counts as uneven."""
_SURE = 3.0
"""The least difference that counts, in standard errors."""
_POINTS = 2000
"""The most values of an empirical distribution."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The cluster of a recorded run, as a simulation needs it, and facts about the run."""

    cluster: SimulatedCluster
    strategy: str
    updates: int
    seconds_per_update: float
    """Measured."""
    losses: list[tuple[float, float]]
    """Version and loss, as reported by the script."""
    uneven: dict[int, float]
    """Persistently slower or faster workers, by rank, with the factor on their steps."""
    jitter: float
    """The standard deviation of a worker's steps, as a share of their mean."""
    omitted: int = 0
    """Events of which the run has recorded only sums."""
    gradients: float = 1.0
    """Mean gradients per update."""
    staleness: float = 0.0
    """Mean staleness of a gradient, in updates."""
    forward: float | None = None
    """The forward pass's share of computing; None if unknown."""

    @property
    def description(self) -> str:
        """One sentence for people."""
        cluster = self.cluster
        uneven = ", ".join(f"worker {rank} × {factor:g}" for rank, factor in self.uneven.items())
        thinned = f" (the record is thinned: {self.omitted:,} events are in sums only)" if self.omitted else ""
        return (
            f"learned from {self.updates} updates{thinned} of {cluster.workers} workers under {self.strategy}: a step "
            f"takes {cluster.compute.mean():.3g} s (jitter {self.jitter:.0%}); persistently uneven: {uneven or 'none'}"
            f"; a message {cluster.link.latency:.2g} s, an update {cluster.update_seconds:.2g} s"
        )

    @property
    def summary(self) -> dict[str, object]:
        """The facts that `--json` prints."""
        return {
            "workers": self.cluster.workers,
            "seconds_per_step": self.cluster.compute.mean(),
            "jitter": self.jitter,
            "uneven": self.uneven,
            "latency": self.cluster.link.latency,
            "update_seconds": self.cluster.update_seconds,
            "size": self.cluster.size,
            "omitted": self.omitted,
            "measured_seconds_per_update": self.seconds_per_update,
        }

    def for_workers(self, count: int | None) -> SimulatedCluster:
        """The same kind of cluster with `count` workers.

        Workers beyond the recorded ones are typical ones; if at least half of the recorded are uneven, copies of the
        recorded in turn.
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
            cores=cluster.cores and cluster.cores.of(like),
            per_machine=count if cluster.cores else 1,
        )


def calibrate(path: Path, change: Callable[[Mapping[int, RecordedSteps]], None] | None = None) -> Calibration:
    """Calibrates from a run's folder or its events file; change: of the steps, to see what it would bring."""
    seen = Recording()
    for block in read_run(path):
        seen.take(block)
    if not seen.count:
        raise UsageError(f"{path} holds no steps of any worker; it must be the folder or the events of a run")
    workers = {rank: steps for rank, steps in seen.workers().items() if len(steps.lengths) + len(steps.left) >= _FEW}
    if not seen.updates or all(not steps.lengths for steps in workers.values()):
        raise UsageError(f"{path} has too few steps to learn from; every worker should make at least {_FEW}")
    count = seen.count
    cores = _cores(path, count)
    if cores is not None:
        cores = remove_contention(workers, cores)
    if change is not None:
        change(workers)
    typical, factors, own, jitter = fit_steps(workers, count)
    latencies = {rank: steps.latency for rank, steps in workers.items()} if seen.served else {}
    usual = float(np.median(list(latencies.values()))) if latencies else 0.0
    computing = sum(steps.computing for steps in workers.values())
    forward = sum(steps.forward for steps in workers.values())
    samples = sum(steps.samples for steps in workers.values())
    minibatches = sum(steps.minibatches for steps in workers.values())
    cluster = SimulatedCluster(
        workers=count,
        compute=typical,
        factors=factors,
        own=own,
        cores=cores,
        per_machine=count if cores else 1,
        batch=max(1, round(samples / minibatches)) if minibatches else 1,
        size=float(seen.size),
        link=Link(usual),
        links=tuple((rank, Link(latency)) for rank, latency in latencies.items() if abs(latency - usual) > 0.2 * usual),
        update_seconds=float(np.median([end - start for start, end in seen.updates.values()]))
        if seen.served
        else seen.exchange(),
    )
    return Calibration(
        cluster=cluster,
        strategy=seen.strategy,
        updates=len(seen.updates),
        omitted=seen.omitted,
        seconds_per_update=seen.seconds_per_update,
        losses=seen.losses(),
        uneven={rank: round(factor, 3) for rank, factor in enumerate(factors) if factor != 1.0},
        jitter=jitter,
        gradients=float(np.mean(seen.gradients)) if seen.served else float(count),
        staleness=float(np.mean(seen.ages)) if seen.ages else 0.0,
        forward=forward / computing if computing and forward else None,
    )


def cluster_of(lengths: Sequence[Sequence[float]], update_seconds: float) -> SimulatedCluster:
    """A cluster whose workers take steps of these lengths in seconds, messages included."""
    workers = {rank: RecordedSteps(lengths=list(steps)) for rank, steps in enumerate(lengths)}
    typical, factors, own, _ = fit_steps(workers, len(workers))
    return SimulatedCluster(
        workers=len(workers),
        compute=typical,
        factors=factors,
        own=own,
        update_seconds=update_seconds,
    )


def _cores(path: Path, count: int) -> Cores | None:
    """The cores of the recorded machine if known, with the workers whose steps had drawn lengths (`--slow`)."""
    try:
        known = msgspec.json.decode((path / "config.json").read_bytes()) if path.is_dir() else {}
        slow = parse_slowness(known.get("slow") or [], count)
        cores = int(known.get("cores") or 0)
    except (OSError, ValueError, TypeError, msgspec.DecodeError, UsageError, AttributeError):
        return None
    drawn = {rank for rank, how in slow.items() if how.where == "computing" and how.factor == 1.0}
    return Cores(cores, fixed=tuple(rank in drawn for rank in range(count))) if cores > 0 else None


# -- lengths of steps ------------------------------------------------------------------------------------------------


def fit_steps(
    workers: Mapping[int, RecordedSteps], count: int
) -> tuple[Distribution, tuple[float, ...], tuple[Distribution | None, ...], float]:
    """The common distribution, each worker's factor, distributions of workers that differ in kind, and the jitter.

    The factors, or the distributions, are empty if no worker has one.
    """
    draws = {rank: survival(steps.lengths, steps.left) for rank, steps in workers.items() if steps.lengths}
    means = {rank: float(of.mean()) for rank, of in draws.items()}
    typical = float(np.median(list(means.values())))
    # The standard error of each worker's mean.
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
            own[rank] = Empirical(tuple((of * factors[rank]).tolist()))
    alike = [of for rank, of in scaled.items() if own[rank] is None]
    if alike and len(alike) < len(scaled):
        pooled = np.concatenate([_thinned(of, _POINTS // len(alike) + 1) for of in alike])
        pooled = pooled * (base / float(pooled.mean()))
    jitter = float(np.mean([of.std() / of.mean() for of in scaled.values()]))
    uneven = tuple(factors) if any(factor != 1.0 for factor in factors) else ()
    return Empirical(tuple(pooled.tolist())), uneven, tuple(own) if any(own) else (), jitter


def survival(lengths: Sequence[float], left: Sequence[float]) -> Draws:
    """The lengths as if no step had been cancelled (the Kaplan-Meier estimate).

    lengths: of completed steps; left: of cancelled ones, each at least that long. Its weight goes to longer steps; if
    there is none, to its own length.
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
    # As equally likely values.
    count = min(_POINTS, max(200, len(moments)))
    places = (np.arange(count) + 0.5) / count
    return np.asarray(moments[np.minimum(np.searchsorted(np.cumsum(mass), places), len(moments) - 1)], float)


def _thinned(values: Draws, count: int) -> Draws:
    """The same distribution with fewer values and the same mean."""
    if len(values) <= count:
        return values
    fewer = np.quantile(values, (np.arange(count) + 0.5) / count)
    return np.asarray(fewer * (values.mean() / fewer.mean()))


def _differs(one: Draws, other: Draws) -> bool:
    """True if two samples differ by the Kolmogorov-Smirnov test at 0.1 %, and by a notable amount."""
    one, other = np.sort(one), np.sort(other)
    both = np.concatenate([one, other])
    distance = np.abs(
        np.searchsorted(one, both, "right") / len(one) - np.searchsorted(other, both, "right") / len(other)
    ).max()
    spread = abs(float(one.std() / one.mean() - other.std() / other.mean()))
    return bool(distance > 1.95 * math.sqrt(1 / len(one) + 1 / len(other)) and distance > 0.2 and spread > 0.05)
