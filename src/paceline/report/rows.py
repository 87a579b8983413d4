"""Events as structured arrays: rank, activity, start, length and counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.events import ACTIVITIES, Compute, Event, Push
from paceline.events.kernel import KernelCounts

Rows = NDArray[np.void]
Numbers = NDArray[np.float64]

KINDS = ("computing", "loading", "communicating", "updating", "waiting", "cancelled")
COMPUTING, LOADING, COMMUNICATING, UPDATING, WAITING, CANCELLED = range(len(KINDS))

KERNEL = KernelCounts.__struct_fields__
"""Columns of what the kernel counted in a step."""
_UNCOUNTED = (0.0,) * len(KERNEL)

ROW = np.dtype(
    [
        ("rank", "i4"),
        ("kind", "u1"),
        ("start", "f8"),
        ("seconds", "f8"),
        ("version", "i8"),
        ("forward", "f8"),
        ("slowed", "f8"),
        ("samples", "i8"),
        ("minibatches", "i4"),
        ("on", "i4"),
        ("bytes", "i8"),
        ("skipped", "?"),
        ("microbatch", "i4"),
        ("kernel", "f4", (len(KERNEL),)),
    ]
)
PUSH = np.dtype(
    [
        ("rank", "i4"),
        ("start", "f8"),
        ("version", "i8"),
        ("staleness", "i8"),
        ("samples", "i8"),
        ("bytes", "i8"),
        ("saved", "i8"),
        ("used", "?"),
    ]
)
_AGE = 1e10
"""Seconds above which a time of the monotonic clock must be damaged."""


def by_kind(events: Iterable[Event]) -> dict[type, list[Any]]:
    """Events by class."""
    groups: dict[type, list[Any]] = defaultdict(list)
    for event in events:
        groups[type(event)].append(event)
    return groups


def rows_of(groups: dict[type, list[Any]]) -> Rows:
    """The activities among these events, in the order of their starts."""
    parts = [np.zeros(0, ROW)]
    for event, activity in ACTIVITIES.items():
        group = groups.get(event, [])
        parts.append(_filled(group, ROW))
        parts[-1]["kind"] = KINDS.index(activity)
        if event is Compute and group:
            parts[-1]["kernel"] = [
                _UNCOUNTED if one.kernel is None else msgspec.structs.astuple(one.kernel) for one in group
            ]
    rows = np.concatenate(parts)
    rows = rows[_sane(rows["start"], rows["seconds"])]
    return rows[np.argsort(rows["start"], kind="stable")]


def _sane(starts: Numbers, seconds: Numbers) -> NDArray[np.bool_]:
    """True where the monotonic clock can have such times; a damaged file may have others."""
    return (np.abs(starts) < _AGE) & (seconds >= 0) & (seconds < _AGE)


def pushes_of(groups: dict[type, list[Any]]) -> Rows:
    """The pushes among these events, in the order of their starts."""
    group = groups.get(Push, [])
    pushes = _filled(group, PUSH)
    pushes["used"] = [event.outcome in ("used", "held") for event in group]
    pushes = pushes[_sane(pushes["start"], np.zeros(len(pushes)))]
    return pushes[np.argsort(pushes["start"], kind="stable")]


def _filled(group: Sequence[Any], dtype: np.dtype[np.void]) -> Rows:
    """A row per event, with the columns that these events have, too; `kind` is another thing in a `Pass`."""
    rows = np.zeros(len(group), dtype)
    if "microbatch" in (dtype.names or ()):
        rows["microbatch"] = -1  # of all but passes
    for name in dtype.names or ():
        if name in ("kind", "kernel") or not group or not hasattr(group[0], name):
            continue
        values = [getattr(event, name) for event in group]
        try:
            rows[name] = np.array(values, dtype[name])
        except OverflowError:  # no run has such numbers, but a damaged file can
            limits = np.iinfo(dtype[name])
            rows[name] = [max(limits.min, min(limits.max, value)) for value in values]
    return rows


def ends(rows: Rows) -> Numbers:
    """The end of each row."""
    moments: Numbers = rows["start"] + rows["seconds"]
    return moments


def median_span(moments: Sequence[float], updates: int) -> tuple[float, float]:
    """Start and end of the series of so many updates, or of all, that has the median length."""
    count = min(updates, len(moments) - 1)
    spans = sorted((moments[i + count] - moments[i], moments[i]) for i in range(len(moments) - count))
    seconds, begin = spans[len(spans) // 2]
    return begin, begin + seconds


def busy_until(starts: Numbers, seconds: Numbers) -> Callable[[Numbers], Numbers]:
    """A function from moments to the seconds of these successive intervals before each of them."""
    if not len(starts):
        return lambda moments: np.zeros(len(moments))
    order = np.argsort(starts, kind="stable")
    starts, seconds = starts[order], seconds[order]
    before = np.concatenate([[0.0], np.cumsum(seconds)])

    def busy(moments: Numbers) -> Numbers:
        index = np.searchsorted(starts, moments, "right") - 1
        inside = np.clip(moments - starts[np.maximum(index, 0)], 0.0, seconds[np.maximum(index, 0)])
        sums: Numbers = np.where(index < 0, 0.0, before[np.maximum(index, 0)] + inside)
        return sums

    return busy
