"""Exports events to Chrome's trace format (Perfetto), CSV and TensorBoard. The names are stable."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from paceline.errors import UsageError
from paceline.events import ACTIVITIES, Compute, Event, Join, Metric, Push

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters by which a spreadsheet takes a cell for a formula."""


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Writes Chrome's trace format: a track per worker and server, an arrow per push, a counter per metric."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(encode({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "paceline"}}))
        for record in _trace(events):
            file.write(b",\n" + encode(record))
        file.write(b"\n]}\n")


def _trace(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for event in events:
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
            arguments = {key: value for key, value in values.items() if key not in ("rank", "start")}
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
            arrow = {"name": "push", "cat": "push", "pid": 1, "id": event.ticket}
            yield {**arrow, "ph": "s", "tid": track, "ts": moment - 1}
            yield {**arrow, "ph": "f", "bp": "e", "tid": 1001, "ts": moment}
            words = {"staleness": event.staleness, "outcome": event.outcome, "reason": event.reason}
            yield {"name": "push", "ph": "i", "s": "t", "pid": 1, "tid": 1001, "ts": moment, "args": words}
        elif isinstance(event, Metric):
            for name, value in event.values.items():
                if value is not None:
                    yield {"name": name, "ph": "C", "pid": 1, "tid": track, "ts": moment, "args": {name: value}}


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
    if isinstance(value, list):
        value = " ".join(str(item) for item in value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write_tensorboard(folder: Path, events: Iterable[Event]) -> None:
    """Writes reported metrics and each worker's pace and staleness as TensorBoard scalars."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    writer: Any = SummaryWriter(str(folder))
    wall = 0.0
    with writer:
        for event in events:
            version, scalars = 0, dict[str, float | None]()
            match event:
                case Join():
                    wall = event.wall - event.start
                case Metric() if event.rank == 0:
                    version, scalars = event.version, event.values
                case Compute():
                    pace = event.seconds / max(1, event.minibatches)
                    version, scalars = event.version, {f"seconds_per_minibatch/worker_{event.rank}": pace}
                case Push():
                    version, scalars = event.version, {f"staleness/worker_{event.rank}": event.staleness}
            for name, value in scalars.items():
                shown = float("nan") if value is None else value
                writer.add_scalar(name, shown, version, wall + event.start)
