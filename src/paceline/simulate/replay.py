"""Replays a recorded run with some of its times changed, and all that depended on each other still depending.

Each worker's time is cut at the moments that matter to others: when it came to an operation, when it could go on. What
lies between two of them is work of its own, which takes as long as recorded unless it is changed, or waiting, which
lasts until all that it waited for has happened. Replayed unchanged, a run takes as long as it took.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline import events

Times = NDArray[np.float64]
PARTS = ("elsewhere", "loading", "forward", "backward", "slowed", "updating", "link", "waiting")
"""What a worker does between two moments."""
ELSEWHERE, LOADING, FORWARD, BACKWARD, SLOWED, UPDATING, LINK, WAITING = range(len(PARTS))
OWN = (ELSEWHERE, LOADING, FORWARD, BACKWARD, SLOWED)
"""Parts of a step that are the worker's own work."""
_TICK = 1e-7
"""Seconds by which moments that are the same may differ."""
_NOTABLE = 2e-5
"""Seconds of waiting that count as having waited."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Need:
    """A moment of a worker that another moment depends on."""

    rank: int
    moment: float
    lag: float
    """Seconds between them, at least."""
    message: bool
    """True if the lag is that of messages over a link."""


class WorkerTimeline:
    """The time of one worker, in pieces."""

    def __init__(self, rank: int, spans: Sequence[tuple[float, float, int]], marks: Iterable[float]) -> None:
        """spans: start, end and part; a later one overwrites earlier ones. marks: further moments."""
        bounds = {moment for start, end, _ in spans for moment in (start, end)}
        self.moments: Times = np.array(sorted(bounds | set(marks)))
        self.rank = rank
        self.parts = np.zeros(len(self.moments) - 1, np.int64)
        for start, end, part in spans:
            first, last = np.searchsorted(self.moments, (start, end))
            self.parts[first:last] = part
        self.seconds: Times = np.diff(self.moments)
        updates = np.array(sorted(end for _, end, part in spans if part == UPDATING))
        self.steps = np.searchsorted(updates, self.moments[1:] - 1e-12)
        """The number of the step that each piece is of."""
        self.updates = np.searchsorted(self.moments, updates)
        """The places of the updates' ends."""
        self.complete = len(updates)
        """Steps that have an update."""

    def place(self, moment: float) -> int:
        """The place of a moment among this worker's."""
        return int(np.searchsorted(self.moments, moment))

    def by_step(self, part: int, seconds: Times | None = None) -> Times:
        """Seconds of a part in each complete step; seconds: of all pieces, if not as recorded."""
        chosen = (self.parts == part) & (self.steps < self.complete)
        weights = (self.seconds if seconds is None else seconds)[chosen]
        return np.bincount(self.steps[chosen], weights, minlength=self.complete).astype(np.float64)


class RunGraph:
    """The workers of a run, and which of their moments depend on which."""

    def __init__(self, workers: dict[int, WorkerTimeline], needs: dict[tuple[int, float], list[_Need]]) -> None:
        self.workers = workers
        self._needs: dict[tuple[int, int], list[_Need]] = {}
        known = [(rank, moment, found) for (rank, moment), found in needs.items() if rank in workers]
        for rank, moment, found in known:
            self._needs[rank, workers[rank].place(moment)] = [one for one in found if one.rank in workers]
        order = [
            (float(moment), (rank, place) in self._needs, rank, place)
            for rank, worker in workers.items()
            for place, moment in enumerate(worker.moments)
        ]
        self._order = sorted(order)
        self._kept = {rank: self._unexplained(worker) for rank, worker in workers.items()}

    def _unexplained(self, worker: WorkerTimeline) -> NDArray[np.bool_]:
        """Waits whose end is no known event of another worker: they stay as they are."""
        kept: NDArray[np.bool_] = worker.parts == WAITING
        explained = False
        for place in reversed(range(len(kept))):
            # Between a wait and the activity that it was for, there may be a moment of the script's own.
            idle = place + 1 < len(kept) and worker.parts[place + 1] in (WAITING, ELSEWHERE)
            explained = (worker.rank, place + 1) in self._needs or (explained and idle)
            kept[place] &= not explained
        return kept

    def replay(self, seconds: dict[int, Times], link: float = 1.0) -> dict[int, Times]:
        """The new moments of each worker; seconds: of each piece that is its own; link: factor on messages' times."""
        new = {rank: np.full(len(worker.moments), np.nan) for rank, worker in self.workers.items()}
        lengths = {}
        for rank, worker in self.workers.items():
            length = np.where((worker.parts == WAITING) & ~self._kept[rank], 0.0, seconds[rank])
            lengths[rank] = np.where(worker.parts == LINK, length * link, length)
        for moment, _, rank, place in self._order:
            found = new[rank]
            value = found[place - 1] + lengths[rank][place - 1] if place else moment
            for need in self._needs.get((rank, place), ()):
                other = self.workers[need.rank]
                before = new[need.rank][other.place(need.moment)]
                if not np.isnan(before):  # unless both are at the very same moment
                    value = max(value, before + need.lag * (link if need.message else 1.0))
            found[place] = value
        return new

    def unchanged(self) -> dict[int, Times]:
        """The seconds of all pieces, as recorded."""
        return {rank: worker.seconds.copy() for rank, worker in self.workers.items()}

    def waiting(self, new: dict[int, Times], seconds: dict[int, Times]) -> dict[int, float]:
        """Each worker's share of the time after its first update that is neither its own work nor an update."""
        found = {}
        for rank, worker in self.workers.items():
            after = np.flatnonzero((worker.steps > 0) & (worker.steps < worker.complete))
            busy = np.isin(worker.parts[after], (WAITING, LINK), invert=True)
            whole = float(new[rank][after[-1] + 1] - new[rank][after[0]]) if len(after) else 0.0
            found[rank] = max(0.0, 1.0 - float(seconds[rank][after[busy]].sum()) / whole) if whole > 0 else 0.0
        return found

    def seconds_per_update(self, new: dict[int, Times]) -> float:
        """From the end of the first update to that of the last, of the worker that has most."""
        worker = max(self.workers.values(), key=lambda one: one.complete)
        first, last = worker.updates[[0, -1]]
        return float(new[worker.rank][last] - new[worker.rank][first]) / max(1, worker.complete - 1)


class GraphBuilder:
    """Finds the dependencies in the events of a run: of operations of process groups, of updates and of passes."""

    def __init__(self, replica: int) -> None:
        """replica: workers of one copy of the model, if it is split over several."""
        self._replica = replica
        self._spans: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
        self._passes: defaultdict[int, list[events.Pass]] = defaultdict(list)
        self._updates: defaultdict[int, list[events.Update]] = defaultdict(list)
        self._operations: defaultdict[tuple[str, int], list[events.Collective]] = defaultdict(list)
        self._derived: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
        """Waits and exchanges, which of operations follow from their parts."""
        self._peers: dict[str, int] = {}
        self._sorted: dict[int, Times] = {}
        self._needs: defaultdict[tuple[int, float], list[_Need]] = defaultdict(list)
        self._marks: defaultdict[int, set[float]] = defaultdict(set)

    def take(self, block: Iterable[events.Event]) -> None:
        """Adds events."""
        for event in block:
            if event.rank < 0:
                continue
            spans, start = self._spans[event.rank], event.start
            match event:
                case events.Load():
                    spans.append((start, _end(event), LOADING))
                case events.Compute():
                    turned, slowed = start + event.forward, _end(event) - event.slowed
                    spans += [(start, turned, FORWARD), (turned, slowed, BACKWARD), (slowed, _end(event), SLOWED)]
                case events.Pass():
                    spans.append((start, _end(event), FORWARD if event.kind == "F" else BACKWARD))
                    self._passes[event.rank].append(event)
                case events.Update():
                    # An update without a length still ends a step.
                    spans.append((start, max(_end(event), np.nextafter(start, np.inf)), UPDATING))
                    self._updates[event.rank].append(event)
                case events.Wait():
                    self._derived[event.rank].append((start, _end(event), WAITING))
                case events.Reduce():
                    self._derived[event.rank].append((start, _end(event), LINK))
                case events.Collective():
                    self._operations[event.channel, event.number].append(event)
                case events.Peers():
                    self._peers[event.channel] = len(event.ranks)

    @property
    def split(self) -> bool:
        """True if microbatches pass through stages."""
        return bool(self._passes)

    @property
    def operations(self) -> tuple[int, int]:
        """Operations of process groups, and how many of them are known of all their workers."""
        whole = sum(len(parts) == self._peers.get(channel) for (channel, _), parts in self._operations.items())
        return len(self._operations), whole

    def build(self) -> RunGraph:
        if self._operations:
            for (channel, _), parts in self._operations.items():
                self._add_operation(parts, complete=len(parts) == self._peers.get(channel))
        else:
            for rank, found in self._derived.items():
                self._spans[rank] += found
            self._add_updates()
            self._add_passes()
        workers = {
            rank: WorkerTimeline(rank, spans, self._marks[rank]) for rank, spans in sorted(self._spans.items()) if spans
        }
        return RunGraph(workers, self._needs)

    def _need(self, rank: int, moment: float, on: int, before: float, lag: float, *, message: bool) -> None:
        if before <= moment and (rank, moment) != (on, before):
            self._marks[rank].add(moment)
            self._marks[on].add(before)
            self._needs[rank, moment].append(_Need(on, before, max(0.0, lag), message))

    def _add_operation(self, parts: Sequence[events.Collective], *, complete: bool) -> None:
        """A worker that waits for an operation goes on when the last one has come and the messages have arrived."""
        last = max(part.start for part in parts)
        for part in parts:
            end = _end(part)
            if part.blocked > 0:
                self._spans[part.rank].append((end - part.blocked, end, WAITING))
            if not complete or end < last:
                # A message that was sent before its receiver came: it waits for nobody.
                self._need(part.rank, end, part.rank, part.start, end - part.start, message=True)
                continue
            moment = end if part.blocked > 0 else self._next_update(part.rank, end)
            for other in parts if moment is not None else ():
                self._need(part.rank, moment or end, other.rank, other.start, end - last, message=True)

    def _next_update(self, rank: int, moment: float) -> float | None:
        """The start of a worker's first update after that moment."""
        return next((update.start for update in self._updates[rank] if update.start >= moment), None)

    def _add_updates(self) -> None:
        """All workers come to an update, and go on when all have made theirs."""
        arrivals: defaultdict[int, dict[int, tuple[float, float, float, float | None]]] = defaultdict(dict)
        for rank, updates in self._updates.items():
            busy = sorted(span for span in self._spans[rank] if span[2] != WAITING and span[1] > span[0])
            starts = [span[0] for span in busy]
            for update in updates:
                place = int(np.searchsorted(starts, update.start))
                before = busy[max(0, place - 1)][1]
                after = busy[place + 1][0] if place + 1 < len(busy) else None
                arrivals[update.version][rank] = (before, update.start, busy[place][1], after)
        for found in arrivals.values():
            last, done = max(one[0] for one in found.values()), max(one[2] for one in found.values())
            for rank, (_, begun, _, after) in found.items():
                # What a worker waits for after the last update is something else.
                idle = 0.0 if after is None else self._waited(rank, done, after)
                for other, (came, _, ended, _) in found.items():
                    if last <= begun:
                        self._need(rank, begun, other, came, begun - last, message=False)
                    if after is not None and done <= after:
                        self._need(rank, after, other, ended, after - done - idle, message=False)

    def _waited(self, rank: int, begin: float, end: float) -> float:
        """Seconds of a worker's waits that began between two moments."""
        waits = self._waits(rank)
        first, last = np.searchsorted(waits[:, 0], (begin - _TICK, end))
        return float((np.minimum(waits[first:last, 1], end) - waits[first:last, 0]).sum())

    def _waits(self, rank: int) -> Times:
        """Start and end of a worker's waits, in order."""
        if rank not in self._sorted:
            found = sorted((start, end) for start, end, part in self._spans[rank] if part == WAITING)
            self._sorted[rank] = np.array(found).reshape(-1, 2)
        return self._sorted[rank]

    def _add_passes(self) -> None:
        """A pass of a stage begins when that of the stage before it, or after it, has sent its results."""
        made = {
            (one.rank // self._replica, one.version, one.kind, one.stage, one.microbatch): one
            for found in self._passes.values()
            for one in found
        }
        lags: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        found: list[tuple[events.Pass, events.Pass, bool]] = []
        for rank, passes in self._passes.items():
            waits = self._waits(rank)
            ends = waits[waits[:, 1] - waits[:, 0] > _NOTABLE, 1]
            passes.sort(key=lambda one: one.start)
            for before, one in pairwise([passes[0], *passes]):
                stage = one.stage + (-1 if one.kind == "F" else 1)
                source = made.get((rank // self._replica, one.version, one.kind, stage, one.microbatch))
                if source is None or one.kind == "W" or source.rank == rank:
                    continue
                place = int(np.searchsorted(ends, one.start, "right")) - 1
                waited = place >= 0 and ends[place] > _end(before)
                found.append((one, source, waited))
                if waited:
                    lags[source.rank, rank].append(one.start - _end(source))
        usual = {pair: float(np.median(seconds)) for pair, seconds in lags.items()}
        for one, source, waited in found:
            lag = one.start - _end(source)
            if not waited:
                lag = min(lag, usual.get((source.rank, one.rank), 0.0))
            self._need(one.rank, one.start, source.rank, _end(source), lag, message=True)


def _end(event: events.Event) -> float:
    return event.start + float(getattr(event, "seconds", 0.0))
