"""The event loop of a simulation: workers, links and servers in virtual time, and a server's own policy object."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from paceline.config.distributions import Distribution
from paceline.errors import UsageError
from paceline.policies import Arrival, Decision, Order, Policy
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.core_sharing import SharedCores
from paceline.simulate.network import ServerNetwork, SimulatedNetwork
from paceline.simulate.result import Result, TimeShares, result
from paceline.simulate.trace import SimulatedTrace

_AHEAD = 4096
"""The most draws that are made at once: one at a time would take longer than the rest of the loop."""
_FIRST = 16
"""Draws that are made at first: with many workers, each may make few steps."""
_PATIENCE = 1000
"""Gradients per worker without an update, after which the run counts as starved."""
_SENT, _ARRIVED, _STARTS, _FINISHED, _DIED, _BACK = range(6)
"""Kinds of events."""
_COMPUTING, _SENDING, _HERE, _AWAY = range(4)
"""States of a worker; `_HERE`: its gradient is at the server."""


def _stream(of: Distribution, factor: float, source: np.random.Generator, most: int) -> Callable[[], float]:
    """A function that returns one draw after the other, each times a factor."""
    draws: list[float] = []
    size = _FIRST

    def draw() -> float:
        nonlocal size
        if not draws:
            draws.extend((of.draw(source, size) * factor).tolist())
            size = min(4 * size, most)
        return draws.pop()

    return draw


class EventLoop:
    """Simulates one run of one policy on one cluster."""

    def __init__(
        self,
        policy: Policy,
        cluster: SimulatedCluster,
        seed: int,
        *,
        network: SimulatedNetwork | None = None,
        inside: Mapping[int, float] | None = None,
        trace: SimulatedTrace | None = None,
        loss: Callable[[int, int], float] | None = None,
    ) -> None:
        """`network` replaces that of the cluster's servers. `inside` is the seconds of an all-reduce in each worker's
        group. `loss` gives the loss by updates and gradients per update, for a policy that adapts to it.
        """
        self._policy, self._cluster, self._inside, self._trace = policy, cluster, inside or {}, trace
        count = cluster.workers
        source = np.random.default_rng(seed)
        most = max(_FIRST, min(_AHEAD, 4_000_000 // count))
        self._draw = [_stream(*cluster.steps_of(rank), own, most) for rank, own in enumerate(source.spawn(count))]
        self._faults = source.spawn(1)[0]
        """The random numbers of spells and failures."""
        self._network = network or (ServerNetwork(cluster) if cluster.has_messages else None)
        """None if messages take no time."""
        self._loss = loss
        self._cores = SharedCores(cluster) if cluster.shares_cores else None
        self._version = [0] * count
        self._step = [0] * count
        """The number of each worker's step, by which the end of a cancelled step is recognized."""
        self._does = [_COMPUTING] * count
        self._began, self._ends = [0.0] * count, [0.0] * count
        """Start and end of the current step."""
        self._alone = [0.0] * count
        """Seconds of the current step without contention for cores."""
        self._since = [0.0] * count
        """The time at which each worker's gradient arrived at the server."""
        self._shares = [TimeShares() for _ in range(count)]
        self._slow_until = [0.0] * count
        self._next_spell = [math.inf] * count
        if cluster.spells is not None:
            self._next_spell = self._faults.exponential(cluster.spells.every, count).tolist()
        self._heap: list[tuple[float, int, int, int]] = []
        self._server_free = 0.0
        self.cancelled = self.dropped = self.used = self._tickets = self._without = self._failures = 0
        self._useful = [0] * count
        self.ages: Counter[int] = Counter()
        self.moments: list[float] = []
        self.now = 0.0

    def run(self, updates: int, strategy: str) -> Result:
        """Runs until `updates` updates have been made, or no more can be."""
        if self._cluster.failures is not None:
            for rank in range(self._cluster.workers):
                self._await_death(rank)
        for rank in range(self._cluster.workers):
            self._begin(rank, 0.0)
        heap, moments, steps, network = self._heap, self.moments, self._step, self._network
        verdict = None
        limit = _PATIENCE * self._cluster.workers
        while len(moments) < updates:
            if not heap or self._without > limit:
                verdict = self._stuck()
                break
            self.now, kind, rank, step = heapq.heappop(heap)
            if kind <= _ARRIVED:
                if step != steps[rank]:
                    continue  # the step was cancelled, or the worker has left
                if network is None or kind == _ARRIVED:
                    self._arrive(rank)
                else:
                    self._does[rank] = _SENDING
                    arrival = network.push(rank, self.now, self._ends[rank])
                    heapq.heappush(heap, (arrival, _ARRIVED, rank, step))
            elif kind <= _FINISHED:
                self._share_cores(kind, rank, step)
            elif kind == _DIED:
                self._die(rank)
            else:
                self._come_back(rank)
        return self._result(strategy, verdict)

    def _arrive(self, rank: int) -> None:
        self._tickets += 1
        self._without += 1
        version, shares = self._version[rank], self._shares[rank]
        began, end, now = self._began[rank], self._ends[rank], self.now
        shares.computing += end - began
        shares.communicating += now - end
        self._does[rank], self._since[rank] = _HERE, now
        staleness = self._policy.version - version
        push = Arrival(self._tickets, rank, version)
        if self._trace is not None:
            alone = self._alone[rank]
            self._trace.computed(rank, began, end, version, self._cores.needs(rank, alone) if self._cores else alone)
            self._trace.arrived(push, now, staleness)
        cluster = self._cluster
        moment = max(now, self._server_free) + cluster.push_seconds
        decision = self._policy.arrive(push)
        if self._policy.members:
            # A group pushes as one worker, after its all-reduce.
            self.ages[staleness] += len(decision.together)
        elif push not in decision.drop:
            self.ages[staleness] += 1
        # The server is free for others during a group's all-reduce.
        agreeing = self._inside[decision.together[0].worker] if len(decision.together) > 1 else 0.0
        self._execute(decision, moment + agreeing, rank)
        self._server_free -= agreeing

    def _execute(self, decision: Decision, moment: float, by: int) -> None:
        """Carries out a decision of the policy at `moment`, when the server is free."""
        self.dropped += len(decision.drop)
        if decision.use:
            if self._trace is not None:
                self._trace.updated(moment, self._cluster.update_seconds, self._policy.version, decision.use)
            moment += self._cluster.update_seconds
            self.used += len(decision.use)
            self._without = 0
            self.moments.append(moment)
            if self._loss is not None:
                self._policy.observe(self._loss(self._policy.version, self._policy.k))
            for one in decision.use:
                self._useful[one.worker] += 1
        self._server_free = moment
        gone = [(rank, order) for rank, order in decision.orders.items() if self._goes(rank, order, moment)]
        if not gone:
            return
        newest = self._policy.version
        versions = [self._version[rank] if order is Order.STAY else newest for rank, order in gone]
        if self._network is None:
            starts = [moment] * len(gone)
        else:
            ranks = [rank for rank, _ in gone]
            new = [version != self._version[rank] for rank, version in zip(ranks, versions, strict=True)]
            starts = self._network.pull(ranks, moment, new)
        for (rank, _), version, start in zip(gone, versions, starts, strict=True):
            self._shares[rank].communicating += start - moment
            if self._trace is not None and self._does[rank] == _HERE:
                self._trace.released(rank, self._ends[rank], start, version, by)
            self._version[rank] = version
            self._begin(rank, max(start, self._busy_until(rank, moment)))

    def _busy_until(self, rank: int, moment: float) -> float:
        """The time before which a worker cannot leave what it does."""
        if self._cluster.interruptible or self._does[rank] != _COMPUTING or self._cores is not None:
            return 0.0
        # It may not have begun its step, since it was cancelled before, too.
        return self._began[rank] if self._began[rank] > moment else self._ends[rank]

    def _goes(self, rank: int, order: Order, moment: float) -> bool:
        """True if a worker begins its next step with this order."""
        if order is Order.WAIT:
            return False
        if self._does[rank] == _HERE:
            self._shares[rank].waiting += moment - self._since[rank]
            return True
        if self._does[rank] == _COMPUTING and order is Order.CANCEL:
            self.cancelled += 1
            if self._trace is not None:
                self._trace.cancelled(rank, self._began[rank], moment, self._version[rank])
            return True
        return False  # it computes or sends, and goes on

    def _begin(self, rank: int, start: float) -> None:
        self._step[rank] += 1
        self._does[rank] = _COMPUTING
        seconds = self._draw[rank]()
        if self._cluster.spells is not None:
            seconds *= self._spell(rank, start)
        self._began[rank], self._alone[rank] = start, seconds
        if self._cores is None:
            self._end(rank, start, seconds)
        else:
            self._ends[rank] = math.inf
            self._release_core(rank)
            heapq.heappush(self._heap, (start, _STARTS, rank, self._step[rank]))

    def _end(self, rank: int, start: float, seconds: float) -> None:
        """Schedules the end of a step, of which the length is known now."""
        self._ends[rank] = end = start + seconds
        sent = max(self.now, end - self._cluster.overlap * seconds)
        heapq.heappush(self._heap, (sent, _SENT, rank, self._step[rank]))

    # -- cores that are shared ---------------------------------------------------------------------------------------

    def _share_cores(self, kind: int, which: int, number: int) -> None:
        """Handles a worker that starts or finishes computing, which moves the ends of the others on its machine."""
        cores = self._cores
        assert cores is not None
        if kind == _STARTS:
            if number == self._step[which]:
                self._expect(cores.enter(which, self.now, self._alone[which]))
            return
        rank = cores.finish(which, number, self.now)
        if rank is not None:
            start = self._began[rank]
            self._end(rank, start, cores.length(rank, self._alone[rank], self.now - start))
            self._expect(which)

    def _release_core(self, rank: int) -> None:
        """Takes a worker off its core, if it had one."""
        if self._cores is not None and (machine := self._cores.leave(rank, self.now)) is not None:
            self._expect(machine)

    def _expect(self, machine: int) -> None:
        assert self._cores is not None
        if (expected := self._cores.next(machine)) is not None:
            heapq.heappush(self._heap, (expected[0], _FINISHED, machine, expected[1]))

    # -- spells and failures -----------------------------------------------------------------------------------------

    def _spell(self, rank: int, now: float) -> float:
        """The factor on a step that begins now."""
        spells = self._cluster.spells
        assert spells is not None
        while self._next_spell[rank] <= now:
            begun = self._next_spell[rank]
            self._slow_until[rank] = begun + self._faults.exponential(spells.lasting)
            self._next_spell[rank] = self._slow_until[rank] + self._faults.exponential(spells.every)
        return spells.factor if now < self._slow_until[rank] else 1.0

    def _await_death(self, rank: int) -> None:
        assert self._cluster.failures is not None
        when = self.now + self._faults.exponential(self._cluster.failures.every)
        heapq.heappush(self._heap, (when, _DIED, rank, 0))

    def _die(self, rank: int) -> None:
        """Stops a worker: the gradient it computes is lost, those it has pushed are kept."""
        assert self._cluster.failures is not None
        self._failures += 1
        restart = self.now + self._cluster.failures.restart
        if self._policy.spare and len(self._policy.workers) > 1:
            self._step[rank] += 1
            self._release_core(rank)
            if self._does[rank] == _HERE:
                self._shares[rank].waiting += self.now - self._since[rank]
            self._does[rank] = _AWAY
            decision = self._policy.leave(rank)
            self._execute(decision, max(self.now, self._server_free), rank)
        elif self._does[rank] != _HERE:
            # The policy needs all workers: they wait until it is back and has recomputed its gradient.
            self._begin(rank, restart)
        heapq.heappush(self._heap, (restart, _BACK, rank, 0))

    def _come_back(self, rank: int) -> None:
        self._await_death(rank)
        if self._does[rank] == _AWAY:
            try:
                decision = self._policy.join(rank)
            except UsageError:
                return  # this policy admits no worker
            self._does[rank], self._since[rank] = _HERE, self.now
            self._execute(decision, max(self.now, self._server_free), rank)

    def _stuck(self) -> str:
        """The reason why there are no more updates."""
        updates = len(self.moments)
        if not self._heap:
            waiting = sum(does == _HERE for does in self._does)
            return f"deadlock: after {updates} updates {waiting} workers wait, and no event is left to release them"
        return f"starvation: {self._without} gradients have arrived since update {updates}, and none is used"

    # -- the result -------------------------------------------------------------------------------------------------

    def _result(self, strategy: str, verdict: str | None) -> Result:
        end = max(self.now, self.moments[-1] if self.moments else 0.0)
        for rank, shares in enumerate(self._shares):
            if self._does[rank] == _HERE:
                shares.waiting += max(0.0, end - self._since[rank])
            elif self._does[rank] == _COMPUTING:
                shares.computing += max(0.0, min(end, self._ends[rank]) - self._began[rank])
        if self._trace is not None:
            self._trace.over(end)
        outcome = result(
            strategy=strategy,
            cluster=self._cluster,
            moments=np.array(self.moments),
            used=self.used,
            ages=self.ages,
            shares=self._shares,
            total=end,
        )
        outcome.cancelled, outcome.dropped, outcome.failures = self.cancelled, self.dropped, self._failures
        outcome.traffic = {} if self._network is None else self._network.traffic()
        outcome.verdict = verdict
        outcome.starved = [rank for rank, used in enumerate(self._useful) if not used]
        return outcome
