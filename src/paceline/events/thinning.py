"""Bounds the record of a long run: events of some windows of time are recorded, of all others their sums.

A run is recorded in full until its streams have half of their limit. From then on a process records what begins in one
window of 5 s of every 2, 4, 8 and so on, the fewer the closer the streams come to the limit, and sums up the rest in
`Omitted` events. All processes of a machine look at the same streams and the same clock, so they record the same
windows. Rare events are always recorded.

An update is recorded with its pushes, and a push with its leases: each recorded gradient can be followed, and all
others are in the sums, once.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import events
from paceline.events import Event, Omitted
from paceline.events.omitted import OmittedSums

_WINDOW = 5.0
"""Seconds of a window of which either all or nothing is recorded."""
_NOTHING = 64
"""The level at which no window is recorded."""
_OFTEN, _SHARE = 1.0, 1e-3
"""The sums are of this many seconds at least, and of this share of the time since the first of them."""
_RUNS = 500
"""Runs of versions, or ranges of samples, after which the sums are written."""
_MOST = 100_000
"""Pushes and leases that later events may refer to; older ones are forgotten."""
_SUMMED = (
    events.Load,
    events.Compute,
    events.Pass,
    events.Wait,
    events.Reduce,
    events.Update,
    events.Push,
    events.Send,
    events.StageTransfer,
    events.Brought,
    events.Pull,
    events.Cancel,
    events.LeaseGiven,
    events.Return,
    events.Seen,
    events.Message,
    events.Metric,
)
"""Kinds of events that may be omitted."""
_TAGS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in _SUMMED}


def level(streams: Path, limit: int) -> int:
    """How much the events of a run are thinned: one window of 2 to the power of this is recorded."""
    with os.scandir(streams) as files:
        size = sum(file.stat().st_size for file in files)
    left = 2 * (1 - size / limit)
    if left <= 0:
        return _NOTHING
    # The share of windows falls as the time to the power of -1.5, whose sum is finite.
    return max(0, min(_NOTHING - 1, math.floor(-3 * math.log2(left))))


class Thinner:
    """Decides which events of one process are recorded, and sums up the others."""

    def __init__(self, now: float) -> None:
        self.level = 0
        self._began = now
        self._due = now + _OFTEN
        """When the sums are written."""
        self._pushes: dict[int, events.Push] = {}
        """Omitted pushes that no update has used, by ticket."""
        self._newest = -1
        """The newest ticket of a push."""
        self._waiting: dict[int, events.Update] = {}
        """Updates whose last push is recorded after them, by its ticket."""
        self._expected: set[int] = set()
        """Tickets of pushes that are to come, of updates that are recorded."""
        self._leases: dict[int, events.LeaseGiven] = {}
        """Omitted leases whose samples do not count so far, by number."""
        self._returned: dict[int, events.LeaseGiven] = {}
        """Omitted leases that were returned; the push that had them may be recorded later."""
        self.forget_sums()

    def forget_sums(self) -> None:
        """Begins the sums anew."""
        self._omitted = 0
        self._sums: dict[int, OmittedSums] = {}
        self._metrics: dict[tuple[str, ...], events.Metric] = {}
        """The newest values, by their names; they are recorded with the sums."""
        self._start, self._end, self._updated = math.inf, -math.inf, -math.inf
        self._updates: list[tuple[int, int, int]] = []
        self._late = self._used = 0
        self._staleness: Counter[int] = Counter()
        self._trained = _SampleRanges()

    def add(self, event: Event) -> list[Event]:
        """The events to record now: none, or this one, after the sums and the events that it refers to."""
        if type(event) not in _TAGS:
            return [*self.settle(), event]
        if isinstance(event, events.Update) and max(event.pushes, default=-1) > self._newest:
            self._waiting[max(event.pushes)] = event
            return []
        found = self._decide(event)
        if isinstance(event, events.Push):
            self._newest = max(self._newest, event.ticket)
            if event.ticket in self._waiting:
                found += self._decide(self._waiting.pop(event.ticket))
        return found

    def _decide(self, event: Event) -> list[Event]:
        whole = self.level < _NOTHING and not int(event.start // _WINDOW) & ((1 << self.level) - 1)
        if whole or self._refers_to_recorded(event):
            found = self._referred(event)
            return [*self.settle(), *found, event]
        self._omit(event)
        if event.start < self._due and len(self._updates) + len(self._trained) < _RUNS:
            return []
        self._due = event.start + max(_OFTEN, _SHARE * (event.start - self._began))
        return self.settle()

    def settle(self) -> list[Event]:
        """The sums of what was omitted since the last call, and updates whose push is still to come."""
        late: list[Event] = []
        for update in self._waiting.values():
            late += [*self._referred(update), update]
        self._expected |= set(self._waiting)
        self._waiting = {}
        if not self._sums:
            return late
        found = Omitted(
            min(self._sums),
            self._start,
            self._end - self._start,
            self._omitted,
            self._sums,
            self._updates,
            self._updated - self._start if self._updates else 0.0,
            self._late,
            dict(self._staleness),
            self._used,
            self._trained.all(),
        )
        metrics = self._metrics
        self.forget_sums()
        return [found, *metrics.values(), *late]

    def _refers_to_recorded(self, event: Event) -> bool:
        """True if a recorded push or lease would otherwise have no end."""
        match event:
            case events.Update():
                return any(ticket not in self._pushes for ticket in event.pushes)
            case events.Push() if event.ticket in self._expected:
                self._expected.discard(event.ticket)
                return True
            case events.Push() | events.Return() | events.Seen():
                return any(lease not in self._leases and lease not in self._returned for lease in event.leases)
        return False

    def _referred(self, event: Event) -> list[Event]:
        """The omitted pushes and leases of an event that is recorded; they leave the sums."""
        pushes: Sequence[Event] = []
        leases: list[int] = []
        match event:
            case events.Update():
                used = [self._pushes.pop(ticket) for ticket in event.pushes if ticket in self._pushes]
                pushes, leases = used, [lease for push in used for lease in push.leases]
            case events.Push() | events.Return() | events.Seen():
                leases = event.leases
        given = [self._leases.pop(lease) for lease in leases if lease in self._leases]
        found = [*given, *pushes]
        for one in found:
            self._sum(one, -1)
        return found

    def _omit(self, event: Event) -> None:
        self._sum(event, 1)
        match event:
            case events.LeaseGiven():
                _put(self._leases, event.number, event)
            case events.Push() if event.outcome in ("used", "held"):
                _put(self._pushes, event.ticket, event)
            case events.Push() if event.outcome == "skipped":
                self._train(event.leases)
            case events.Return():
                for lease in event.leases:
                    if lease in self._leases:
                        _put(self._returned, lease, self._leases.pop(lease))
            case events.Seen():
                self._train(event.leases)
            case events.Update() if not event.skipped:
                self._update(event)
            case events.Compute() | events.Pass():
                self._late += event.samples
            case events.Metric():
                self._metrics[tuple(event.values)] = event

    def _update(self, event: events.Update) -> None:
        self._updated, self._late = max(self._updated, event.start + event.seconds), 0
        first, last, gradients = self._updates[-1] if self._updates else (0, -1, 0)
        if event.version == last + 1 and event.workers == gradients:
            self._updates[-1] = first, event.version, gradients
        else:
            self._updates.append((event.version, event.version, event.workers))
        for ticket in event.pushes:
            push = self._pushes.pop(ticket)
            self._staleness[max(0, event.version - 1 - push.version)] += 1
            self._used += push.samples
            self._train(push.leases)

    def _train(self, leases: Sequence[int]) -> None:
        for number in leases:
            lease = self._leases.pop(number, None)
            if lease is not None:
                self._trained.add(lease)

    def _sum(self, event: Event, sign: int) -> None:
        """Adds an event to the sums, or removes it."""
        seconds: float = getattr(event, "seconds", 0.0)
        self._omitted += sign
        self._start, self._end = min(self._start, event.start), max(self._end, event.start + seconds)
        sums = self._sums.get(event.rank)
        if sums is None:
            sums = self._sums[event.rank] = OmittedSums()
        tag = _TAGS[type(event)]
        sums.events[tag] = sums.events.get(tag, 0) + sign
        if seconds:
            sums.seconds[tag] = sums.seconds.get(tag, 0.0) + seconds
        match event:
            case events.Compute() | events.Pass():
                _sum_computed(sums, event)
            case events.Wait():
                sums.waits[event.on] = sums.waits.get(event.on, 0.0) + seconds
            case events.Reduce():
                sums.read += event.bytes
            case events.Update():
                sums.read += event.bytes
                sums.version = max(sums.version, event.version)
            case events.Push():
                sums.pushed += sign * event.bytes
                sums.saved += sign * event.saved
                sums.pushed_minibatches += sign * max(1, len(event.leases))
                sums.pushed_samples += sign * event.samples
                sums.dropped += sign * (event.outcome == "dropped")
            case events.Message() if event.direction == "send":
                sums.sent += event.bytes
            case events.StageTransfer():
                sums.received += event.bytes


def _sum_computed(sums: OmittedSums, event: events.Compute | events.Pass) -> None:
    sums.minibatches += event.minibatches
    sums.samples += event.samples
    sums.forward += event.forward
    sums.longest = max(sums.longest, event.seconds)
    sums.version = max(sums.version, event.version)
    if isinstance(event, events.Compute):
        sums.slowed += event.slowed
        sums.core += event.core
    if event.samples or isinstance(event, events.Compute):
        sums.gradients += 1
        sums.whole += event.minibatches


def _put(table: dict[int, Any], key: int, value: Event) -> None:
    table[key] = value
    if len(table) > _MOST:
        del table[next(iter(table))]


class _SampleRanges:
    """Samples of epochs, as few ranges; one that is there twice is in two of them."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int, int, int], int] = {}
        """By loader, epoch, source and the index after the last sample of a range: the index of its first."""
        self._stops: dict[tuple[int, int, int, int], int] = {}
        """The reverse."""
        self._twice: list[tuple[int, int, int, int, int]] = []

    def __len__(self) -> int:
        return len(self._stops) + len(self._twice)

    def add(self, lease: events.LeaseGiven) -> None:
        where = lease.loader, lease.epoch, lease.source
        first, stop = lease.first, lease.first + lease.samples
        if (*where, first) in self._stops or (*where, stop) in self._firsts:
            self._twice.append((*where, first, stop))
            return
        if (*where, first) in self._firsts:
            before = self._firsts.pop((*where, first))
            del self._stops[*where, before]
            first = before
        if (*where, stop) in self._stops:
            after = self._stops.pop((*where, stop))
            del self._firsts[*where, after]
            stop = after
        self._firsts[*where, stop], self._stops[*where, first] = first, stop

    def all(self) -> list[tuple[int, int, int, int, int]]:
        """Loader, epoch, source, index of the first sample and index after the last."""
        return sorted([(*key, stop) for key, stop in self._stops.items()] + self._twice)
