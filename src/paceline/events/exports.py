"""Exports events to Chrome's trace format (Perfetto) and CSV. The names are stable."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from paceline.events import ACTIVITIES, Compute, Event, Metric, Pass, Push, Update

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters by which a spreadsheet takes a cell for a formula."""


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Writes Chrome's trace format: a track per worker and server, counters of each worker's metrics.

    An arrow leads from the gradient of a push to the update that used it.
    """
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(encode({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "paceline"}}))
        for record in _trace(events):
            file.write(b",\n" + encode(record))
        file.write(b"\n]}\n")


def _trace(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    arrows = _Arrows()
    for event in events:
        yield from arrows.add(event)
        track = event.rank if event.rank >= 0 else 1000 - event.rank
        moment = event.start * 1e6
        if track not in seen:
            seen.add(track)
            name = (
                f"worker {event.rank}" if event.rank >= 0 else "server" if event.rank == -1 else f"server {-event.rank}"
            )
            yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
            yield {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": track, "args": {"sort_index": track}}
        kind = ACTIVITIES.get(type(event))
        if kind is not None:
            values = msgspec.structs.asdict(event)
            seconds = values.pop("seconds")
            arguments = {
                key: value for key, value in values.items() if key not in ("rank", "start") and value is not None
            }
            yield {
                "name": kind,
                "cat": type(event).__name__.lower(),
                "ph": "X",
                "pid": 1,
                "tid": track,
                "ts": moment,
                "dur": seconds * 1e6,
                "args": arguments,
            }
        elif isinstance(event, Push):
            words = {"staleness": event.staleness, "outcome": event.outcome, "reason": event.reason}
            yield {"name": "push", "ph": "i", "s": "t", "pid": 1, "tid": 1001, "ts": moment, "args": words}
        elif isinstance(event, Metric):
            for name, value in event.values.items():
                if value is not None:
                    # A counter is known by its name alone, whatever its track.
                    of = f"{name}, worker {event.rank}"
                    yield {"name": of, "ph": "C", "pid": 1, "tid": track, "ts": moment, "args": {name: value}}


class _Arrows:
    """Arrows from gradients to updates; both ends lie inside of slices, or a viewer would not draw them."""

    def __init__(self) -> None:
        self._computed: dict[int, Compute | Pass] = {}
        """The last gradient of each worker."""
        self._pushed: dict[int, Compute | Pass] = {}
        """By ticket: the gradient of a push that no update has used so far."""

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """The arrows that this event completes."""
        match event:
            case Compute() | Pass():
                self._computed[event.rank] = event
            case Push() if event.rank in self._computed:
                self._pushed[event.ticket] = self._computed[event.rank]
            case Update(rank=-1):
                for ticket in event.pushes:
                    if ticket in self._pushed:
                        arrow = {"name": "push", "cat": "push", "pid": 1, "id": ticket}
                        gradient = self._pushed.pop(ticket)
                        left = gradient.start + 0.999 * gradient.seconds
                        yield {**arrow, "ph": "s", "tid": gradient.rank, "ts": left * 1e6}
                        arrived = event.start + 0.5 * event.seconds
                        yield {**arrow, "ph": "f", "bp": "e", "tid": 1001, "ts": arrived * 1e6}


def write_csv(folder: Path, events: Iterable[Event]) -> list[Path]:
    """Writes a file per kind of event, with its fields as columns; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[type, tuple[IO[str], Any, tuple[str, ...]]] = {}
    paths = []
    try:
        for event in events:
            kind = type(event)
            if kind not in files:
                path = folder / f"{kind.__name__.lower()}.csv"
                file = path.open("w", newline="", encoding="utf-8")
                fields = ("rank", "start", "version", "name", "value") if kind is Metric else kind.__struct_fields__
                files[kind] = file, csv.writer(file), fields
                files[kind][1].writerow(fields)
                paths.append(path)
            _, writer, fields = files[kind]
            if isinstance(event, Metric):
                for name, value in event.values.items():
                    writer.writerow([event.rank, event.start, event.version, _cell(name), value])
            else:
                writer.writerow([_cell(getattr(event, field)) for field in fields])
    finally:
        for opened, _, _ in files.values():
            opened.close()
    return paths


def _cell(value: object) -> object:
    """A value as a spreadsheet shows it; a text that it would compute as a formula begins with an apostrophe."""
    if isinstance(value, dict | msgspec.Struct) or (isinstance(value, list) and value and isinstance(value[0], tuple)):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list):
        value = " ".join(str(item) for item in value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
