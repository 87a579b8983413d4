"""Workers of one machine that share its cores: when more compute than there are cores, all take longer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.simulate.cluster import SimulatedCluster

Moments = NDArray[np.float64]

_IDLE, _FULL = 0.5, 0.8
"""The share of all cores that is busy when none is short, and when they are: it is never quite all of them."""


class Crowd:
    """Who keeps a core busy. Cores are shared equally, as an operating system does it.

    Every machine has a clock that runs slower the more of its workers compute: a step that needs so much of a core is
    over when the clock has moved by as much, whoever comes and goes meanwhile.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        count = cluster.workers
        cores = cluster.cores
        assert cores is not None
        self._cores = cores.count
        self._machine = [rank // cluster.per_machine for rank in range(count)]
        self._active = cores.active or (1.0,) * count
        self._slept = cores.slept or (0.0,) * count
        self._fixed = cores.fixed or (False,) * count
        self._needs = [0.0] * count
        """Of a core, in a step of drawn length: the same in each."""
        for rank, fixed in enumerate(self._fixed):
            of, factor = cluster.steps_of(rank)
            self._needs[rank] = self._active[rank] * of.mean() * factor if fixed else 0.0
        self._over: list[dict[int, float]] = [{} for _ in range(cluster.machines)]
        """Who computes on each machine, and what its clock shows when that is over."""
        self._clock = [0.0] * cluster.machines
        self._since = [0.0] * cluster.machines
        self._changes = [0] * cluster.machines

    def enter(self, rank: int, now: float, seconds: float) -> int:
        """A worker begins a step that would take so long alone; on which machine."""
        machine = self._machine[rank]
        self._advance(machine, now)
        self._over[machine][rank] = self._clock[machine] + self.needs(rank, seconds)
        return machine

    def needs(self, rank: int, seconds: float) -> float:
        """Of a core, in a step that would take so long alone."""
        return self._needs[rank] if self._fixed[rank] else seconds * self._active[rank]

    def leave(self, rank: int, now: float) -> int | None:
        """It computes no longer; on which machine, if it did at all."""
        machine = self._machine[rank]
        if rank not in self._over[machine]:
            return None
        self._advance(machine, now)
        del self._over[machine][rank]
        return machine

    def next(self, machine: int) -> tuple[float, int] | None:
        """When the first one there is through, if nothing changes; and the number of changes by which that is known."""
        over = self._over[machine]
        if not over:
            return None
        left = min(over.values()) - self._clock[machine]
        return self._since[machine] + max(0.0, left) / self._pace(machine), self._changes[machine]

    def through(self, machine: int, changes: int, now: float) -> int | None:
        """Who that was; nobody, if anything has changed since."""
        if changes != self._changes[machine]:
            return None
        over = self._over[machine]
        rank = min(over, key=over.__getitem__)
        self.leave(rank, now)
        return rank

    def length(self, rank: int, seconds: float, busy: float) -> float:
        """Of a step that would take so long alone, and kept a core for so long."""
        if self._fixed[rank]:
            return max(busy, seconds)
        slept = self._slept[rank]
        elsewhere = max(0.0, 1 - slept - self._active[rank]) * seconds
        return (busy + elsewhere) / max(1e-6, 1 - slept)

    def _pace(self, machine: int) -> float:
        return min(1.0, self._cores / max(1, len(self._over[machine])))

    def _advance(self, machine: int, now: float) -> None:
        self._clock[machine] += (now - self._since[machine]) * self._pace(machine)
        self._since[machine] = now
        self._changes[machine] += 1


class Shortage:
    """How long a worker had to wait for a core, from what was recorded: who computed when, and kept a core busy for
    which share of that time.

    Cores are short when more compute than there are of them, and together keep these busy.
    """

    def __init__(self, phases: Moments, shares: Moments, cores: int) -> None:
        edges = np.concatenate([phases[:, 0], phases[:, 1]])
        order = np.argsort(edges, kind="stable")
        self._moments = edges[order]
        ones = np.ones(len(phases))
        company = np.cumsum(np.concatenate([ones, -ones])[order])
        busy = np.cumsum(np.concatenate([shares, -shares])[order]) / cores
        short = np.clip((busy - _IDLE) / (_FULL - _IDLE), 0.0, 1.0)
        self._lost = short * np.maximum(0.0, 1 - cores / np.maximum(company, 0.5))
        self._until = np.concatenate([[0.0], np.cumsum(self._lost[:-1] * np.diff(self._moments))])

    def between(self, start: Moments, end: Moments) -> Moments:
        """For how many seconds of this it had none."""
        return self._at(end) - self._at(start)

    def _at(self, moment: Moments) -> Moments:
        place = np.clip(np.searchsorted(self._moments, moment, "right") - 1, 0, len(self._moments) - 1)
        return np.asarray(self._until[place] + self._lost[place] * (moment - self._moments[place]))
