"""Workers of one machine that share its cores: if more compute than there are cores, all slow down."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.simulate.cluster import SimulatedCluster

Moments = NDArray[np.float64]

_IDLE, _FULL = 0.5, 0.8
"""The busy share of all cores up to which there is no shortage, and from which on there is a full one."""


class SharedCores:
    """The workers that compute on each machine. Cores are shared equally, as by an operating system.

    Every machine has a virtual clock that runs slower the more of its workers compute: a step that needs s seconds of a
    core ends when the clock has advanced by s, whichever workers start and stop meanwhile.
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
        """Core seconds of each step of drawn length."""
        for rank, fixed in enumerate(self._fixed):
            of, factor = cluster.steps_of(rank)
            self._needs[rank] = self._active[rank] * of.mean() * factor if fixed else 0.0
        self._over: list[dict[int, float]] = [{} for _ in range(cluster.machines)]
        """By machine, the workers that compute, each with the clock's value at its end."""
        self._clock = [0.0] * cluster.machines
        self._since = [0.0] * cluster.machines
        self._changes = [0] * cluster.machines

    def enter(self, rank: int, now: float, seconds: float) -> int:
        """Starts a worker's step that takes `seconds` without contention; returns its machine."""
        machine = self._machine[rank]
        self._advance(machine, now)
        self._over[machine][rank] = self._clock[machine] + self.needs(rank, seconds)
        return machine

    def needs(self, rank: int, seconds: float) -> float:
        """Core seconds of a step that takes `seconds` without contention."""
        return self._needs[rank] if self._fixed[rank] else seconds * self._active[rank]

    def leave(self, rank: int, now: float) -> int | None:
        """Ends a worker's computing; returns its machine, or None if it did not compute."""
        machine = self._machine[rank]
        if rank not in self._over[machine]:
            return None
        self._advance(machine, now)
        del self._over[machine][rank]
        return machine

    def next(self, machine: int) -> tuple[float, int] | None:
        """The time at which the machine's first worker is done if nothing changes, and the count of changes so far."""
        over = self._over[machine]
        if not over:
            return None
        left = min(over.values()) - self._clock[machine]
        return self._since[machine] + max(0.0, left) / self._pace(machine), self._changes[machine]

    def finish(self, machine: int, changes: int, now: float) -> int | None:
        """Ends the first worker's computing and returns its rank; None if anything has changed since `next`."""
        if changes != self._changes[machine]:
            return None
        over = self._over[machine]
        rank = min(over, key=over.__getitem__)
        self.leave(rank, now)
        return rank

    def length(self, rank: int, seconds: float, busy: float) -> float:
        """Seconds of a step that takes `seconds` without contention and occupied a core for `busy` seconds."""
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


class CoreShortage:
    """Seconds that workers waited for a core, from recorded phases of computing and the share of a core in each.

    Cores are short if more workers compute than there are cores, and together keep the cores busy.
    """

    def __init__(self, phases: Moments, shares: Moments, cores: int) -> None:
        edges = np.concatenate([phases[:, 0], phases[:, 1]])
        order = np.argsort(edges, kind="stable")
        self._moments = edges[order]
        ones = np.ones(len(phases))
        computing = np.cumsum(np.concatenate([ones, -ones])[order])
        busy = np.cumsum(np.concatenate([shares, -shares])[order]) / cores
        short = np.clip((busy - _IDLE) / (_FULL - _IDLE), 0.0, 1.0)
        lost = short * np.maximum(0.0, 1 - cores / np.maximum(computing, 0.5))
        self._until = np.concatenate([[0.0], np.cumsum(lost[:-1] * np.diff(self._moments))])

    def between(self, start: Moments, end: Moments) -> Moments:
        """Seconds between `start` and `end` in which a worker had no core."""
        until_start, until_end = (np.interp(moments, self._moments, self._until) for moments in (start, end))
        return np.asarray(until_end - until_start)
