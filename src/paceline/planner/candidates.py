"""What could be run on so many workers."""

from __future__ import annotations

import dataclasses
import math

from paceline import topologies
from paceline.simulate.cluster import SimulatedCluster


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy, with where its parameters are and whether batches are split by pace."""

    strategy: str
    servers: str = "1"
    balance: bool = False
    runnable: bool = True
    """Whether `paceline run` knows it."""

    @property
    def spoken(self) -> str:
        words = self.strategy
        if self.servers != "1":
            words += f" --servers {self.servers}"
        return words + (" balance=True" if self.balance else "")


def candidates(cluster: SimulatedCluster, *, split: bool = False) -> list[Candidate]:
    """Every kind, with the K, bounds, groups and servers that are worth a try, simple ones first.

    split: the model over devices, too.
    """
    workers = cluster.workers
    found = [Candidate("all-reduce"), Candidate("sync"), Candidate("async")]
    if workers == 1:
        return found[:1]
    if cluster.factors or cluster.own:
        found.append(Candidate("all-reduce", balance=True))
    found += [Candidate(f"k-sync:k={k}") for k in _some(range(1, workers))]
    found += [Candidate(f"k-async:k={k}") for k in _some(range(2, workers))]
    for k in _some(range(2, workers + 1)):
        found += [Candidate(f"{family}:k={k}") for family in ("k-batch-sync", "k-batch-async")]
    found += [Candidate(f"ssp:s={bound}") for bound in (1, 3, 8)]
    found += [Candidate(f"groups:size={size}") for size in range(2, workers) if workers % size == 0]
    if math.isfinite(cluster.narrowest().bandwidth):
        # Where parameters travel it matters where they are.
        for strategy in ("sync", "async", f"k-batch-sync:k={workers}"):
            found += [Candidate(strategy, servers) for servers in ("2", "lead", "all")]
        found += [Candidate(f"all-reduce:topology={name}", runnable=False) for name in topologies.with_costs()]
    if split:
        found += _split(workers)
    return found


def _split(workers: int) -> list[Candidate]:
    found = [Candidate(f"tensor:degree={workers}")]
    for stages in range(2, workers + 1):
        if workers % stages:
            continue
        for schedule in ("1f1b", "zero-bubble"):
            options = f"microbatches={2 * stages},schedule={schedule}"
            if stages == workers:
                found.append(Candidate(f"pipeline:stages={stages},{options}"))
            else:
                found.append(Candidate(f"mesh:data={workers // stages},pipeline={stages},{options}"))
    return found


def _some(values: range) -> list[int]:
    """All of a few; of many the ends, and what lies at quarters between."""
    every = list(values)
    if len(every) <= 6:
        return every
    last = len(every) - 1
    return sorted({every[round(last * part / 6)] for part in range(7)})
