"""Attributes waiting time to the workers that were waited for, and to causes.

A wait begins when a worker is ready and ends when the last one is. Since they were last in step, the last one has spent
more time on some activity than the waiting one: that excess is the cause. Its activity during the wait is not: a worker
that loads slowly is waited for while it computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from paceline.report.rows import (
    COMMUNICATING,
    COMPUTING,
    LOADING,
    ROW,
    UPDATING,
    WAITING,
    Numbers,
    Rows,
    busy_until,
    ends,
)

CAUSES = {
    "loading": "loading its data",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "slowed": "slowness put on with --slow",
    "link": "its link (pushing, pulling, summing)",
    "elsewhere": "what its script does between steps",
}
_MOST = 60_000
"""The most rows that are kept for waits that are not yet attributed."""


class WaitAttribution:
    """Seconds of waiting, by the worker that was waited for and by cause."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
        """By the worker that was waited for, and by cause."""
        self._unexplained: defaultdict[int, float] = defaultdict(float)
        self._open = np.zeros(0, ROW)
        """Waits that are not attributed, because not all events until their end have arrived."""
        self._known = np.zeros(0, ROW)
        """Activities of workers that an open or later wait may need."""

    def add_unexplained(self, on: int, seconds: float) -> None:
        """Adds waits of which only the sum was recorded: their causes are taken to be those of the others."""
        self._unexplained[on] += seconds

    def causes(self, on: int) -> dict[str, float]:
        """Seconds for which this worker was waited for, by cause."""
        known = self.seconds.get(on, dict.fromkeys(CAUSES, 0.0))
        more, total = self._unexplained.get(on, 0.0), sum(known.values())
        if not total:
            return {**known, "elsewhere": more}
        return {cause: seconds * (1 + more / total) for cause, seconds in known.items()}

    def add(self, rows: Rows, until: float) -> None:
        """Adds rows; no later row begins before `until`."""
        rows = rows[rows["rank"] >= 0]
        self._known = np.concatenate([self._known, rows])
        self._open = np.concatenate([self._open, rows[(rows["kind"] == WAITING) & (rows["on"] >= 0)]])
        ready = ends(self._open) <= until
        workers = {
            int(rank): WorkerTime(self._known[self._known["rank"] == rank]) for rank in np.unique(self._known["rank"])
        }
        self._attribute(self._open[ready], workers)
        self._open = self._open[~ready]
        self._forget(workers, until)

    def _forget(self, workers: dict[int, WorkerTime], until: float) -> None:
        """Drops rows that no wait can need: those that ended before all workers were last in step."""
        if until == np.inf:
            self._known = self._known[:0]
            return
        moments = [until]
        for rank, worker in workers.items():
            waits = self._open["start"][self._open["rank"] == rank]
            before = min(until, float(waits.min())) if len(waits) else until
            moments.append(float(worker.last_in_step(np.array([before]))[0]))
        self._known = self._known[ends(self._known) >= min(moments)][-_MOST:]

    def _attribute(self, waits: Rows, workers: dict[int, WorkerTime]) -> None:
        for rank, on in {(int(wait["rank"]), int(wait["on"])) for wait in np.unique(waits[["rank", "on"]])}:
            mine = waits[(waits["rank"] == rank) & (waits["on"] == on)]
            if on not in workers:
                self.seconds[on]["elsewhere"] += float(mine["seconds"].sum())
                continue
            begin = workers[rank].last_in_step(mine["start"])
            theirs = workers[on].spent(begin, ends(mine))
            own = workers[rank].spent(begin, mine["start"])
            excess = {cause: np.maximum(0.0, theirs[cause] - own[cause]) for cause in CAUSES}
            total = sum(excess.values())
            for cause, more in excess.items():
                share = np.divide(more, total, out=np.zeros_like(more), where=total > 0)
                self.seconds[on][cause] += float((share * mine["seconds"]).sum())
            self.seconds[on]["elsewhere"] += float(mine["seconds"][total <= 0].sum())


class WorkerTime:
    """The time of one worker by activity, between any two moments."""

    def __init__(self, rows: Rows) -> None:
        computing = rows[rows["kind"] == COMPUTING]
        start, forward, slowed = computing["start"], computing["forward"], computing["slowed"]
        loading = rows[rows["kind"] == LOADING]
        link = rows[np.isin(rows["kind"], (COMMUNICATING, UPDATING))]
        waiting = rows[rows["kind"] == WAITING]
        self._busy: dict[str, Callable[[Numbers], Numbers]] = {
            "loading": busy_until(loading["start"], loading["seconds"]),
            "forward": busy_until(start, forward),
            "backward": busy_until(start + forward, np.maximum(0.0, computing["seconds"] - forward - slowed)),
            "slowed": busy_until(ends(computing) - slowed, slowed),
            "link": busy_until(link["start"], link["seconds"]),
        }
        self._idle = busy_until(waiting["start"], waiting["seconds"])
        updates = rows[rows["kind"] == UPDATING]
        pulls = rows[(rows["kind"] == COMMUNICATING) & (rows["bytes"] == 0)]  # an all-reduce has bytes
        self._barriers = np.sort(np.concatenate([ends(waiting), updates["start"], ends(pulls)]))
        """Times at which it was in step with the others: after a wait, at a common update, or with a new version."""
        self._first = float(rows["start"].min())

    def last_in_step(self, moments: Numbers) -> Numbers:
        """The last time before each moment at which it was in step with the others."""
        index = np.searchsorted(self._barriers, moments, "left") - 1
        if not len(self._barriers):
            return np.full(len(moments), self._first)
        found: Numbers = np.where(index < 0, self._first, self._barriers[np.maximum(index, 0)])
        return found

    def spent(self, begins: Numbers, finishes: Numbers) -> dict[str, Numbers]:
        """Seconds by cause between these moments, without waiting."""
        seconds = {cause: busy(finishes) - busy(begins) for cause, busy in self._busy.items()}
        idle = self._idle(finishes) - self._idle(begins)
        seconds["elsewhere"] = np.maximum(0.0, finishes - begins - idle - sum(seconds.values()))
        return seconds
