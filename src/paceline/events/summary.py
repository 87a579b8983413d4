"""Merges the streams of a run into `events.jsonl`, and summarises them in `summary.json`."""

from __future__ import annotations

import contextlib
import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from paceline import events
from paceline.events.bubbles import Bubble, Bubbles
from paceline.events.follower import EventFollower
from paceline.events.omitted import OmittedSums, Ranges
from paceline.events.ordering import Places, write_ordered
from paceline.events.private import open_private, unrecorded, write_all, write_private
from paceline.events.reader import Reader
from paceline.events.transfers import Communication, Transfers


class Staleness(msgspec.Struct, kw_only=True):
    """The staleness of gradients, in updates."""

    mean: float = 0.0
    max: int = 0
    histogram: dict[int, int] = {}
    """Gradients by staleness."""

    @classmethod
    def of(cls, ages: Mapping[int, int]) -> Staleness:
        """The staleness of gradients that are counted by age."""
        mean = sum(age * times for age, times in ages.items()) / (sum(ages.values()) or 1)
        return cls(mean=mean, max=max(ages, default=0), histogram=dict(sorted(ages.items())))


class WorkerSummary(msgspec.Struct, kw_only=True):
    """One worker's time by activity, in seconds, and its counts."""

    computing: float = 0.0
    loading: float = 0.0
    communicating: float = 0.0
    waiting: float = 0.0
    minibatches: int = 0
    samples: int = 0


class Summary(msgspec.Struct, kw_only=True):
    """The content of `summary.json`; scripts rely on these names."""

    strategy: str | None
    """None if no worker joined."""
    world_size: int
    seconds: float
    """Seconds from the first event to the last."""
    updates: int
    minibatches: int
    cancelled: int = 0
    dropped: int = 0
    seconds_per_update: float | None
    """Mean seconds from the first update to the last, without start-up."""
    samples_per_second: float | None
    """Mean in the same span."""
    staleness: Staleness
    last: dict[str, float | None]
    """The last value of each reported metric; None if it was not finite."""
    pushed_bytes: int = 0
    """Bytes of gradients pushed to a server."""
    saved_bytes: int = 0
    """Bytes saved by compression."""
    refused: dict[str, int] = {}
    """Rejected inputs from the network, by reason."""
    omitted: int = 0
    """Events of which only sums are recorded, since the record was thinned; the numbers here count them."""
    bubble: Bubble | None = None
    """None without a pipeline."""
    communication: Communication | None = None
    """None if no values of a pipeline went between machines."""
    workers: dict[int, WorkerSummary]


_BLOCK = 1 << 20
"""Bytes that are read at once to be merged: their events take twenty times as much memory."""
_EARLY = 10_000
"""Versions after the first one seen whose ends are known: more would take memory without bound."""
_server = WorkerSummary()
"""Takes the counts of servers, which are not summarised."""


class Summariser:
    """Summarises events, in any order."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._workers = {rank: WorkerSummary() for rank in range(world_size)}
        self._early: dict[int, float] = {}
        """The end of each of the first versions, one of which is the first update."""
        self._last_update = -math.inf
        """The end of the last update."""
        self._runs: list[tuple[int, int, int]] = []
        """Successive versions, maybe several times: first, last, gradients in the update of each."""
        self._gradients: tuple[array[float], array[int]] = array("d"), array("q")
        """End time and samples of each gradient."""
        self._used: tuple[array[float], array[int]] = array("d"), array("q")
        """The same for the gradients that a server used, at their use."""
        self._ages: Counter[int] = Counter()
        """Gradients that a server used, by staleness at their use."""
        self._pending: dict[int, events.Push] = {}
        """Pushes that no update has used so far, by ticket."""
        self._awaited: dict[int, tuple[int, float]] = {}
        """By the ticket of a push that has not been seen: version and end of the update that used it."""
        self._lists_pushes = False
        """True if updates tell which pushes they used."""
        self._pushed: Counter[int] = Counter()
        """By rank, minibatches in its pushes."""
        self._pushed_samples: Counter[int] = Counter()
        """By rank, samples in its pushes."""
        self._refused: Counter[str] = Counter()
        self._last: dict[str, tuple[int, float | None]] = {}
        """Rank and last value of each metric; the lead's values replace those of others."""
        self._strategy: str | None = None
        self._minibatches = self._cancelled = self._dropped = self._bytes = self._saved = 0
        self._first, self._final = float("inf"), float("-inf")
        self._bubbles, self._transfers = Bubbles(), Transfers()
        self._omitted_events = self._gradients_count = 0

    def add(self, event: events.Event) -> None:
        """Adds an event."""
        end = event.start + getattr(event, "seconds", 0.0)
        self._first, self._final = min(self._first, event.start), max(self._final, end)
        worker = self._workers.setdefault(event.rank, WorkerSummary()) if event.rank >= 0 else _server
        match event:
            case events.Compute() | events.Pass():
                self._count_computed(event, worker, end)
            case events.Stages():
                self._bubbles.add_cut(event)
            case events.Load():
                worker.loading += event.seconds
            case events.Wait() | events.StageTransfer():
                worker.waiting += event.seconds if isinstance(event, events.Wait) else 0.0
                self._transfers.add(event)
            case events.Reduce() | events.Pull() | events.Update():
                worker.communicating += event.seconds
                if isinstance(event, events.Update) and not event.skipped:
                    self._count_update(event, end)
            case events.Push():
                self._count_push(event)
            case events.Cancel():
                self._cancelled += 1
            case events.Refused():
                self._refused[event.why] += event.count
            case events.Metric():
                self._note_metric(event)
            case events.Join():
                self._strategy = event.strategy
            case events.Omitted():
                self._count_omitted(event)

    def _note_metric(self, event: events.Metric) -> None:
        for name, value in event.values.items():
            if name not in self._last or event.rank <= self._last[name][0]:
                self._last[name] = (event.rank, value)

    def _count_computed(self, event: events.Compute | events.Pass, worker: WorkerSummary, end: float) -> None:
        worker.computing += event.seconds
        worker.minibatches += event.minibatches
        worker.samples += event.samples
        if isinstance(event, events.Pass):
            self._bubbles.add(event)
            if not event.samples:
                return
        self._minibatches += event.minibatches
        self._gradients_count += 1
        self._gradients[0].append(end)
        self._gradients[1].append(event.samples)

    def _count_update(self, update: events.Update, end: float) -> None:
        self._last_update = max(self._last_update, end)
        if update.version < next(iter(self._early), update.version) + _EARLY:
            self._early[update.version] = max(self._early.get(update.version, -math.inf), end)
        first, last, gradients = self._runs[-1] if self._runs else (0, -1, 0)
        if update.workers != gradients or not first <= update.version <= last + 1:
            self._runs.append((update.version, update.version, update.workers))
        elif update.version == last + 1:
            self._runs[-1] = first, update.version, gradients
        self._lists_pushes |= bool(update.pushes)
        for ticket in update.pushes:
            if ticket in self._pending:
                self._use(self._pending.pop(ticket), update.version, end)
            else:
                self._awaited[ticket] = update.version, end

    def _count_push(self, push: events.Push) -> None:
        self._bytes += push.bytes
        self._saved += push.saved
        self._pushed[push.rank] += max(1, len(push.leases))
        self._pushed_samples[push.rank] += push.samples
        self._dropped += push.outcome == "dropped"
        if push.ticket in self._awaited:
            self._use(push, *self._awaited.pop(push.ticket))
        elif push.outcome in ("used", "held"):
            self._pending[push.ticket] = push

    def _use(self, push: events.Push, version: int, end: float) -> None:
        """Counts a gradient that an update to this version has used."""
        self._ages[max(0, version - 1 - push.version)] += 1
        self._used[0].append(end)
        self._used[1].append(push.samples)

    def _count_omitted(self, event: events.Omitted) -> None:
        """Counts the sums of events that were not recorded; updates and gradients at the end of the last of them."""
        self._omitted_events += event.events
        self._transfers.add(event)
        for rank, sums in event.sums.items():
            if rank >= 0:
                _add_worker(self._workers.setdefault(rank, WorkerSummary()), sums)
            self._minibatches += sums.whole
            self._gradients_count += sums.gradients
            self._cancelled += sums.events.get("cancel", 0)
            self._dropped += sums.dropped
            self._bytes += sums.pushed
            self._saved += sums.saved
            if "push" in sums.events:
                self._pushed[rank] += sums.pushed_minibatches
                self._pushed_samples[rank] += sums.pushed_samples
        self._runs += event.updates
        updated = event.start + event.updated
        if event.updates:
            self._last_update = max(self._last_update, updated)
        self._lists_pushes |= bool(event.staleness)
        self._ages += Counter(event.staleness)
        computed = sum(sums.samples for sums in event.sums.values())
        for (ends, counts), end, samples in (
            (self._used, updated, event.used),
            (self._gradients, updated, computed - event.late),
            (self._gradients, event.start + event.seconds, event.late),
        ):
            if samples:
                ends.append(end)
                counts.append(samples)

    def _all_updates(self) -> tuple[int, int]:
        """The number of versions, and of the gradients in their updates."""
        seen, gradients = Ranges(), 0
        for first, last, each in self._runs:
            gradients += each * seen.add(first, last)
        return seen.count, gradients

    def result(self) -> Summary:
        """The summary of the events so far."""
        first, last = min(self._early.values(), default=self._last_update), self._last_update
        updates, in_updates = self._all_updates()
        span = last - first if updates > 1 else 0.0
        gradients = self._gradients_count
        # Where the update is not recorded, or does not tell which gradients it used, a push counts by its outcome.
        alone = [push for push in self._pending.values() if push.outcome == "used" or not self._lists_pushes]
        ages = self._ages + Counter(push.staleness for push in alone)
        if not self._pushed:
            ages = Counter({0: gradients} if gradients else {})
        workers, minibatches = self._with_unrecorded(in_updates)
        inside = sum(push.samples for push in alone if first < push.start <= last)
        for end, samples in zip(*(self._used if self._pushed else self._gradients), strict=True):
            if first < end <= last:
                inside += samples
        return Summary(
            strategy=self._strategy,
            world_size=self._world_size,
            seconds=max(0.0, self._final - self._first),
            updates=updates,
            minibatches=minibatches,
            seconds_per_update=span / (updates - 1) if span else None,
            samples_per_second=inside / span if span else None,
            cancelled=self._cancelled,
            dropped=self._dropped + len(self._pending) - len(alone),  # with its group, or held when the run ended
            pushed_bytes=self._bytes,
            saved_bytes=self._saved,
            staleness=Staleness.of(ages),
            refused=dict(self._refused),
            bubble=self._bubbles.result(self._strategy),
            communication=self._transfers.result(),
            last={name: value for name, (_, value) in self._last.items()},
            omitted=self._omitted_events,
            workers=workers,
        )

    def _with_unrecorded(self, in_updates: int) -> tuple[dict[int, WorkerSummary], int]:
        """The workers and the number of all minibatches, with what a worker had not recorded when it was killed.

        A server knows each worker's; without one, an update knows how many gradients were in it.
        """
        workers, total = {}, self._minibatches
        for rank, worker in self._workers.items():
            unrecorded = max(0, self._pushed[rank] - worker.minibatches)
            samples = max(worker.samples, self._pushed_samples[rank])
            workers[rank] = msgspec.structs.replace(
                worker, minibatches=worker.minibatches + unrecorded, samples=samples
            )
            total += unrecorded
        return workers, max(total, in_updates)


def _add_worker(worker: WorkerSummary, sums: OmittedSums) -> None:
    seconds = sums.seconds
    worker.computing += seconds.get("compute", 0.0) + seconds.get("pass", 0.0)
    worker.loading += seconds.get("load", 0.0)
    worker.waiting += seconds.get("wait", 0.0)
    worker.communicating += seconds.get("reduce", 0.0) + seconds.get("pull", 0.0) + seconds.get("update", 0.0)
    worker.minibatches += sums.minibatches
    worker.samples += sums.samples


def merge(folder: Path, world_size: int, say: Callable[[str], None] | None = None) -> Summary:
    """Merges a run's streams by time into `events.jsonl`, and writes `summary.json`.

    If a file cannot be written, the streams stay; `say` gets one sentence, by default printed.
    """
    streams = sorted((folder / "streams").glob("*.jsonl"))
    with contextlib.suppress(OSError):  # which is said when the events are written
        streams += _waits(folder)
    summariser = Summariser(world_size)
    places = Places()
    for path in streams:
        reader = Reader(path)
        for block in reader.all(_BLOCK):
            for event, (begin, end) in zip(block, reader.places, strict=True):
                summariser.add(event)
                places.starts.append(event.start)
                places.offsets.append(begin)
                places.sizes.append(end - begin)
        places.counts.append(len(places.starts))
    summary = summariser.result()
    partial = folder / ".events.jsonl"
    try:
        write_ordered(partial, streams, places)
        partial.replace(folder / "events.jsonl")
        write_private(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        for path in streams:
            path.unlink()
        if streams:
            (folder / "streams").rmdir()
    except OSError as error:
        (say or _print)(unrecorded(folder, error))
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return summary


def _waits(folder: Path) -> list[Path]:
    """A file with the waits for operations of process groups, if those were observed."""
    try:
        first = next(events.read(folder / "streams" / "0.jsonl"))
    except (OSError, msgspec.DecodeError, StopIteration):
        return []
    if not isinstance(first, events.Join) or first.strategy != events.OBSERVED:
        return []
    path, follower, encoder = folder / ".operations.jsonl", EventFollower(folder), msgspec.json.Encoder()
    with open_private(path, "wb") as file:
        for block, _ in follower.read_evenly():
            found = [event for event in block if isinstance(event, events.Wait | events.Reduce)]
            write_all(file, encoder.encode_lines(found))
    return [path]


def _print(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr, flush=True)
