"""How busy the machine is, and time limits that allow for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from helpers.guard import PERIOD, SLOT, VARIABLE

_WINDOW = 10
"""Records that are averaged: a second's."""
_MOST = 10.0
"""A limit is never stretched by more than this."""
_began = time.monotonic()


def begin_test() -> None:
    """Notes that a test begins now."""
    global _began
    _began = time.monotonic()


def slowdown() -> float:
    """How many times longer than on an idle machine things take: tasks per core, in the busiest second of this test.

    At least 1, which it also is outside of a guarded session.
    """
    path = os.environ.get(VARIABLE)
    if path is None or not Path(path).exists():
        return 1.0
    known: list[tuple[float, float]] = [*SLOT.iter_unpack(Path(path).read_bytes())]
    records = sorted(record for record in known if record[0] >= _began - 1.0)
    tasks = [one for _, one in records]
    means = [sum(tasks[n : n + _WINDOW]) / _WINDOW for n in range(max(1, len(tasks) - _WINDOW + 1))]
    # Records that are missing: the guard itself, which hardly needs the processor, came late.
    gaps = [(after - before) / PERIOD / _WINDOW for (before, _), (after, _) in itertools.pairwise(records)]
    return min(_MOST, max([1.0, *means, *gaps]))


def allowed(seconds: float) -> float:
    """A time limit for an idle machine, stretched by how busy this one has been since the test began."""
    return seconds * slowdown()


def above_noise(check: Callable[[float], None], factors: Sequence[float] = (1.0, 4.0, 16.0)) -> None:
    """Checks a promise about ratios of times, with times that are long against the delays of a busy machine.

    check: takes a factor by which the test's sleeps are longer. An idle machine passes with the first factor, and any
    machine with the last.
    """
    *first, last = factors
    for factor in first:
        with contextlib.suppress(AssertionError):
            return check(factor)
    return check(last)
