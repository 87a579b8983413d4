"""The list of schedules, and the formulas of their time and memory.

A new schedule is one function that returns the orders, and one line in `SCHEDULES`. Configuration, pipeline, simulator
and planner read this list and no other. What a line leaves out is computed from the orders, or has no formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.schedules import orders
from paceline.schedules.orders import Order


class PassTimes(NamedTuple):
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float
    """Without the gradients of the weights, if those have a time of their own."""
    weights: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.backward + self.weights


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of passes, and what is known of it. p stages, m microbatches."""

    orders: Callable[[int, int, int], list[Order]]
    """The order of each stage, by stages, microbatches and chunks."""
    idle: Callable[[PassTimes, int], float] | None = None
    """Seconds of bubble per further stage, by times and chunks: a step takes m·whole + (p−1)·idle. None: no formula."""
    kept: Callable[[int, int, int], int] | None = None
    """Microbatches whose activations a stage keeps at most, by stages, microbatches and stage. None: counted."""
    ahead: Callable[[int, int, int], int] | None = None
    """For `shared_stages`. None: a stage has one worker."""
    has_chunks: bool = False
    """True if a device has several chunks of the model; m must then be a multiple of p."""
    splits_backward: bool = False
    """True if the gradients of the weights are operations of their own."""
    joins_steps: bool = False
    """True if `idle` holds only where stages begin the next step before all have ended this one."""


def _all_of_it(stages: int, microbatches: int, stage: int) -> int:
    return microbatches


def _down_to_one(stages: int, microbatches: int, stage: int) -> int:
    return min(microbatches, stages - stage)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(orders.gpipe, lambda times, _: times.whole, _all_of_it, ahead=lambda m, _all, _own: m),
    "1f1b": Schedule(
        orders.one_forward_one_backward,
        lambda times, _: times.whole,
        _down_to_one,
        # As many as there are devices from here on, so that all of them have something to do.
        ahead=lambda _, devices, own: -(-devices // own),
    ),
    "interleaved": Schedule(
        orders.interleaved, lambda times, chunks: times.whole / chunks, _all_of_it, has_chunks=True
    ),
    "zero-bubble": Schedule(
        orders.zero_bubble,
        lambda times, _: max(0.0, times.forward + times.backward - times.weights),
        _down_to_one,
        splits_backward=True,
    ),
    "zero-bubble-2p": Schedule(
        orders.zero_bubble_2p,
        lambda times, _: 0.0,
        lambda stages, microbatches, stage: min(microbatches, 2 * (stages - stage) - 1),
        splits_backward=True,
        joins_steps=True,
    ),
}


def shareable() -> tuple[str, ...]:
    """The schedules under which several workers may share a stage."""
    return tuple(name for name, schedule in SCHEDULES.items() if schedule.ahead is not None)


def shared_orders(schedule: str, workers: Sequence[int], microbatches: int) -> list[Order]:
    """The order of each device where `workers` devices share each stage."""
    ahead = SCHEDULES[schedule].ahead
    if ahead is None:
        raise UsageError(
            f"under the schedule '{schedule}' a stage has one worker; several share one under {shareable()}"
        )
    return orders.shared_stages(workers, microbatches, ahead)


def kept_in_flight(schedule: str, stages: int, microbatches: int, workers: Sequence[int] = ()) -> list[int]:
    """Microbatches whose activations each stage keeps at most; one of its devices, if several share it."""
    known = SCHEDULES[schedule]
    if max(workers, default=1) > 1:
        every = shared_orders(schedule, workers, microbatches)
        return [orders.in_flight(every[sum(workers[:stage])]) for stage in range(stages)]
    if known.kept is not None:
        return [known.kept(stages, microbatches, stage) for stage in range(stages)]
    return [orders.in_flight(order, known.splits_backward) for order in known.orders(stages, microbatches, 1)]


def step_seconds(schedule: str, stages: int, microbatches: int, times: PassTimes, chunks: int = 1) -> float | None:
    """Seconds of a step of equal stages whose messages take no time; None if there is no formula."""
    if stages < 1 or microbatches < 1:
        raise UsageError(f"a pipeline needs at least one stage and one microbatch; it has {stages} and {microbatches}")
    idle = SCHEDULES[schedule].idle
    return None if idle is None else microbatches * times.whole + (stages - 1) * idle(times, chunks)


EVEN = PassTimes(1.0, 1.0, 1.0)
"""All passes of one length."""


def bubble(schedule: str, stages: int, microbatches: int, chunks: int = 1, times: PassTimes = EVEN) -> float | None:
    """The idle share of such a step; None if there is no formula."""
    taken = step_seconds(schedule, stages, microbatches, times, chunks)
    return None if taken is None else 1 - microbatches * times.whole / taken
