"""Why steps take long, as far as the kernel tells: no core, garbage collection, reading, page faults, or sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.report.rows import KERNEL, Numbers

if TYPE_CHECKING:
    from paceline.report.slowness import WorkerSteps

REASONS = {
    "queued": "waited for a core",
    "collecting": "collected garbage (Python's gc)",
    "reading": "waited for files or pages that were read from storage",
    "mapping": "mapped memory anew (page faults)",
    "blocked": "slept, or waited for another process, a lock or a socket",
}
"""What a worker does with time in which it does not compute, in words after 'it'."""
NONE = np.zeros(len(REASONS))
_QUEUED, _COLLECTING, _READING, _MAPPING, _BLOCKED = range(len(REASONS))
_FAULT = 1e-5
"""The most seconds in the kernel that a page fault explains."""
_MOST_OF = 0.5
"""Share of the excess that a reason explains, from which on it is one."""
_NOTABLE = {"queued": 0.1, "collecting": 0.05, "reading": 0.1, "mapping": 0.1}
"""Shares of all workers' own time from which on a reason is worth a word, though no worker is slow by it."""


class ReasonTimes:
    """Turns one worker's counts, which may be of several short steps at once, into seconds by reason."""

    def __init__(self) -> None:
        self._open = 0.0
        """Seconds of steps that are not counted so far."""

    def add(self, counted: Numbers, own: Numbers) -> Numbers:
        """Seconds of each step by reason; counted: a row of `KERNEL` per step; own: its seconds without exchanges."""
        columns = dict(zip(KERNEL, counted.T, strict=True))
        found = np.zeros((len(own), len(REASONS)))
        have = np.flatnonzero(columns["seconds"] > 0)
        if not len(have):
            self._open += float(own.sum())
            return found
        until = self._open + np.cumsum(own)
        spans = np.diff(until[have], prepend=0.0)
        self._open = float(until[-1] - until[have[-1]])
        columns = {name: column[have] for name, column in columns.items()}
        idle = np.maximum(0.0, spans - columns["running"] - columns["queued"])
        stored = (columns["major"] > 0) | (columns["read"] > 0)
        found[have, _QUEUED] = np.minimum(columns["queued"], spans)
        found[have, _COLLECTING] = np.minimum(columns["collecting"], spans)
        found[have, _READING] = np.where(stored, idle + columns["system"], 0.0)
        mapping = np.minimum(columns["system"], _FAULT * columns["faults"])
        found[have, _MAPPING] = np.where(stored, 0.0, mapping)
        found[have, _BLOCKED] = np.where(stored, 0.0, idle)
        return found


def reason_of_all(mine: WorkerSteps, others: list[WorkerSteps]) -> tuple[str | None, float]:
    """The reason for which all steps of a worker take longer than the others', and its share of the worker's time."""
    usual = np.median([steps.reasons.mean(axis=0) for steps in others], axis=0)
    length = float(np.median([steps.own.mean() for steps in others]))
    return _largest(mine.reasons, mine.own, usual, length)


def reason_of_long(chosen: list[WorkerSteps]) -> tuple[str | None, float]:
    """The reason for which the long steps of these workers take longer than their others, and its share of them."""
    long = [np.isin(np.arange(len(steps.own)), steps.long) for steps in chosen]
    pairs = list(zip(chosen, long, strict=True))
    rest = np.concatenate([steps.reasons[~mask] for steps, mask in pairs])
    length = np.concatenate([steps.own[~mask] for steps, mask in pairs])
    if not len(rest):
        return None, 0.0
    reasons = np.concatenate([steps.reasons[mask] for steps, mask in pairs])
    own = np.concatenate([steps.own[mask] for steps, mask in pairs])
    return _largest(reasons, own, rest.mean(axis=0), float(length.mean()))


def _largest(reasons: Numbers, own: Numbers, usual: NDArray[np.float64], length: float) -> tuple[str | None, float]:
    more = reasons.mean(axis=0) - usual
    best = int(np.argmax(more))
    if not more[best] > 0 or more[best] < _MOST_OF * (float(own.mean()) - length):
        return None, 0.0
    return list(REASONS)[best], float(reasons[:, best].sum() / own.sum())


def reason_words(reason: str, share: float, cores: int, processes: int, *, alone: bool) -> str:
    """A reason as the end of a sentence; cores: of the machine, 0 if unknown; processes: of the run.

    alone: True if it concerns single workers.
    """
    words = f"{REASONS[reason]} {share:.0%} of the time"
    if reason != "queued":
        return words
    if 0 < processes <= cores:
        return f"{words}, since another program runs there"
    if alone or not cores:
        return f"{words}, since another program or worker runs there"
    return f"{words}, since {processes} processes of the run share {cores} core{'s' * (cores > 1)}"


def notable_reasons(workers: dict[int, WorkerSteps]) -> list[tuple[str, float]]:
    """Reasons that take a notable share of all workers' own time, the largest first."""
    own = sum(float(steps.own.sum()) for steps in workers.values())
    if not own > 0:
        return []
    seconds = sum((steps.reasons.sum(axis=0) for steps in workers.values()), NONE)
    shares = dict(zip(REASONS, (seconds / own).tolist(), strict=True))
    found = [(reason, shares[reason]) for reason, least in _NOTABLE.items() if shares[reason] >= least]
    return sorted(found, key=lambda one: -one[1])
