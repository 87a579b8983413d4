"""For whom the team waited, and what that worker spent the time on.

A wait begins when a worker is ready and ends when the last one is. Since they last met, the last one has spent more
time on something than the one who waits: that excess is the cause. (What it does in the very moment somebody waits is
not: whoever loads slowly is waited for while it computes, as everybody does.)
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
"""Rows that are kept because a wait may still be about them."""


class Blame:
    """Seconds that workers waited, by whom they waited for and by what that worker spent them on."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
        """By worker that was waited for, and by cause."""
        self._open = np.zeros(0, ROW)
        """Waits that have not been looked at, because what happened until their end is not all known."""
        self._known = np.zeros(0, ROW)
        """What workers did that a wait may still be about."""

    def add(self, rows: Rows, until: float) -> None:
        """These rows have come, and none that begins before `until` will come any more."""
        rows = rows[rows["rank"] >= 0]
        self._known = np.concatenate([self._known, rows])
        self._open = np.concatenate([self._open, rows[(rows["kind"] == WAITING) & (rows["on"] >= 0)]])
        ready = ends(self._open) <= until
        workers = {
            int(rank): WorkerBlame(self._known[self._known["rank"] == rank]) for rank in np.unique(self._known["rank"])
        }
        self._look(self._open[ready], workers)
        self._open = self._open[~ready]
        self._forget(workers, until)

    def _forget(self, workers: dict[int, WorkerBlame], until: float) -> None:
        """Leave what no wait can be about any more: all that was over when everybody had last met the others."""
        if until == np.inf:
            self._known = self._known[:0]
            return
        moments = [until]
        for rank, worker in workers.items():
            waits = self._open["start"][self._open["rank"] == rank]
            before = min(until, float(waits.min())) if len(waits) else until
            moments.append(float(worker.met(np.array([before]))[0]))
        self._known = self._known[ends(self._known) >= min(moments)][-_MOST:]

    def _look(self, waits: Rows, workers: dict[int, WorkerBlame]) -> None:
        for rank, on in {(int(wait["rank"]), int(wait["on"])) for wait in np.unique(waits[["rank", "on"]])}:
            mine = waits[(waits["rank"] == rank) & (waits["on"] == on)]
            if on not in workers:
                self.seconds[on]["elsewhere"] += float(mine["seconds"].sum())
                continue
            begin = workers[rank].met(mine["start"])
            theirs = workers[on].spent(begin, ends(mine))
            own = workers[rank].spent(begin, mine["start"])
            excess = {cause: np.maximum(0.0, theirs[cause] - own[cause]) for cause in CAUSES}
            total = sum(excess.values())
            for cause, more in excess.items():
                share = np.divide(more, total, out=np.zeros_like(more), where=total > 0)
                self.seconds[on][cause] += float((share * mine["seconds"]).sum())
            self.seconds[on]["elsewhere"] += float(mine["seconds"][total <= 0].sum())


class WorkerBlame:
    """What one worker spent its time on, from one moment to another."""

    def __init__(self, rows: Rows) -> None:
        computing = rows[rows["kind"] == COMPUTING]
        start, forward, slowed = computing["start"], computing["forward"], computing["slowed"]
        loading = rows[rows["kind"] == LOADING]
        link = rows[np.isin(rows["kind"], (COMMUNICATING, UPDATING))]
        waiting = rows[rows["kind"] == WAITING]
        self._busy: dict[str, Callable[[Numbers], Numbers]] = {
            "loading": _busy(loading["start"], loading["seconds"]),
            "forward": _busy(start, forward),
            "backward": _busy(start + forward, np.maximum(0.0, computing["seconds"] - forward - slowed)),
            "slowed": _busy(ends(computing) - slowed, slowed),
            "link": _busy(link["start"], link["seconds"]),
        }
        self._idle = _busy(waiting["start"], waiting["seconds"])
        updates = rows[rows["kind"] == UPDATING]
        pulls = rows[(rows["kind"] == COMMUNICATING) & (rows["bytes"] == 0)]  # what is summed has bytes
        self._barriers = np.sort(np.concatenate([ends(waiting), updates["start"], ends(pulls)]))
        """When it was last in step with the others: after a wait, at an update of all, or with a new version."""
        self._first = float(rows["start"].min())

    def met(self, moments: Numbers) -> Numbers:
        """When it last met the others before these moments."""
        index = np.searchsorted(self._barriers, moments, "left") - 1
        if not len(self._barriers):
            return np.full(len(moments), self._first)
        found: Numbers = np.where(index < 0, self._first, self._barriers[np.maximum(index, 0)])
        return found

    def spent(self, begins: Numbers, finishes: Numbers) -> dict[str, Numbers]:
        """Seconds by cause between these moments; waiting for others is none."""
        seconds = {cause: busy(finishes) - busy(begins) for cause, busy in self._busy.items()}
        idle = self._idle(finishes) - self._idle(begins)
        seconds["elsewhere"] = np.maximum(0.0, finishes - begins - idle - sum(seconds.values()))
        return seconds


def _busy(starts: Numbers, seconds: Numbers) -> Callable[[Numbers], Numbers]:
    return busy_until(starts, seconds) if len(starts) else lambda moments: np.zeros(len(moments))
