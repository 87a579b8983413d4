"""The candidates of a plan: strategies that this number of workers can run."""

from __future__ import annotations

import dataclasses
import math

from paceline import topologies
from paceline.config import STRATEGIES, name_and_options, parse_strategy, strategy_class
from paceline.policies import Async, KBatchSync, Policy, Sync
from paceline.simulate.cluster import SimulatedCluster


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy, with the placement of its parameters and whether batches are split by pace."""

    strategy: str
    servers: str = "1"
    balance: bool = False
    runnable: bool = True
    """True if `paceline run` can run it on one machine."""

    @property
    def spoken(self) -> str:
        words = self.strategy
        if self.servers != "1":
            words += f" --servers {self.servers}"
        return words + (" balance=True" if self.balance else "")


def candidates(cluster: SimulatedCluster, *, split: bool = False) -> list[Candidate]:
    """Every kind of strategy, with several values of K, bounds, groups and servers, simple ones first.

    split: include strategies that split the model over devices.
    """
    workers = cluster.workers
    found = [Candidate("all-reduce")]
    if workers == 1:
        return found
    kinds = [kind for kind in map(strategy_class, STRATEGIES) if issubclass(kind, Policy)]
    policies = [str(policy) for kind in kinds for policy in kind.candidates(workers)]
    found += [Candidate(policy) for policy in policies if ":" not in policy]
    if cluster.factors or cluster.own:
        found.append(Candidate("all-reduce", balance=True))
    found += [Candidate(policy) for policy in policies if ":" in policy]
    if math.isfinite(cluster.narrowest().bandwidth):
        # If parameters are sent over links, their placement matters; these three show by how much.
        for policy in (Sync(), Async(), KBatchSync(k=workers)):
            found += [Candidate(str(policy), servers) for servers in ("2", "lead", "all")]
        found += [Candidate(f"all-reduce:topology={name}", runnable=False) for name in topologies.with_costs()]
    if split:
        found += _split(workers)
    return found


def asked_for(spec: str, workers: int) -> list[Candidate]:
    """A strategy that the user names; without options, all values of a policy that its class suggests."""
    name, options = name_and_options(spec)
    kind = strategy_class(name)
    suggested = [str(policy) for policy in kind.candidates(workers)] if issubclass(kind, Policy) and not options else []
    return [Candidate(strategy) for strategy in suggested or [str(parse_strategy(spec))]]


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
