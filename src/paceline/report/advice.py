"""Advice with its gain: what would have made a run quicker, each predicted by the simulator from the run's own steps.

A prediction is the ratio of two simulations, of the change and of the run as it was, on the measured time; so what both
leave out cancels. If the simulation of the run as it was is far from what was measured, nothing is said.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.config import AllReduce, parse_strategy
from paceline.config.units import duration
from paceline.errors import UsageError, names
from paceline.events import OBSERVED
from paceline.policies import Policy
from paceline.report.slowness import PARTS, Pattern, SlownessFinding, WorkerSteps
from paceline.simulate.calibrate import cluster_of
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import simulate

_FEW = 8
"""Steps of a worker below which nothing is predicted."""
_STEPS = 6000
"""Simulated steps of all workers together, per prediction."""
_OFF = 1.25
"""Ratio of the simulated to the measured time from which on the simulation does not describe the run."""
_WORTH = 1.05
"""Ratio of samples per second from which on a change is worth advising."""
_MOST = 4
"""The most pieces of advice."""
_BALANCED = [PARTS.index(part) for part in ("forward", "backward", "slowed")]
"""The parts of a step whose pace decides on a worker's share of the batch."""
_SHARED = [*_BALANCED, PARTS.index("loading")]
"""Those that take less time for fewer samples."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and what it would bring."""

    change: str
    """As a person would say it."""
    seconds_per_update: float
    now: float
    """The same as it was in the run."""
    samples: float
    """Samples per second, as a multiple of the run's."""
    staleness: float
    """Mean staleness of gradients, in updates."""
    command: str | None
    """The line to run; None if the change is not one of a line."""

    @property
    def sentence(self) -> str:
        """With what it brings."""
        stale = f", gradients {self.staleness:.1f} updates old" if self.staleness > 0.05 else ""
        times = f"{duration(self.seconds_per_update)} instead of {duration(self.now)} per update"
        return f"{self.change}: {times}, {self.samples:.2f} × the samples per second{stale}"


class Adviser:
    """Simulates changes of one run."""

    def __init__(
        self,
        steps: Mapping[int, WorkerSteps],
        findings: list[SlownessFinding],
        strategy: str,
        seconds_per_update: float,
        config: Mapping[str, Any],
    ) -> None:
        """seconds_per_update: measured; config: the run's options."""
        self._findings, self._config, self._measured = findings, config, seconds_per_update
        self._steps = [steps[rank] for rank in sorted(steps)]
        self._ranks = sorted(steps)
        self._observed = strategy == OBSERVED
        self._strategy = "all-reduce" if self._observed else strategy

    def advise(self) -> list[Advice]:
        """The changes that are worth it, the best first."""
        if not self._describes():
            return []
        cluster = cluster_of([steps.own.tolist() for steps in self._steps], 0.0)
        now = self._simulated(self._strategy, cluster)
        if now is None or not 1 / _OFF < now[0] / self._measured < _OFF:
            return []
        scale = self._measured / now[0]
        found = []
        for change, spec, changed, command in self._changes(cluster):
            told = self._simulated(spec, changed)
            if told is not None and told[1] >= _WORTH * now[1]:
                found.append(
                    Advice(
                        change=change,
                        seconds_per_update=told[0] * scale,
                        now=self._measured,
                        samples=told[1] / now[1],
                        staleness=told[2],
                        command=command,
                    )
                )
        return sorted(found, key=lambda one: (one.staleness > 0.05, -one.samples))[:_MOST]

    def _describes(self) -> bool:
        """True if the steps are of a kind that the simulator knows: whole gradients of at least two workers."""
        if len(self._steps) < 2 or any(len(steps.own) < _FEW for steps in self._steps) or not self._measured > 0:
            return False
        try:
            return isinstance(parse_strategy(self._strategy), AllReduce | Policy)
        except UsageError:
            return False

    def _simulated(self, spec: str, cluster: SimulatedCluster) -> tuple[float, float, float] | None:
        """Seconds per update, minibatches per second and staleness; None if the strategy is not for these workers.

        A step that is cancelled is taken to last as long as otherwise: what makes it long may be a single operation.
        """
        try:
            cluster = dataclasses.replace(cluster, interruptible=False)
            told, _ = simulate(spec, cluster, updates=max(60, _STEPS // cluster.workers))
        except UsageError:
            return None
        return told.seconds_per_update, told.minibatches_per_second, told.staleness.mean

    def _changes(self, cluster: SimulatedCluster) -> list[tuple[str, str, SimulatedCluster, str | None]]:
        """Changes to try: words, strategy, cluster and the line to run."""
        slow = sorted({rank for one in self._findings if one.pattern is Pattern.PERSISTENT for rank in one.ranks})
        slow = [rank for rank in slow if rank in self._ranks]
        found: list[tuple[str, str, SimulatedCluster, str | None]] = []
        if slow and len(self._ranks) - len(slow) > 1:
            pairs = zip(self._ranks, self._steps, strict=True)
            rest = [steps.own.tolist() for rank, steps in pairs if rank not in slow]
            line = None if self._observed else self._line(self._strategy, len(rest))
            found.append((f"without {_named(slow)}", self._strategy, cluster_of(rest, 0.0), line))
        found += self._repairs()
        if isinstance(parse_strategy(self._strategy), AllReduce) and slow and not self._observed:
            # Each worker's share of the batch is in proportion to its pace of computing, by which batches are balanced.
            computing = [float(steps.parts[:, _BALANCED].sum(axis=1).mean()) for steps in self._steps]
            even = len(computing) / sum(1 / max(1e-9, seconds) for seconds in computing)
            lengths = [
                (steps.own + steps.parts[:, _SHARED].sum(axis=1) * (even / max(1e-9, seconds) - 1)).tolist()
                for steps, seconds in zip(self._steps, computing, strict=True)
            ]
            found.append(("balance=True in team.setup", self._strategy, cluster_of(lengths, 0.0), None))
        workers = len(self._ranks)
        for spec in (f"k-sync:k={workers - max(1, len(slow))}", f"k-batch-sync:k={workers}", "ssp:s=3", "async"):
            if spec != self._strategy and not spec.endswith("k=0"):
                words = f"--strategy {spec}" if not self._observed else f"paceline.join() and --strategy {spec}"
                put_on = [str(one) for one in self._config.get("slow") or []]
                found.append((words, spec, cluster, self._line(spec, workers, put_on)))
        return found

    def _repairs(self) -> list[tuple[str, str, SimulatedCluster, str | None]]:
        """What it would be worth to remove the slowness itself."""
        found: list[tuple[str, str, SimulatedCluster, str | None]] = []
        for one in self._findings[:2]:
            place, lengths = PARTS.index(one.part), []
            pairs = zip(self._ranks, self._steps, strict=True)
            others = [float(steps.usual[place]) for rank, steps in pairs if rank not in one.ranks]
            usual = statistics.median(others) if others else 0.0
            for rank, steps in zip(self._ranks, self._steps, strict=True):
                own = steps.own
                if rank in one.ranks:
                    part = steps.parts[:, place]
                    level = usual if one.pattern is Pattern.PERSISTENT else float(steps.usual[place])
                    own = own - (part - level).clip(0.0)
                lengths.append(own.tolist())
            known = {
                "loading": "more loader processes (num_workers), so that {} waits for no batch",
                "slowed": "without --slow of {}",
                "link": "with a link of {} like the others'",
            }
            other = "with {} like the others" if one.pattern is Pattern.PERSISTENT else "without the long steps of {}"
            words = known.get(one.part, other)
            found.append((words.format(_named(one.ranks)), self._strategy, cluster_of(lengths, 0.0), None))
        return found

    def _line(self, spec: str, workers: int, slow: Sequence[str] = ()) -> str:
        """The command of a run like this one; slow: what is put on its workers."""
        script = str(self._config.get("script") or "SCRIPT")
        words = ["paceline", "run", script, "--workers", str(workers), "--strategy", spec]
        words += [word for one in slow for word in ("--slow", one)]
        arguments = [str(word) for word in self._config.get("arguments") or []]
        return shlex.join([*words, *(["--", *arguments] if arguments else [])])


def _named(ranks: list[int]) -> str:
    return names(ranks).replace("rank", "worker")
