"""Partition of a model into stages: the slowest stage is as fast as possible, and then the fewest bytes cross the cuts.

PipeDream's dynamic program over the operations in order: the best assignment of the first j of them to the first s
devices follows from the best ones to s - 1. A stage is a contiguous range of operations; a cut costs the bytes of all
values that are computed before it and needed after it, skip connections included. On a chain the result is optimal; on
any other model it is the best among the cuts of the order in which it computes.

It is here and not in `pipeline`, since the planner and the report use it and import no room that opens sockets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.graph.costs import Cost
from paceline.schedules import kept_in_flight

Numbers = NDArray[np.float64]

_STATE, _ON_DISK = 4, 2
"""Bytes per byte of parameters: parameter, gradient, and the two moments of an optimizer such as Adam, or without."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The device, or the group of equal devices, that a stage runs on."""

    pace: float = 1.0
    """Relative speed: 0.5 takes twice as long."""
    memory: float = math.inf
    """Bytes."""
    bandwidth: float = math.inf
    """Bytes per second of its link to the previous stage."""
    latency: float = 0.0
    """Seconds of a message over that link."""
    count: int = 1
    """Devices that share the stage's microbatches."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a partition."""

    first: int
    last: int
    """Its operations are those from `first` up to, not including, `last`."""
    seconds: float
    """Seconds of one microbatch, forward and backward, divided by the number of its devices."""
    parameters: int
    """Bytes."""
    memory: float
    """Bytes of parameters, gradients, the optimizer's state, and activations of the microbatches in flight."""
    bytes: int
    """Bytes over the cut before it, per microbatch and direction."""
    devices: int = 1
    """Devices that share its microbatches."""


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """A model cut into stages."""

    stages: list[StagePlan]
    slowest: float
    """Seconds of the slowest stage, or of the slowest transfer, per microbatch."""

    @property
    def bounds(self) -> list[int]:
        """The operation at which each stage ends."""
        return [stage.last for stage in self.stages]


class Problem:
    """A model's costs between the positions where it may be cut."""

    def __init__(self, costs: Sequence[Cost], cuts: Sequence[int], crossing: Sequence[Sequence[int]]) -> None:
        """cuts: operations before which it may be cut; crossing: by operation, the values that would cross that cut."""
        self.points = [0, *cuts, len(costs)]
        self._seconds = np.cumsum([0.0, *(cost.seconds for cost in costs)])[self.points]
        self._parameters = np.cumsum([0, *(cost.parameters for cost in costs)])[self.points]
        self._kept = np.cumsum([0, *(cost.bytes for cost in costs)])[self.points]
        over = [sum(costs[value].bytes for value in crossing[cut]) for cut in cuts]
        self.over = np.array([0, *over, 0], dtype=np.float64)
        self.offloaded = False
        """True if the optimizer's state is not in memory."""

    def before(self, last: int) -> Numbers:
        """Seconds of the ranges that end at this point, by their first point."""
        spent: Numbers = self._seconds[last] - self._seconds[:last]
        return spent

    def parameters(self, last: int) -> Numbers:
        """Bytes of these ranges' parameters."""
        held: Numbers = (self._parameters[last] - self._parameters[:last]).astype(np.float64)
        return held

    def memory(self, last: int, kept: int) -> Numbers:
        state = _ON_DISK if self.offloaded else _STATE
        total: Numbers = state * self.parameters(last) + kept * (self._kept[last] - self._kept[:last])
        return total

    def stage(self, first: int, last: int, pace: float, kept: int, devices: int = 1) -> StagePlan:
        return StagePlan(
            first=self.points[first],
            last=self.points[last],
            seconds=float(self._seconds[last] - self._seconds[first]) / pace / devices,
            parameters=int(self._parameters[last] - self._parameters[first]),
            memory=float(self.memory(last, kept)[first]),
            bytes=int(self.over[first]),
            devices=devices,
        )


def partition(
    problem: Problem,
    devices: Sequence[Device],
    *,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    schedule: str = "1f1b",
    microbatches: int = 8,
    slack: float = 0.0,
) -> Partition:
    """Cuts a model into one stage per entry of `devices`, in their order.

    bandwidth: upper limit for all links, in bytes per second; latency: lower limit for all messages, in seconds.
    slack: how much slower than the best the slowest stage may be, as a share, for fewer bytes over the cuts.
    """
    count, points = len(devices), len(problem.points)
    if points - 1 < count:
        raise UsageError(
            f"the model can be cut into {points - 1} part{'s' * (points > 2)} at most, as it has no more layers; "
            f"{count} stages are too many: ask for {points - 1} or fewer"
        )
    kept = kept_in_flight(schedule, count, microbatches, [device.count for device in devices])
    transfers = [
        _transfer(problem, min(bandwidth, device.bandwidth), max(latency, device.latency)) for device in devices
    ]

    def worst(stage: int, last: int) -> Numbers:
        """Seconds of a stage that ends at this point, by its first point; infinite if it exceeds the memory."""
        device = devices[stage]
        own = problem.before(last) / (device.pace * device.count)
        own = own + _reduction(problem, last, device.count, min(bandwidth, device.bandwidth), microbatches)
        seconds = np.maximum(own, transfers[stage][:last] if stage else 0.0)
        return np.where(problem.memory(last, kept[stage]) <= device.memory, seconds, np.inf)

    best = _solve(count, points, worst, np.maximum)
    limit = best[0] * (1 + slack) + 1e-15
    if not math.isfinite(best[0]):
        raise UsageError(
            f"the model does not fit: with every cut into {count} stages one exceeds its device's memory; give it more "
            "stages, fewer microbatches, or more memory"
        )

    def fewest(stage: int, last: int) -> Numbers:
        bytes_over = problem.over[:last] if stage else np.zeros(last)
        return np.where(worst(stage, last) <= limit, bytes_over, np.inf)

    _, ends = _solve(count, points, fewest, np.add)
    starts = [0, *ends[:-1]]
    stages = [
        problem.stage(first, last, device.pace, keep, device.count)
        for first, last, device, keep in zip(starts, ends, devices, kept, strict=True)
    ]
    slowest = max(float(worst(stage, last)[starts[stage]]) for stage, last in enumerate(ends))
    return Partition(stages=stages, slowest=slowest)


def _transfer(problem: Problem, bandwidth: float, latency: float) -> Numbers:
    """Seconds of a microbatch's values and gradients over a cut at each point."""
    seconds: Numbers = np.where(problem.over > 0, 2 * (problem.over / bandwidth + latency), 0.0)
    return seconds


def _reduction(problem: Problem, last: int, share: int, bandwidth: float, microbatches: int) -> Numbers:
    """Seconds per microbatch for the all-reduce of a shared stage's gradients, by the stage's first point."""
    seconds: Numbers = 2 * (share - 1) / share * problem.parameters(last) / bandwidth / microbatches
    return seconds


def _solve(stages: int, points: int, cost: Callable[[int, int], Numbers], join: np.ufunc) -> tuple[float, list[int]]:
    """The least cost of consecutive stages, combined by `join`, and the point at which each of them ends."""
    table = np.full((stages, points), np.inf)
    choice = np.zeros((stages, points), dtype=np.int64)
    for stage in range(stages):
        for last in range(stage + 1, points - (stages - 1 - stage)):
            own = cost(stage, last)
            if stage == 0:
                table[0, last] = own[0]
                continue
            total = join(table[stage - 1, :last], own)
            choice[stage, last] = int(np.argmin(total))
            table[stage, last] = total[choice[stage, last]]
    ends = [points - 1]
    for stage in range(stages - 1, 0, -1):
        ends.append(int(choice[stage, ends[-1]]))
    return float(table[stages - 1, points - 1]), ends[::-1]


def replicated(
    problem: Problem,
    devices: int,
    *,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    microbatches: int = 8,
    memory: float = math.inf,
) -> Partition:
    """Cuts a model into any number of stages on equal devices; several devices may share a stage's microbatches."""
    points = len(problem.points)
    transfer = _transfer(problem, bandwidth, latency)
    table = np.full((devices + 1, points), np.inf)
    choice: dict[tuple[int, int], tuple[int, int]] = {}
    table[0, 0] = 0.0
    for used in range(1, devices + 1):
        for last in range(1, points):
            for share in range(1, min(used, microbatches) + 1):
                reduction = _reduction(problem, last, share, bandwidth, microbatches)
                # In flight are as many microbatches as there are devices from here on, shared by those of the stage.
                flying = min(microbatches, -(-(devices - used + share) // share))
                room = problem.memory(last, flying) <= memory
                own = np.where(room, problem.before(last) / share + reduction, np.inf)
                before = table[used - share, :last]
                total = np.maximum(np.maximum(before, own), transfer[:last])
                first = int(np.argmin(total))
                if total[first] < table[used, last]:
                    table[used, last] = total[first]
                    choice[used, last] = (first, share)
    used = int(np.argmin(table[:, points - 1]))
    if not math.isfinite(table[used, points - 1]):
        raise UsageError(
            f"the model does not fit: with every cut for {devices} devices a stage exceeds its device's memory; give "
            "it more devices, fewer microbatches, or more memory"
        )
    last, found = points - 1, []
    while last:
        first, share = choice[used, last]
        found.append((first, last, share))
        used, last = used - share, first
    found.reverse()
    kept = kept_in_flight("1f1b", len(found), microbatches, [share for _, _, share in found])
    stages = [
        problem.stage(first, last, 1.0, keep, share) for (first, last, share), keep in zip(found, kept, strict=True)
    ]
    return Partition(stages=stages, slowest=float(table[:, points - 1].min()))
