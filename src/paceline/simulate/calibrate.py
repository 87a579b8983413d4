"""Calibrates a simulation from the events of a real run: lengths of steps, unevenness of workers, messages, updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from paceline.config import parse_slowness
from paceline.errors import UsageError
from paceline.events.reader import read_run
from paceline.simulate.cluster import Cores, SimulatedCluster
from paceline.simulate.fitting import fit_steps
from paceline.simulate.recorded import RecordedSteps, Recording, remove_contention
from paceline.topologies import Link

_FEW = 8
"""Steps of a worker below which it is left out."""


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
        return (
            f"learned from {self.updates} updates of {cluster.workers} workers under {self.strategy}: a step takes "
            f"{cluster.compute.mean():.3g} s (jitter {self.jitter:.0%}); persistently uneven: {uneven or 'none'}; "
            f"a message {cluster.link.latency:.2g} s, an update {cluster.update_seconds:.2g} s"
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


def calibrate(path: Path) -> Calibration:
    """Calibrates from a run's folder or its events file."""
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
    moments = np.sort([end for _, end in seen.updates.values()])
    return Calibration(
        cluster=cluster,
        strategy=seen.strategy,
        updates=len(moments),
        seconds_per_update=float((moments[-1] - moments[0]) / (len(moments) - 1)) if len(moments) > 1 else math.nan,
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
