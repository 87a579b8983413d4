"""Predicts a run of a strategy on a cluster: by simulation, and by closed form where there is one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from paceline.config import AllReduce, Mesh, Pipeline, Strategy, Tensor, parse_strategy
from paceline.config.distributions import Constant, Distribution, Empirical
from paceline.errors import UsageError
from paceline.events import Compute, Update, Wait
from paceline.policies import Policy, Rule, Sync, Timing, parse_policy
from paceline.schedules import SCHEDULES, PassTimes, step_seconds
from paceline.schedules.timing import ScheduleTiming
from paceline.simulate import theory
from paceline.simulate.cluster import SimulatedCluster, narrowest
from paceline.simulate.engine import EventLoop
from paceline.simulate.fast import simulate_collective, simulate_fast
from paceline.simulate.network import CollectiveNetwork
from paceline.simulate.replica import Model, all_reduce_seconds, pipeline_steps
from paceline.simulate.result import Result, TimeShares, result
from paceline.simulate.trace import SimulatedTrace
from paceline.topologies import Link, sharded_servers

_MOST = 10_000_000
"""The most updates, which fit into memory."""
_STEPS = 2000
"""Steps of a split model that are evaluated, and then drawn from."""
_DRAWN = 8
"""Steps of a pipeline that a timeline shows."""


class Theory(msgspec.Struct, frozen=True):
    """The closed forms of a strategy; None where there is none."""

    seconds_per_update: float | None
    staleness: float | None


def simulate(
    spec: str | Strategy,
    cluster: SimulatedCluster,
    *,
    updates: int,
    seed: int = 0,
    model: Model | None = None,
    trace: bool = False,
    loss: Callable[[int, int], float] | None = None,
) -> tuple[Result, SimulatedTrace | None]:
    """Simulates a run of `updates` updates; with `trace`, returns its events as well.

    loss: by updates and gradients per update; for `adaptive`, which keeps its first K without one.
    """
    if not 1 <= updates <= _MOST:
        most = "at least 1" if updates < 1 else f"at most {_MOST:,}"
        raise UsageError(f"there are {updates} updates to simulate; there must be {most}")
    strategy = parse_strategy(spec)
    simulation = _Simulation(
        cluster, updates, seed, model or Model(), SimulatedTrace(cluster, str(spec)) if trace else None, loss
    )
    match strategy:
        case AllReduce():
            outcome = simulation.all_reduce(strategy)
        case Pipeline():
            outcome = simulation.pipeline(strategy)
        case Tensor():
            outcome = simulation.tensor(strategy)
        case Mesh():
            outcome = simulation.mesh(strategy)
        case _:
            outcome = simulation.policy(parse_policy(strategy))
    return outcome, simulation.trace


@dataclasses.dataclass
class _Simulation:
    """One run, by kind of strategy."""

    cluster: SimulatedCluster
    updates: int
    seed: int
    model: Model
    trace: SimulatedTrace | None
    loss: Callable[[int, int], float] | None = None

    def policy(self, strategy: Policy) -> Result:
        cluster = _with_options(self.cluster, strategy)
        policy = strategy.for_workers(range(cluster.workers))
        if cluster.plain and self.trace is None and self.loss is None:
            quick = simulate_fast(policy, cluster, self.updates, self.seed)
            if quick is not None:
                return quick
        inside: dict[int, float] = {}
        links = cluster.machine_links() if policy.members else []
        for members in policy.members.values():
            link = narrowest(links[rank // cluster.per_machine] for rank in members)
            inside |= dict.fromkeys(members, all_reduce_seconds("auto", len(members), cluster.size, link))
        engine = EventLoop(policy, cluster, self.seed, inside=inside, trace=self.trace, loss=self.loss)
        return engine.run(self.updates, str(strategy))

    def all_reduce(self, strategy: AllReduce) -> Result:
        cluster = self.cluster
        seconds = all_reduce_seconds(strategy.topology, cluster.workers, cluster.pushed, cluster.narrowest())
        seconds += cluster.update_seconds
        alone = dataclasses.replace(cluster, update_seconds=0.0, push_seconds=0.0)
        if cluster.alike and not cluster.overlap and self.trace is None:
            return simulate_collective(str(strategy), alone, self.updates, self.seed, seconds)
        policy = Sync().for_workers(range(cluster.workers))
        network = CollectiveNetwork(cluster.workers, seconds, cluster.pushed)
        engine = EventLoop(policy, alone, self.seed, network=network, trace=self.trace)
        return engine.run(self.updates, str(strategy))

    def pipeline(self, split: Pipeline) -> Result:
        if sum(split.by_stage) != self.cluster.workers:
            raise UsageError(
                f"strategy '{split}': it has {split.stages} stages for {self.cluster.workers} workers; it must be one "
                "each, or the sum of the option 'workers' (for several pipelines side by side, mesh:data=…,pipeline=…)"
            )
        return self._alone(str(split), split, 1)

    def tensor(self, split: Tensor) -> Result:
        if split.degree != self.cluster.workers:
            raise UsageError(
                f"strategy '{split}': its degree is {split.degree} with {self.cluster.workers} workers; it must be the "
                "same (for several side by side, mesh:data=…,tensor=…)"
            )
        return self._alone(str(split), Pipeline(stages=1, microbatches=1), split.degree)

    def mesh(self, mesh: Mesh) -> Result:
        cluster, split = self.cluster, mesh.pipeline * mesh.tensor
        if mesh.data * split != cluster.workers:
            raise UsageError(
                f"strategy '{mesh}': {mesh.data} × {mesh.pipeline} × {mesh.tensor} devices for {cluster.workers} "
                "workers; the product must be the number of workers"
            )
        between = parse_strategy(mesh.sync)
        source = np.random.default_rng(self.seed)
        replicas = [_part(cluster, number * split, split) for number in range(mesh.data)]
        steps = [
            pipeline_steps(replica, self.model, mesh, mesh.pipeline, mesh.tensor, _STEPS, source)
            for replica in replicas
        ]
        lengths = [one.makespan for one in steps]
        typical = float(np.median([one.mean() for one in lengths]))
        factors = tuple(float(one.mean()) / typical for one in lengths) if cluster.factors or cluster.own else ()
        pooled = np.concatenate([one / one.mean() * typical for one in lengths])
        # The devices of a replica send their parts in parallel.
        wide = [(number, _wider(replica.narrowest(), split)) for number, replica in enumerate(replicas)]
        whole = dataclasses.replace(
            cluster,
            workers=mesh.data,
            compute=Empirical(tuple(pooled.tolist())),
            factors=factors,
            own=(),
            cores=None,
            links=tuple(wide),
            link=_wider(cluster.link, split),
            per_machine=1,
        )
        if self.trace is not None:
            self.trace = SimulatedTrace(whole, str(mesh))
        simulation = _Simulation(whole, self.updates, self.seed, self.model, self.trace)
        outcome = (
            simulation.all_reduce(between)
            if isinstance(between, AllReduce)
            else simulation.policy(parse_policy(between))
        )
        outcome.strategy = str(mesh)
        _per_worker(outcome, steps, mesh.tensor)
        return outcome

    def _alone(self, name: str, split: Pipeline, degree: int) -> Result:
        """One replica alone, whose steps follow each other."""
        source = np.random.default_rng(self.seed)

        def drawn(count: int) -> ScheduleTiming:
            return pipeline_steps(self.cluster, self.model, split, split.stages, degree, count, source)

        steps = drawn(self.updates)
        moments = np.cumsum(steps.makespan + self.cluster.update_seconds)
        busy = np.repeat(steps.busy.sum(axis=0), degree)
        total = float(moments[-1])
        if self.trace is not None:
            start = 0.0
            for version in range(min(_DRAWN, self.updates)):
                start = self._draw(self.trace, drawn(1), degree, start, version)
        outcome = result(
            strategy=name,
            cluster=self.cluster,
            moments=moments,
            used=len(moments),
            ages=Counter({0: len(moments)}),
            shares=[TimeShares(computing=float(one), waiting=total - float(one)) for one in busy],
            total=total,
        )
        outcome.bubble = steps.bubble
        outcome.in_flight = list(np.repeat(steps.in_flight, degree).tolist())
        return outcome

    def _draw(self, trace: SimulatedTrace, steps: ScheduleTiming, degree: int, begin: float, version: int) -> float:
        """Records one step of a pipeline with its bubbles; returns its end."""
        over = begin + float(steps.makespan[0])
        for device in range(self.cluster.workers):
            clock = begin
            for _, operation, start, end, place in steps.operations:
                if place != device // degree:
                    continue
                if begin + start > clock + 1e-12:
                    trace.events.append(Wait(device, clock, begin + start - clock, -1))
                clock = begin + end
                first = operation.kind == "F"
                samples = self.cluster.batch if operation == ("F", 0, 0) and device == 0 else 0
                # The microbatch takes the place of the version, which decides the colour.
                seconds = end - start
                trace.events.append(
                    Compute(
                        device, begin + start, seconds, operation.microbatch, 1, samples, 0.0, seconds if first else 0.0
                    )
                )
            if over > clock + 1e-12:
                trace.events.append(Wait(device, clock, over - clock, -1))
            trace.events.append(Update(device, over, self.cluster.update_seconds, version + 1))
        return over + self.cluster.update_seconds


def _part(cluster: SimulatedCluster, first: int, count: int) -> SimulatedCluster:
    """The cluster of `count` workers from `first` on."""
    return dataclasses.replace(
        cluster,
        workers=count,
        factors=cluster.factors[first : first + count],
        own=cluster.own[first : first + count],
        cores=cluster.cores and cluster.cores.of(range(first, first + count)),
        links=tuple((rank - first, link) for rank, link in cluster.links if first <= rank < first + count),
    )


def _per_worker(outcome: Result, steps: Sequence[ScheduleTiming], degree: int) -> None:
    """Expands a result of replicas to their workers, whose bubbles count as waiting, too."""
    busy = [np.repeat(one.busy.mean(axis=0) / one.makespan.mean(), degree).tolist() for one in steps]
    each = len(busy[0])
    outcome.workers *= each
    outcome.waiting = [
        waits + computes * (1 - share)
        for waits, computes, shares in zip(outcome.waiting, outcome.computing, busy, strict=True)
        for share in shares
    ]
    outcome.computing = [
        computes * share for computes, shares in zip(outcome.computing, busy, strict=True) for share in shares
    ]
    outcome.communicating = [part for part in outcome.communicating for _ in range(each)]
    outcome.starved = [each * replica + place for replica in outcome.starved for place in range(each)]
    outcome.bubble = float(np.mean([one.bubble for one in steps]))
    outcome.in_flight = [kept for one in steps for kept in np.repeat(one.in_flight, degree).tolist()]


def _wider(link: Link, times: int) -> Link:
    return Link(link.latency, link.bandwidth * times)


def predict(spec: str | Strategy, cluster: SimulatedCluster, model: Model | None = None) -> Theory:
    """The closed forms, to compare a simulation with."""
    strategy = parse_strategy(spec)
    waits_for_all = Timing(Rule.FRESH_WORKERS, cluster.workers)
    timing = waits_for_all if isinstance(strategy, AllReduce) else None
    if isinstance(strategy, Policy):
        timing = strategy.for_workers(range(cluster.workers)).timing
        cluster = _with_options(cluster, strategy)
    if timing is not None and timing.rule in _FORMS and cluster.plain:
        return _FORMS[timing.rule](cluster.compute, cluster.workers, timing.number)
    alike = cluster.alike and not cluster.overlap
    extra = _exchange(strategy, cluster) if alike and timing == waits_for_all else None
    if extra is not None:
        longest = theory.k_sync(cluster.compute, cluster.workers, cluster.workers)
        return Theory(None if longest is None else longest + extra, 0.0)
    if alike and isinstance(strategy, Pipeline) and isinstance(cluster.compute, Constant):
        return Theory(_pipeline(strategy, cluster, model or Model()), 0.0)
    return Theory(None, None)


def _exchange(strategy: Strategy, cluster: SimulatedCluster) -> float | None:
    """Seconds of an update beside computing, under a strategy that waits for all workers."""
    link = cluster.narrowest()
    if isinstance(strategy, AllReduce):
        return all_reduce_seconds(strategy.topology, cluster.workers, cluster.pushed, link) + cluster.update_seconds
    if cluster.per_machine > 1 or cluster.server_link or cluster.links:
        return None
    if cluster.compress not in ("none", "fp32") or cluster.push_seconds or not cluster.servers.isdecimal():
        return None
    servers = int(cluster.servers)
    return sharded_servers(cluster.workers, servers, cluster.size, link) + cluster.update_seconds


def _pipeline(split: Pipeline, cluster: SimulatedCluster, model: Model) -> float | None:
    stages, count = split.stages, split.microbatches
    if cluster.link.latency or model.activations or split.shared:
        return None
    each = cluster.compute.mean() / (stages * count)
    forward, weights = each * model.forward, each * model.weights
    times = PassTimes(forward, each - forward - weights, weights)
    outcome = step_seconds(split.schedule, stages, count, times, split.chunks)
    if outcome is None or SCHEDULES[split.schedule].joins_steps:
        return None
    return outcome + cluster.update_seconds


def _with_options(cluster: SimulatedCluster, policy: Policy) -> SimulatedCluster:
    """The cluster with the policy's own servers and compression, where it names no others itself."""
    servers = str(policy.servers) if cluster.servers == "1" else cluster.servers
    compress = policy.compress if cluster.compress == "none" else cluster.compress
    return dataclasses.replace(cluster, servers=servers, compress=compress)


_FORMS: dict[Rule, Callable[[Distribution, int, int], Theory]] = {
    Rule.FRESH_WORKERS: lambda x, n, k: Theory(theory.k_sync(x, n, k), 0.0),
    Rule.FRESH_MINIBATCHES: lambda x, n, k: Theory(theory.k_batch_sync(x, n, k), 0.0),
    Rule.STALE_WORKERS: lambda x, n, k: Theory(theory.k_async(x, n, k), theory.staleness_k_async(n, k)),
    Rule.STALE_MINIBATCHES: lambda x, n, k: Theory(theory.k_batch_async(x, n, k), theory.staleness_k_batch_async(n, k)),
    Rule.ASYNC_GROUPS: lambda x, n, k: Theory(theory.groups(x, k, n // k), theory.staleness_groups(n // k)),
}
