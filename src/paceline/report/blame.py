"""For whom the team waited, and what that worker did meanwhile."""

from __future__ import annotations

from collections import defaultdict

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


class Blame:
    """Seconds that workers waited, by whom they waited for and by what that worker did in that time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
        """By worker that was waited for, and by cause."""
        self.waited: defaultdict[int, float] = defaultdict(float)
        """By worker that waited."""
        self._open = np.zeros(0, ROW)
        """Waits that have not been looked at, because what happened until their end is not all known."""
        self._known = np.zeros(0, ROW)
        """What workers did that a wait may still have been for."""

    def add(self, rows: Rows, until: float) -> None:
        """These rows have come, and none that begins before `until` will come any more."""
        rows = rows[rows["rank"] >= 0]
        waits = rows["kind"] == WAITING
        self._known = np.concatenate([self._known, rows[~waits]])
        self._open = np.concatenate([self._open, rows[waits]])
        ready = ends(self._open) <= until
        self._look(self._open[ready])
        self._open = self._open[~ready]
        oldest = min(until, float(self._open["start"].min())) if len(self._open) else until
        self._known = self._known[ends(self._known) > oldest]

    def _look(self, waits: Rows) -> None:
        for rank in np.unique(waits["rank"]):
            self.waited[int(rank)] += float(waits["seconds"][waits["rank"] == rank].sum())
        for on in np.unique(waits["on"][waits["on"] >= 0]):
            mine = waits[waits["on"] == on]
            begins, finishes = mine["start"], ends(mine)
            theirs = self._known[self._known["rank"] == on]
            causes = self.seconds[int(on)]
            left = float(mine["seconds"].sum())
            for cause, (starts, seconds) in _stretches(theirs).items():
                if len(starts):
                    busy = busy_until(starts, seconds)
                    share = min(left, float((busy(finishes) - busy(begins)).sum()))
                    causes[cause] += share
                    left -= share
            causes["elsewhere"] += max(0.0, left)


def _stretches(rows: Rows) -> dict[str, tuple[Numbers, Numbers]]:
    """When a worker did what, by cause."""
    computing = rows[rows["kind"] == COMPUTING]
    start, forward, slowed = computing["start"], computing["forward"], computing["slowed"]
    loading = rows[rows["kind"] == LOADING]
    link = rows[np.isin(rows["kind"], (COMMUNICATING, UPDATING))]
    return {
        "loading": (loading["start"], loading["seconds"]),
        "forward": (start, forward),
        "backward": (start + forward, np.maximum(0.0, computing["seconds"] - forward - slowed)),
        "slowed": (ends(computing) - slowed, slowed),
        "link": (link["start"], link["seconds"]),
    }
