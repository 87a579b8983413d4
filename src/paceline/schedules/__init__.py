"""Pure: the order of a pipeline's passes, and the formulas of its time and memory.

`timing` evaluates a schedule for given times of the passes; it alone needs numpy.
"""

from paceline.schedules.orders import Order, StageOperation
from paceline.schedules.registry import (
    EVEN,
    SCHEDULES,
    PassTimes,
    bubble,
    kept_in_flight,
    shareable,
    shared_orders,
    step_seconds,
)

__all__ = [
    "EVEN",
    "SCHEDULES",
    "Order",
    "PassTimes",
    "StageOperation",
    "bubble",
    "kept_in_flight",
    "shareable",
    "shared_orders",
    "step_seconds",
]
