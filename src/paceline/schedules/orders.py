"""Pipelines, operation by operation: in which order each device does what, and when that can happen.

An operation is a forward pass, a backward pass, or, where those are apart, the gradient of the weights, of one
microbatch on one of a device's chunks of the model. Times may be arrays: one value per drawn step, all evaluated at
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

Times = NDArray[np.float64]


class StageOperation(NamedTuple):
    kind: str
    """`F`, `B` or `W`."""
    microbatch: int
    chunk: int = 0


Order = list[StageOperation]


def gpipe(stages: int, microbatches: int, _: int) -> list[Order]:
    """All forward, then all backward."""
    every = range(microbatches)
    return [[*(StageOperation("F", i) for i in every), *(StageOperation("B", i) for i in every)] for _ in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int, _: int) -> list[Order]:
    """Backward as soon as possible, so that a stage keeps few activations."""
    return [_merge(min(microbatches, stages - stage), microbatches) for stage in range(stages)]


def _merge(ahead: int, microbatches: int, late: int | None = None) -> Order:
    """So many forward passes first, then a backward pass for each; weights follow so many backward passes later."""
    order = [StageOperation("F", i) for i in range(ahead)]
    forward, weights = ahead, 0
    for backward in range(microbatches):
        order.append(StageOperation("B", backward))
        if late is not None and backward + 1 - weights > late:
            order.append(StageOperation("W", weights))
            weights += 1
        if forward < microbatches:
            order.append(StageOperation("F", forward))
            forward += 1
    if late is not None:
        order += [StageOperation("W", i) for i in range(weights, microbatches)]
    return order


def interleaved(stages: int, microbatches: int, chunks: int) -> list[Order]:
    """Every device has several chunks of the model, so that it is sooner its turn."""
    if microbatches % stages:
        raise UsageError(
            f"an interleaved pipeline of {stages} stages has {microbatches} microbatches; it must be a multiple of the "
            "stages"
        )
    total, rounds = microbatches * chunks, stages * chunks

    def nth(kind: str, number: int) -> StageOperation:
        chunk = number % rounds // stages
        return StageOperation(
            kind, number // rounds * stages + number % stages, chunk if kind == "F" else chunks - 1 - chunk
        )

    orders = []
    for stage in range(stages):
        ahead = min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages)
        order = [nth("F", number) for number in range(ahead)]
        for number in range(total):
            if ahead + number < total:
                order.append(nth("F", ahead + number))
            order.append(nth("B", number))
        orders.append(order)
    return orders


def zero_bubble(stages: int, microbatches: int, _: int) -> list[Order]:
    """1F1B's memory; the gradients of weights wait until there is a gap (ZB-H1)."""
    return [_merge(min(microbatches, stages - stage), microbatches, stage) for stage in range(stages)]


def zero_bubble_2p(stages: int, microbatches: int, _: int) -> list[Order]:
    """Twice that memory, and no gap is left (ZB-H2)."""
    return [_merge(min(microbatches, 2 * (stages - stage) - 1), microbatches, 2 * stage) for stage in range(stages)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Order]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zero-bubble-2p": zero_bubble_2p,
}


def shared(schedule: str, replicas: Sequence[int], microbatches: int) -> list[Order]:
    """Where so many devices share each stage, and take its microbatches in turn: the order of each of them, by stage.

    A stage begins as many microbatches as there are devices from there on, so that all of them have something to do.
    """
    orders = []
    for stage, count in enumerate(replicas):
        ahead = microbatches if schedule == "gpipe" else -(-sum(replicas[stage:]) // count)
        for turn in range(count):
            own = range(turn, microbatches, count)
            order = _merge(min(len(own), ahead), len(own))
            orders.append([StageOperation(one.kind, own[one.microbatch]) for one in order])
    return orders


class Stretch(NamedTuple):
    """When an operation was done, in the first of the drawn steps."""

    stage: int
    operation: StageOperation
    start: float
    end: float
    device: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Of each drawn step."""

    makespan: Times
    """From the first operation of any device to the last."""
    spans: Times
    """From each device's own first operation to its last, by device."""
    busy: Times
    """What each device computes."""
    in_flight: list[int]
    """Microbatches whose activations each device keeps at most."""
    stretches: list[Stretch]

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
    replicas: Sequence[int] = (),
) -> Evaluated:
    """Times by drawn step and device, per microbatch, all chunks together; transfer: from a stage to the next.

    Where the schedule has the gradients of weights apart, `backward` is without them. There is a device for each stage,
    unless `replicas` says how many share it.
    """
    draws, devices = forward.shape
    stages = len(replicas) or devices
    if stages < 1 or microbatches < 1 or chunks < 1:
        raise UsageError(
            f"a pipeline has {stages} stages, {microbatches} microbatches and {chunks} chunks; it must be 1 of each "
            "at least"
        )
    if schedule != "interleaved":
        chunks = 1
    several = max(replicas, default=1) > 1
    orders = shared(schedule, replicas, microbatches) if several else SCHEDULES[schedule](stages, microbatches, chunks)
    stage_of = [stage for stage, count in enumerate(replicas or [1] * stages) for _ in range(count)]
    apart = schedule.startswith("zero-bubble")
    rest = np.zeros_like(backward) if weights is None else weights
    lengths = {
        "F": forward / chunks,
        "B": (backward if apart else backward + rest) / chunks,
        "W": rest / chunks if apart else np.zeros_like(rest),
    }
    clock = np.zeros((draws, devices))
    first = np.zeros((draws, devices))
    busy = np.zeros((draws, devices))
    done: dict[tuple[int, StageOperation], Times] = {}
    stretches: list[Stretch] = []
    places = [0] * devices
    left = sum(map(len, orders))
    while left:
        before = left
        for device, order in enumerate(orders):
            stage = stage_of[device]
            while places[device] < len(order):
                operation = order[places[device]]
                ready = _ready(done, stage, operation, stages, chunks, transfer)
                if ready is None:
                    break
                start = np.maximum(clock[:, device], ready)
                if places[device] == 0:
                    first[:, device] = start
                taken = lengths[operation.kind][:, device]
                clock[:, device] = end = start + taken
                busy[:, device] += taken
                done[stage, operation] = end
                stretches.append(Stretch(stage, operation, float(start[0]), float(end[0]), device))
                places[device] += 1
                left -= 1
        if left == before:
            raise UsageError(f"the schedule '{schedule}' deadlocks with {stages} stages, {microbatches} microbatches")
    return Evaluated(
        makespan=clock.max(axis=1),
        spans=clock - first,
        busy=busy,
        in_flight=[in_flight(order, apart) for order in orders],
        stretches=stretches,
    )


def _ready(
    done: dict[tuple[int, StageOperation], Times],
    stage: int,
    one: StageOperation,
    stages: int,
    chunks: int,
    transfer: float,
) -> Times | float | None:
    """When what an operation needs is there; None if that is not known yet."""
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
    return None if came is None else came + (transfer if stages > 1 else 0.0)


def in_flight(order: Sequence[StageOperation], apart: bool = False) -> int:
    """Microbatches whose activations are kept at most; apart: until the gradients of weights are made."""
    kept = most = 0
    for operation in order:
        kept += (operation.kind == "F") - (operation.kind == ("W" if apart else "B"))
        most = max(most, kept)
    return most
