"""The time of a schedule, operation by operation, for given times of the passes.

Times may be arrays: one value per drawn step, all evaluated at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.schedules.orders import StageOperation, in_flight
from paceline.schedules.registry import SCHEDULES, shared_orders

Times = NDArray[np.float64]


class TimedOperation(NamedTuple):
    """An operation in the first of the drawn steps; times in seconds from the step's start."""

    stage: int
    operation: StageOperation
    start: float
    end: float
    device: int


@dataclasses.dataclass(frozen=True)
class ScheduleTiming:
    """The times of a schedule, in seconds, by drawn step."""

    makespan: Times
    """From the first operation of any device to the last."""
    busy: Times
    """Computing time of each device."""
    in_flight: list[int]
    """Microbatches whose activations each device keeps at most."""
    operations: list[TimedOperation]

    @property
    def bubble(self) -> float:
        """The idle share of all devices' time."""
        return float(1.0 - self.busy.mean() / self.makespan.mean())


def evaluate(
    schedule: str,
    microbatches: int,
    forward: Times,
    backward: Times,
    weights: Times | None = None,
    *,
    chunks: int = 1,
    transfer: float = 0.0,
    workers: Sequence[int] = (),
    links: Sequence[tuple[float, float]] = (),
) -> ScheduleTiming:
    """Runs a schedule on a virtual clock.

    The times are in seconds per microbatch, by drawn step and device, for all chunks of a device together. If the
    schedule splits the backward pass, `backward` is without the gradients of the weights. `transfer` is the time of a
    message from one stage to the next. Each stage has one device unless `workers` gives another number per stage.
    `links` has, per stage, the seconds for which a message occupies its link to the stage before, and the seconds until
    the message is there after that; between stages of one device each, messages in one direction take turns.
    """
    draws, devices = forward.shape
    stages = len(workers) or devices
    if stages < 1 or microbatches < 1 or chunks < 1:
        raise UsageError(
            f"a pipeline has {stages} stages, {microbatches} microbatches and {chunks} chunks; it must be 1 of each "
            "at least"
        )
    known = SCHEDULES[schedule]
    if not known.has_chunks:
        chunks = 1
    if max(workers, default=1) > 1:
        orders = shared_orders(schedule, workers, microbatches)
    else:
        orders = known.orders(stages, microbatches, chunks)
    stage_of = [stage for stage, count in enumerate(workers or [1] * stages) for _ in range(count)]
    splits = known.splits_backward
    rest = np.zeros_like(backward) if weights is None else weights
    lengths = {
        "F": forward / chunks,
        "B": (backward if splits else backward + rest) / chunks,
        "W": rest / chunks if splits else np.zeros_like(rest),
    }
    clock = np.zeros((draws, devices))
    busy = np.zeros((draws, devices))
    done: dict[tuple[int, StageOperation], Times] = {}
    operations: list[TimedOperation] = []
    free: dict[tuple[int, int], Times | float] = {}

    def cross(sender: int, receiver: int, sent: Times) -> Times:
        """The time at which a message that is sent at a time arrives."""
        occupied, latency = links[max(sender, receiver)] if links else (0.0, 0.0)
        if occupied and devices == stages:
            sent = np.maximum(free.get((sender, receiver), 0.0), sent)
            free[sender, receiver] = sent + occupied
        return sent + (occupied + latency + transfer)

    places = [0] * devices
    left = sum(map(len, orders))
    while left:
        before = left
        for device, order in enumerate(orders):
            stage = stage_of[device]
            while places[device] < len(order):
                operation = order[places[device]]
                ready = _ready(done, stage, operation, stages, chunks, cross)
                if ready is None:
                    break
                start = np.maximum(clock[:, device], ready)
                taken = lengths[operation.kind][:, device]
                clock[:, device] = end = start + taken
                busy[:, device] += taken
                done[stage, operation] = end
                operations.append(TimedOperation(stage, operation, float(start[0]), float(end[0]), device))
                places[device] += 1
                left -= 1
        if left == before:
            raise UsageError(f"the schedule '{schedule}' deadlocks with {stages} stages, {microbatches} microbatches")
    return ScheduleTiming(
        makespan=clock.max(axis=1),
        busy=busy,
        in_flight=[in_flight(order, splits) for order in orders],
        operations=operations,
    )


def _ready(
    done: dict[tuple[int, StageOperation], Times],
    stage: int,
    one: StageOperation,
    stages: int,
    chunks: int,
    cross: Callable[[int, int, Times], Times],
) -> Times | float | None:
    """The time at which an operation's input is there; None if that is not known yet."""
    kind, microbatch, chunk = one
    if kind == "W":
        return done.get((stage, StageOperation("B", microbatch, chunk)))
    step = -1 if kind == "F" else 1
    if kind == "F" and stage == 0 and chunk == 0:
        return 0.0
    if kind == "B" and stage == stages - 1 and chunk == chunks - 1:
        return done.get((stage, StageOperation("F", microbatch, chunk)))
    other = stage + step
    if not 0 <= other < stages:  # the neighbouring chunk is at the other end
        other, chunk = other % stages, chunk + step
    came = done.get((other, StageOperation(kind, microbatch, chunk)))
    return None if came is None else (cross(other, stage, came) if stages > 1 else came)
