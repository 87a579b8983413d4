"""Which workers are slow, in which part of a step, and in which pattern: always, now and then, once, or in turns.

A step of a worker reaches from the end of one gradient to the end of the next, without the time in which it waited for
others or computed what was cancelled. Whether a step is long is judged by the worker's own quick steps, whether a
worker is slow by the quick steps of the others: a single long step makes nobody slow.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.report.attribution import CAUSES
from paceline.report.reasons import NONE, ReasonTimes, reason_of_all, reason_of_long
from paceline.report.rows import (
    CANCELLED,
    COMMUNICATING,
    COMPUTING,
    KERNEL,
    LOADING,
    ROW,
    UPDATING,
    WAITING,
    Numbers,
    Rows,
    ends,
)
from paceline.simulate.long_steps import QUICK, excess

PARTS = tuple(CAUSES)
"""Parts of a step, in the order of a step's columns."""
_ELSEWHERE = PARTS.index("elsewhere")
_UNKNOWN = ("slowed", "link")
"""Parts of which the kernel's counts tell nothing."""
SLOW = 1.25
"""Ratio of a worker's step time to the others' from which on it is called slow."""
_MOST = 1_000_000
"""The most steps of all workers that are kept; of a longer run the last ones."""
_WARM = 2
"""First steps of a worker that are left out: much is made in them once."""
_NOTABLE, _NOTABLE_ONCE = 0.07, 0.04
"""Share of a worker's time that its long steps take more, from which on they, or single ones, are worth a word."""
_CHANCE = 4.0
"""Standard deviations of what chance gives to a worker, from which on its long steps are its own."""
_STALL = 10.0
"""Quick steps by which a step is longer that is worth a word in any case."""
_REGULAR = 0.75
"""Share of the long steps that come at equal distances, from which on they have a period."""
_TURNS = 0.6
"""Share of the workers that are slow now and then, from which on slowness is said to move among them."""
_APART = 0.4
"""Share of the long steps' time in which at most two workers have one at once, if slowness moves."""
_ONCE = 2
"""Long steps that are still single ones."""


class Pattern(Enum):
    """When a worker is slow."""

    PERSISTENT = "persistent"
    INTERMITTENT = "intermittent"
    ONE_OFF = "one-off"
    ROTATING = "rotating"


@dataclasses.dataclass(frozen=True, slots=True)
class SlownessFinding:
    """A finding: these workers are slow in this way."""

    pattern: Pattern
    ranks: list[int]
    part: str
    """The part of the step that is longer: a key of `CAUSES`."""
    usual: float
    """Seconds of a usual step: of the others, or its own."""
    more: float
    """Seconds by which a slow step is longer."""
    share: float = 1.0
    """Of the steps that are slow."""
    period: int | None = None
    """If every so many steps one is slow."""
    step: int = 0
    """The number of a single slow step, from 1."""
    moment: float = 0.0
    """The time at which it began."""
    reason: str | None = None
    """Why slow steps are longer, if the kernel tells: a key of `REASONS`."""
    reason_share: float = 0.0
    """Its share of the time of these steps."""

    @property
    def ratio(self) -> float:
        """Of a slow step to a usual one."""
        return (self.usual + self.more) / (self.usual or self.more)


class StepTimes:
    """The steps of each worker, by part, as far as they are kept."""

    def __init__(self) -> None:
        self._pending: defaultdict[int, Rows] = defaultdict(lambda: np.zeros(0, ROW))
        self._last_end: dict[int, float] = {}
        self._steps: defaultdict[int, list[tuple[Numbers, NDArray[np.float32]]]] = defaultdict(list)
        """By worker, arrays with a row per step: its start, then the seconds of its parts; and seconds by reason."""
        self._reasons: defaultdict[int, ReasonTimes] = defaultdict(ReasonTimes)
        self._dropped: defaultdict[int, int] = defaultdict(int)
        self._kept: defaultdict[int, int] = defaultdict(int)
        self._gaps: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        """By worker, spans whose events were not recorded."""
        self._passes = False
        """True if steps are made of passes of microbatches, between which there are gaps by design."""

    def interrupt(self, rank: int, start: float, end: float) -> None:
        """Leaves out the steps that reach into a span whose events were not recorded."""
        self._gaps[rank].append((start, end))

    def add(self, rows: Rows) -> None:
        """Adds rows in the order of their starts."""
        for rank in np.unique(rows["rank"][rows["rank"] >= 0]):
            self._add(int(rank), rows[rows["rank"] == rank])

    def _add(self, rank: int, rows: Rows) -> None:
        rows = np.concatenate([self._pending[rank], rows])
        last = np.flatnonzero((rows["kind"] == COMPUTING) & (rows["minibatches"] > 0))
        if not len(last):
            self._pending[rank] = rows
            return
        done, self._pending[rank] = rows[: last[-1] + 1], rows[last[-1] + 1 :]
        number = np.searchsorted(last, np.arange(len(done)), "left")
        self._passes = self._passes or bool((done["microbatch"] >= 0).any())

        def total(chosen: NDArray[np.bool_], seconds: Numbers) -> Numbers:
            return np.bincount(number[chosen], seconds[chosen], minlength=len(last)).astype(np.float64)

        kind = done["kind"]
        computing = kind == COMPUTING
        forward, slowed = total(computing, done["forward"]), total(computing, done["slowed"])
        link = (kind == COMMUNICATING) | (kind == UPDATING)
        away = total((kind == WAITING) | (kind == CANCELLED), done["seconds"])
        finish = ends(done[last])
        start = np.concatenate([[self._last_end.get(rank, float(done["start"][0]))], finish[:-1]])
        steps = np.zeros((len(last), 1 + len(PARTS)))
        steps[:, 0] = start
        steps[:, 1 + PARTS.index("loading")] = total(kind == LOADING, done["seconds"])
        steps[:, 1 + PARTS.index("forward")] = forward
        backward = total(computing, done["seconds"]) - forward - slowed
        steps[:, 1 + PARTS.index("backward")] = np.maximum(0.0, backward)
        steps[:, 1 + PARTS.index("slowed")] = slowed
        steps[:, 1 + PARTS.index("link")] = total(link, done["seconds"])
        known = steps[:, 1:].sum(axis=1) + away
        steps[:, 1 + PARTS.index("elsewhere")] = np.maximum(0.0, finish - start - known)
        self._last_end[rank] = float(finish[-1])
        counted = np.stack([total(computing, done["kernel"][:, column]) for column in range(len(KERNEL))], axis=1)
        without = [1 + PARTS.index(part) for part in PARTS if part not in _UNKNOWN]
        reasons = self._reasons[rank].add(counted, steps[:, without].sum(axis=1)).astype(np.float32)
        if self._gaps[rank]:
            begins, stops = np.array(sorted(self._gaps[rank])).T
            place = np.searchsorted(stops, start, "right")
            kept = ~((place < len(begins)) & (begins[np.minimum(place, len(begins) - 1)] < finish))
            steps, reasons = steps[kept], reasons[kept]
        if len(steps):
            self._keep(rank, steps, reasons)

    def _keep(self, rank: int, steps: Numbers, reasons: NDArray[np.float32]) -> None:
        self._steps[rank].append((steps, reasons))
        self._kept[rank] += len(steps)
        most = _MOST // len(self._steps)
        while self._kept[rank] - len(self._steps[rank][0][0]) >= most:
            dropped = len(self._steps[rank].pop(0)[0])
            self._kept[rank] -= dropped
            self._dropped[rank] += dropped

    def workers(self) -> dict[int, WorkerSteps]:
        """The steps of each worker that has any, without its first ones."""
        found = {}
        for rank, blocks in sorted(self._steps.items()):
            steps, reasons = (np.concatenate(pieces) for pieces in zip(*blocks, strict=True))
            first = self._dropped[rank]
            begin = max(0, min(_WARM - first, len(steps) - 1))
            if self._passes:
                steps[:, 1 + PARTS.index("elsewhere")] = 0.0
            found[rank] = WorkerSteps(steps[begin:, 0], steps[begin:, 1:], first + begin, reasons[begin:])
        return found


class WorkerSteps:
    """The steps of one worker: which are long, and how long a quick one is."""

    def __init__(
        self, starts: Numbers, parts: Numbers, first: int, reasons: NDArray[np.floating] | None = None
    ) -> None:
        """reasons: seconds of each step, by reason."""
        self.starts, self.parts, self.first = starts, parts, first
        self.reasons = np.tile(NONE, (len(parts), 1)) if reasons is None else reasons.astype(np.float64)
        self.own: Numbers = parts.sum(axis=1)
        self.quick = float(np.quantile(self.own, QUICK))
        self.quick_inside = float(np.quantile(parts[:, :_ELSEWHERE].sum(axis=1), QUICK))
        """Without what the script does between steps."""
        self.usual: Numbers = np.quantile(parts, QUICK, axis=0)
        """Seconds of each part in a quick step."""
        self.excess: Numbers = excess(self.own)
        self.long: NDArray[np.int64] = np.flatnonzero(self.excess)

    @property
    def lost(self) -> float:
        """The share of its time that long steps take more."""
        return float(self.excess.sum() / (self.own.sum() or 1.0))

    @property
    def notable(self) -> bool:
        """True if its long steps are worth a word."""
        return self.lost >= (_NOTABLE if len(self.long) > _ONCE else _NOTABLE_ONCE)

    @property
    def part(self) -> str:
        """The part of a step in which its long steps are longer."""
        return PARTS[int(np.argmax((self.parts[self.long] - self.usual).sum(axis=0)))]

    @property
    def period(self) -> int | None:
        """If nearly every so many steps one is long: how many."""
        apart = np.diff(self.long)
        if len(apart) < 2:
            return None
        usual = int(np.median(apart))
        if usual < 2:
            return None
        # A few steps may be long for another reason, and a few of the series may not be.
        series = int(np.bincount(self.long % usual).max())
        expected = 1 + int(self.long[-1] - self.long[0]) // usual
        return usual if series >= _REGULAR * max(len(self.long), expected) else None


def find_slowness(workers: dict[int, WorkerSteps]) -> list[SlownessFinding]:
    """What can be said of these workers, the largest first."""
    workers = {rank: steps for rank, steps in workers.items() if len(steps.own) > 2}
    if len(workers) < 2:
        return []
    found = [one for rank in workers if (one := _persistent(rank, workers)) is not None]
    notable = [rank for rank, steps in workers.items() if steps.notable]
    if _in_turns(notable, workers):
        found.append(_rotating(notable, workers))
    else:
        found += [_now_and_then(rank, workers[rank]) for rank in notable if _stands_out(rank, workers)]
    found = [_explained(one, workers) for one in found]
    return sorted(found, key=lambda one: -one.more * one.share)


def _explained(finding: SlownessFinding, workers: dict[int, WorkerSteps]) -> SlownessFinding:
    """The finding with its reason, if the kernel tells one."""
    chosen = [workers[rank] for rank in finding.ranks]
    if finding.part in _UNKNOWN:
        return finding
    if finding.pattern is Pattern.PERSISTENT:
        others = [steps for rank, steps in workers.items() if rank not in finding.ranks]
        reason, share = reason_of_all(chosen[0], others)
    else:
        reason, share = reason_of_long(chosen)
    return dataclasses.replace(finding, reason=reason, reason_share=share)


def _persistent(rank: int, workers: dict[int, WorkerSteps]) -> SlownessFinding | None:
    """The worker's quick steps are slow: all are."""
    mine = workers[rank]
    others = [steps for other, steps in workers.items() if other != rank]
    more = mine.usual - np.median([steps.usual for steps in others], axis=0)
    # Time between steps that nothing is known of may be idle: it only counts if it is what makes the difference.
    more[_ELSEWHERE] *= more[_ELSEWHERE] > more[:_ELSEWHERE].clip(0.0).sum()
    part = PARTS[int(np.argmax(more))]
    quick, level = mine.quick, statistics.median(steps.quick for steps in others)
    if part != "elsewhere":
        quick, level = mine.quick_inside, statistics.median(steps.quick_inside for steps in others)
    if quick < SLOW * level or quick <= 0:
        return None
    return SlownessFinding(Pattern.PERSISTENT, [rank], part, level, quick - level)


def _stands_out(rank: int, workers: dict[int, WorkerSteps]) -> bool:
    """True if the long steps of this worker are not just those that all have, or that chance gives to one of them."""
    mine = workers[rank]
    others = [steps.excess for other, steps in workers.items() if other != rank]
    more = float(mine.excess.sum()) - statistics.median(float(one.sum()) for one in others)
    if more < float(mine.excess.sum()) / 2:
        return False
    # Long steps that come by chance: the variance of their sum is the sum of their squares. The worker with most is
    # left out, since it may be slow, too.
    squares = sorted(float(np.square(one).sum()) for one in others)
    chance = statistics.fmean(squares[:-1] if len(squares) > 2 else squares) ** 0.5
    return more >= _CHANCE * chance or float(mine.excess[mine.long].mean()) >= _STALL * mine.quick


def _now_and_then(rank: int, steps: WorkerSteps) -> SlownessFinding:
    more = float(steps.excess[steps.long].mean())
    share = len(steps.long) / len(steps.own)
    longest = int(np.argmax(steps.excess))
    if len(steps.long) <= _ONCE:
        number, moment = steps.first + longest + 1, float(steps.starts[longest])
        return SlownessFinding(Pattern.ONE_OFF, [rank], steps.part, steps.quick, more, share, None, number, moment)
    return SlownessFinding(Pattern.INTERMITTENT, [rank], steps.part, steps.quick, more, share, steps.period)


def _in_turns(ranks: list[int], workers: dict[int, WorkerSteps]) -> bool:
    """True if most workers have long steps, each several, seldom two at once."""
    ranks = [rank for rank in ranks if len(workers[rank].long) > _ONCE]
    if len(ranks) < max(2, _TURNS * len(workers)):
        return False
    spans = []
    for rank in ranks:
        steps = workers[rank]
        starts = steps.starts[steps.long]
        spans.append(np.stack([starts, starts + steps.own[steps.long]], axis=1))
    every = np.concatenate(spans)
    every = every[np.argsort(every[:, 0])]
    reached = np.maximum.accumulate(every[:, 1])
    apart = np.maximum(0.0, every[1:, 1] - np.maximum(every[1:, 0], reached[:-1])).sum() + np.diff(every[0])[0]
    together = 1.0 - apart / np.diff(every, axis=1).sum()
    return bool(together <= _APART)


def _rotating(ranks: list[int], workers: dict[int, WorkerSteps]) -> SlownessFinding:
    chosen = [workers[rank] for rank in ranks]
    parts = sum(((steps.parts[steps.long] - steps.usual).sum(axis=0) for steps in chosen), np.zeros(len(PARTS)))
    more = statistics.median(float(steps.excess[steps.long].mean()) for steps in chosen)
    quick = statistics.median(steps.quick for steps in chosen)
    share = sum(len(steps.long) for steps in chosen) / max(len(steps.own) for steps in chosen)
    return SlownessFinding(Pattern.ROTATING, sorted(ranks), PARTS[int(np.argmax(parts))], quick, more, min(1.0, share))
