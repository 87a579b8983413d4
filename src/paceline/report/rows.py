"""Events as structured arrays: rank, activity, start, length and counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.events import Cancel, Compute, Event, Load, Pass, Pull, Push, Reduce, Update, Wait

Rows = NDArray[np.void]
Numbers = NDArray[np.float64]

KINDS = ("computing", "loading", "communicating", "updating", "waiting", "cancelled")
COMPUTING, LOADING, COMMUNICATING, UPDATING, WAITING, CANCELLED = range(len(KINDS))

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
_KIND: dict[type, int] = {
    Compute: COMPUTING,
    Pass: COMPUTING,
    Load: LOADING,
    Reduce: COMMUNICATING,
    Pull: COMMUNICATING,
    Update: UPDATING,
    Wait: WAITING,
    Cancel: CANCELLED,
}
_FIELDS: dict[type, tuple[str, ...]] = {
    Compute: ("version", "forward", "slowed", "samples", "minibatches"),
    Pass: ("version", "forward", "samples", "minibatches"),
    Load: (),
    Reduce: ("bytes",),
    Pull: ("version",),
    Update: ("version", "bytes", "skipped"),
    Wait: ("on",),
    Cancel: ("version",),
}


def by_kind(events: Iterable[Event]) -> dict[type, list[Any]]:
    """Events by class."""
    groups: dict[type, list[Any]] = defaultdict(list)
    for event in events:
        groups[type(event)].append(event)
    return groups


def rows_of(groups: dict[type, list[Any]]) -> Rows:
    """The activities among these events, in the order of their starts."""
    count = sum(len(groups[kind]) for kind in _KIND if kind in groups)
    rows = np.zeros(count, ROW)
    begin = 0
    for kind, number in _KIND.items():
        group = groups.get(kind)
        if not group:
            continue
        part = rows[begin : begin + len(group)]
        _fill(part, group, ("rank", "start", "seconds", *_FIELDS[kind]))
        part["kind"] = number
        begin += len(group)
    rows = rows[_sane(rows["start"], rows["seconds"])]
    return rows[np.argsort(rows["start"], kind="stable")]


def _sane(starts: Numbers, seconds: Numbers) -> NDArray[np.bool_]:
    """True where the monotonic clock can have such times; a damaged file may have others."""
    return (np.abs(starts) < _AGE) & (seconds >= 0) & (seconds < _AGE)


def pushes_of(groups: dict[type, list[Any]]) -> Rows:
    """The pushes among these events, in the order of their starts."""
    group = groups.get(Push, [])
    pushes = np.zeros(len(group), PUSH)
    _fill(pushes, group, ("rank", "start", "version", "staleness", "samples", "bytes", "saved"))
    pushes["used"] = [event.outcome in ("used", "held") for event in group]
    pushes = pushes[_sane(pushes["start"], np.zeros(len(pushes)))]
    return pushes[np.argsort(pushes["start"], kind="stable")]


def _fill(target: Rows, group: Sequence[Any], fields: Iterable[str]) -> None:
    for name in fields:
        values = [getattr(event, name) for event in group]
        try:
            target[name] = np.array(values, target.dtype[name])
        except OverflowError:  # no run has such numbers, but a damaged file can
            limits = np.iinfo(target.dtype[name])
            target[name] = [max(limits.min, min(limits.max, value)) for value in values]


def ends(rows: Rows) -> Numbers:
    """The end of each row."""
    moments: Numbers = rows["start"] + rows["seconds"]
    return moments


def busy_until(starts: Numbers, seconds: Numbers) -> Callable[[Numbers], Numbers]:
    """A function from moments to the seconds of these successive intervals before each of them."""
    order = np.argsort(starts, kind="stable")
    starts, seconds = starts[order], seconds[order]
    before = np.concatenate([[0.0], np.cumsum(seconds)])

    def busy(moments: Numbers) -> Numbers:
        index = np.searchsorted(starts, moments, "right") - 1
        inside = np.clip(moments - starts[np.maximum(index, 0)], 0.0, seconds[np.maximum(index, 0)])
        sums: Numbers = np.where(index < 0, 0.0, before[np.maximum(index, 0)] + inside)
        return sums

    return busy
