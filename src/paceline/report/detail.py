"""Keeps single steps of a run for the zoomed timeline: all of a short run, evenly spread pieces of a long one.

The slowest steps are always kept.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paceline.report.rows import COMPUTING, PUSH, ROW, Rows, ends

_FIRST, _LAST = 2, 6
"""Pieces that are kept at each end."""
SLOWEST = 40
"""Slowest steps per worker that are always kept."""


@dataclasses.dataclass(slots=True)
class DetailPiece:
    """All rows and pushes of an interval of time."""

    rows: Rows
    pushes: Rows


class Detail:
    """Pieces of a run, and its slowest steps."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._piece = max(128, limit // 48)
        self._pieces: list[DetailPiece] = []
        self._numbers: list[int] = []
        """The numbers of the pieces, counted from the start of the run."""
        self._every = 1
        """One of so many pieces is kept between the first and the last ones."""
        self._count = 0
        self._rows: list[Rows] = []
        self._pushes: list[Rows] = []
        self._pending = 0
        self._slowest: dict[int, Rows] = {}
        self.whole = True
        """True if nothing was left out."""

    def add(self, rows: Rows, pushes: Rows) -> None:
        """Adds rows and pushes, in the order of their starts."""
        self._rows.append(rows)
        self._pushes.append(pushes)
        self._pending += len(rows)
        if self._pending >= self._piece:
            self._cut()
        for rank in np.unique(rows["rank"]):
            steps = rows[(rows["rank"] == rank) & (rows["kind"] == COMPUTING)]
            steps = np.concatenate([self._slowest.get(int(rank), steps[:0]), steps])
            if len(steps) > SLOWEST:
                steps = steps[np.argpartition(steps["seconds"], -SLOWEST)[-SLOWEST:]]
            self._slowest[int(rank)] = steps

    def _cut(self) -> None:
        """Makes pieces of the pending rows, and drops some if there are too many."""
        rows, pushes = self._collected()
        for begin in range(0, len(rows), self._piece):
            part = rows[begin : begin + self._piece]
            first = float(part["start"][0]) if begin else -np.inf
            last = float(rows["start"][begin + self._piece]) if begin + self._piece < len(rows) else np.inf
            low, high = np.searchsorted(pushes["start"], (first, last))
            self._pieces.append(DetailPiece(part.copy(), pushes[low:high].copy()))
            self._numbers.append(self._count)
            self._count += 1
            self._thin()
        self._rows, self._pushes, self._pending = [], [], 0

    def _thin(self) -> None:
        while sum(len(piece.rows) for piece in self._pieces) > self._limit and len(self._pieces) > _FIRST + _LAST + 1:
            self._every *= 2
            self._keep()
            self.whole = False
        if self._every > 1:
            self._keep()

    def _keep(self) -> None:
        """Keeps the pieces at both ends, and evenly spread ones between them."""
        count = len(self._pieces)
        kept = [
            place
            for place, number in enumerate(self._numbers)
            if place < _FIRST or place >= count - _LAST or number % self._every == 0
        ]
        self._pieces, self._numbers = [self._pieces[place] for place in kept], [self._numbers[place] for place in kept]

    def _collected(self) -> tuple[Rows, Rows]:
        rows = np.concatenate([np.zeros(0, ROW), *self._rows])
        pushes = np.concatenate([np.zeros(0, PUSH), *self._pushes])
        rows = rows[np.argsort(rows["start"], kind="stable")]
        return rows, pushes[np.argsort(pushes["start"], kind="stable")]

    def seal(self) -> list[DetailPiece]:
        """All pieces, with the pending rows as the last one."""
        rows, pushes = self._collected()
        return [*self._pieces, DetailPiece(rows, pushes)] if len(rows) else self._pieces

    def slowest(self, rank: int, above: float) -> Rows:
        """A worker's slowest steps of more than `above` seconds, the slowest first."""
        steps = self._slowest.get(rank, np.zeros(0, ROW))
        steps = steps[steps["seconds"] > above]
        return steps[np.argsort(-steps["seconds"])]


def covers(piece: DetailPiece) -> tuple[float, float]:
    """Start and end of a piece."""
    return float(piece.rows["start"][0]), float(ends(piece.rows).max())
