"""The predicted step of a cut model: its schedule on a virtual clock, with the links; and the cut of the shortest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.graph.costs import Cost
from paceline.graph.partition import Device, Partition, Problem, partition
from paceline.schedules import SCHEDULES
from paceline.schedules.timing import ScheduleTiming, evaluate


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses the link between two neighbouring stages in a step, in each direction."""

    stage: int
    """The later one."""
    bytes: int
    seconds: float
    """Seconds for which it occupies the link."""


def traffic(cut: Partition, devices: Sequence[Device], microbatches: int) -> list[LinkTraffic]:
    """The traffic of every link."""
    return [
        LinkTraffic(stage=number, bytes=over, seconds=over / device.bandwidth)
        for number, (stage, device) in enumerate(zip(cut.stages, devices, strict=True))
        if number and (over := microbatches * stage.bytes) >= 0
    ]


def quickest_cut(
    problem: Problem,
    costs: Sequence[Cost],
    devices: Sequence[Device],
    *,
    schedule: str,
    microbatches: int,
    slack: float,
) -> Partition:
    """The cut with the shorter predicted step: where a link's latency counts as a part of each message, or not at all.

    Latency delays a message but does not occupy the link, so microbatches that are under way together hide most of it.
    Of short stages it may still be the longest part.
    """
    at_once = [msgspec.structs.replace(device, latency=0.0) for device in devices]
    cuts = [
        partition(problem, some, schedule=schedule, microbatches=microbatches, slack=slack)
        for some in ((at_once, devices) if at_once != list(devices) else (devices,))
    ]
    return min(cuts, key=lambda cut: float(predicted_step(costs, cut, devices, schedule, microbatches).makespan.mean()))


def predicted_step(
    costs: Sequence[Cost], cut: Partition, devices: Sequence[Device], schedule: str, microbatches: int
) -> ScheduleTiming:
    """The timing of one step, without the optimizer's."""
    forward, backward = [], []
    for stage, device in zip(cut.stages, devices, strict=True):
        own = costs[stage.first : stage.last]
        forward += [sum(cost.forward for cost in own) / device.pace] * device.count
        backward += [sum(cost.backward for cost in own) / device.pace] * device.count
    weights = np.array([backward]) / 2 if SCHEDULES[schedule].splits_backward else None
    rest = np.array([backward]) / 2 if weights is not None else np.array([backward])
    return evaluate(
        "1f1b" if SCHEDULES[schedule].has_chunks else schedule,
        microbatches,
        np.array([forward]),
        rest,
        weights,
        workers=[device.count for device in devices],
        links=[
            (stage.bytes / device.bandwidth, device.latency) for stage, device in zip(cut.stages, devices, strict=True)
        ],
    )
