"""The order of each device's operations under each schedule.

An operation is a forward pass (`F`), a backward pass (`B`) or, where a schedule separates them, the gradients of the
weights (`W`), of one microbatch on one of a device's chunks of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import UsageError


class StageOperation(NamedTuple):
    """One pass of one microbatch over one chunk."""

    kind: str
    """`F`, `B` or `W`."""
    microbatch: int
    chunk: int = 0


Order = list[StageOperation]


def gpipe(stages: int, microbatches: int, _: int) -> list[Order]:
    """All forward passes, then all backward passes."""
    return [_merge(microbatches, microbatches) for _ in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int, _: int) -> list[Order]:
    """Each backward pass as soon as possible, so that a stage keeps few activations."""
    return [_merge(min(microbatches, stages - stage), microbatches) for stage in range(stages)]


def interleaved(stages: int, microbatches: int, chunks: int) -> list[Order]:
    """1F1B over several chunks of the model per device, which divides the bubble by their number."""
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


def shared_stages(workers: Sequence[int], microbatches: int, ahead: Callable[[int, int, int], int]) -> list[Order]:
    """The order of each device, by stage, where `workers` devices share each stage and take its microbatches in turn.

    ahead: forward passes before the first backward pass, by microbatches, devices from this stage on, and devices of
    this stage.
    """
    orders = []
    for stage, count in enumerate(workers):
        first = ahead(microbatches, sum(workers[stage:]), count)
        for turn in range(count):
            own = range(turn, microbatches, count)
            order = _merge(min(len(own), first), len(own))
            orders.append([StageOperation(one.kind, own[one.microbatch]) for one in order])
    return orders


def in_flight(order: Sequence[StageOperation], splits_backward: bool = False) -> int:
    """The most microbatches whose activations are kept at once: until `B`, or until `W` if that is separate."""
    kept = most = 0
    for operation in order:
        kept += (operation.kind == "F") - (operation.kind == ("W" if splits_backward else "B"))
        most = max(most, kept)
    return most


def _merge(ahead: int, microbatches: int, late: int | None = None) -> Order:
    """`ahead` forward passes first, then a backward pass for each; `W` follows `late` backward passes later."""
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
