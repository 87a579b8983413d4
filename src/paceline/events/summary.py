"""From the streams of a run to `events.jsonl` and `summary.json`."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from paceline.events.schema import (
    Cancel,
    Compute,
    Event,
    Join,
    Metric,
    Pull,
    Push,
    Reduce,
    Update,
    Wait,
    read,
)


class Staleness(msgspec.Struct, kw_only=True):
    mean: float = 0.0
    max: int = 0
    histogram: dict[int, int] = {}
    """How many gradients were of each staleness."""


class Worker(msgspec.Struct, kw_only=True):
    """Where one worker's time went, in seconds, and what it did."""

    computing: float = 0.0
    communicating: float = 0.0
    waiting: float = 0.0
    minibatches: int = 0
    samples: int = 0


class Summary(msgspec.Struct, kw_only=True):
    """What `summary.json` says; scripts rely on these names."""

    strategy: str | None
    """None if no worker got as far as joining."""
    world_size: int
    seconds: float
    """From the first event to the last."""
    updates: int
    minibatches: int
    cancelled: int = 0
    dropped: int = 0
    seconds_per_update: float | None
    """From the first update to the last, so that start-up is left out."""
    samples_per_second: float | None
    """In the same span."""
    staleness: Staleness
    last: dict[str, float]
    """The last value of each reported metric."""
    pushed_bytes: int = 0
    """What the gradients took that were pushed to a server."""
    saved_bytes: int = 0
    """What they would have taken more without compression."""
    workers: dict[int, Worker]


_server = Worker()
"""Servers are not counted among the workers."""


def _staleness(ages: Counter[int]) -> Staleness:
    count = sum(ages.values())
    mean = sum(age * times for age, times in ages.items()) / count if count else 0.0
    return Staleness(mean=mean, max=max(ages, default=0), histogram=dict(sorted(ages.items())))


def _remember(last: dict[str, tuple[int, float]], event: Metric) -> None:
    """The lead's word counts; another's only where the lead says nothing."""
    for name, value in event.values.items():
        if name not in last or event.rank <= last[name][0]:
            last[name] = (event.rank, value)


def summarise(events: Iterable[Event], world_size: int) -> Summary:
    workers = {rank: Worker() for rank in range(world_size)}
    updates: dict[int, float] = {}
    gradients: list[tuple[float, int]] = []
    pushes: list[Push] = []
    last: dict[str, tuple[int, float]] = {}
    minibatches = 0
    strategy: str | None = None
    cancelled = 0
    first, final = float("inf"), float("-inf")
    for event in events:
        end = event.start + getattr(event, "seconds", 0.0)
        first, final = min(first, event.start), max(final, end)
        worker = workers.setdefault(event.rank, Worker()) if event.rank >= 0 else _server
        match event:
            case Join():
                strategy = event.strategy
            case Compute():
                worker.computing += event.seconds
                worker.minibatches += event.minibatches
                worker.samples += event.samples
                minibatches += event.minibatches
                gradients.append((end, event.samples))
            case Wait():
                worker.waiting += event.seconds
            case Reduce() | Pull():
                worker.communicating += event.seconds
            case Push():
                pushes.append(event)
            case Cancel():
                cancelled += 1
            case Update():
                worker.communicating += event.seconds
                if not event.skipped:
                    updates[event.version] = max(updates.get(event.version, 0.0), end)
            case Metric():
                _remember(last, event)
    times = sorted(updates.values())
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    ages = Counter(push.staleness for push in pushes) or Counter({0: len(gradients)} if gradients else {})
    if pushes:
        gradients = [(push.start, push.samples) for push in pushes if push.outcome in ("used", "held")]
    inside = sum(samples for end, samples in gradients if times and times[0] < end <= times[-1])
    return Summary(
        strategy=strategy,
        world_size=world_size,
        seconds=max(0.0, final - first),
        updates=len(times),
        minibatches=minibatches,
        seconds_per_update=span / (len(times) - 1) if span else None,
        samples_per_second=inside / span if span else None,
        cancelled=cancelled,
        dropped=sum(push.outcome == "dropped" for push in pushes),
        pushed_bytes=sum(push.bytes for push in pushes),
        saved_bytes=sum(push.saved for push in pushes),
        staleness=_staleness(ages),
        last={name: value for name, (_, value) in last.items()},
        workers=workers,
    )


def merge(folder: Path, world_size: int) -> Summary:
    """Merge a run's streams by time into `events.jsonl`, and write `summary.json`."""
    streams = sorted((folder / "streams").glob("*.jsonl"))
    encoder = msgspec.json.Encoder()
    events: list[Event] = []
    with (folder / "events.jsonl").open("wb") as file:
        for event in heapq.merge(*(sorted(read(path), key=_start) for path in streams), key=_start):
            events.append(event)
            file.write(encoder.encode(event) + b"\n")
    summary = summarise(events, world_size)
    text = msgspec.json.format(encoder.encode(summary), indent=2)
    (folder / "summary.json").write_bytes(text + b"\n")
    for path in streams:
        path.unlink()
    if streams:
        (folder / "streams").rmdir()
    return summary


def _start(event: Event) -> float:
    return event.start
