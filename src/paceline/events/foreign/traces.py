"""Reads traces of the ranks of one run, puts their parts together, and gives events as a run of Paceline's would."""

from __future__ import annotations

import dataclasses
import gzip
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.events import OBSERVED, Collective, Event, Join, Peers
from paceline.events.arrivals import Arrivals
from paceline.events.foreign.mapping import Mapping
from paceline.events.foreign.profiles import Profile
from paceline.events.foreign.tables import read_table
from paceline.events.private import make_private, write_private

_TABLES = (".csv", ".parquet")
_TRACES = (".json", ".json.gz")
_APART = 1e-3
"""Seconds by which an operation may end before its last call, until clocks are called different."""


@dataclasses.dataclass
class ForeignRun:
    """The events of a run of another program."""

    events: list[Event]
    notes: list[str]
    """Sentences about what was changed or could not be read."""
    name: str


def is_foreign(path: Path) -> bool:
    """True for a trace or a table of another program, or a folder with some and without events of a run."""
    if path.is_dir():
        own = [path / "events.jsonl", path / "streams", path / "config.json"]
        return not any(one.exists() for one in own) and bool(_traces_in(path))
    return path.is_file() and path.name.endswith((*_TABLES, *_TRACES))


def _traces_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith((*_TABLES, *_TRACES)))


def read_foreign(paths: Sequence[Path], mapping: Path | None = None) -> ForeignRun:
    """The run whose ranks these traces are of; mapping: names the parts of traces that are not of torch's profiler."""
    files = [file for path in paths for file in (_traces_in(path) if path.is_dir() else [path])]
    notes: list[str] = []
    events: list[Event] = []
    ranked: dict[int, Path] = {}
    chosen = None if mapping is None else Mapping.read(mapping)
    for number, file in enumerate(files):
        if file.suffix in _TABLES:
            events += read_table(file, notes)
        elif chosen is not None:
            events += chosen.events(_json(file), number)
        else:
            profile = Profile(_json(file), number, file)
            if profile.rank in ranked:
                raise UsageError(
                    f"{ranked[profile.rank]} and {file} are both of rank {profile.rank}; give one per rank"
                )
            ranked[profile.rank] = file
            events += profile.events()
    ranks = sorted({event.rank for event in events})
    if not ranks:
        raise UsageError(f"{files[0]} has no steps that could be read; a mapping file names them (--mapping)")
    events = _aligned(events, notes)
    arrivals = Arrivals()
    channels = {event.channel for event in events if isinstance(event, Collective)}
    known = {event.channel for event in events if isinstance(event, Peers)}
    first = min(event.start for event in events)
    events = [*(Peers(ranks[0], first, channel, ranks) for channel in sorted(channels - known)), *events]
    events += arrivals.add(events)
    left = arrivals.finish()
    if left:
        notes.append(f"{len(left):,} operations are not in the traces of all their ranks; nobody is blamed for them")
    joins: list[Event] = [Join(rank, first, 0, "", "", OBSERVED, first) for rank in ranks]
    name = files[0].parent.resolve().name if len(files) > 1 else files[0].name
    return ForeignRun([*joins, *sorted(events, key=lambda event: event.start)], notes, name)


def write_foreign(run: ForeignRun, folder: Path) -> Path:
    """Writes the events to a folder, as those of a run; returns it."""
    make_private(folder)
    write_private(folder / "events.jsonl", msgspec.json.Encoder().encode_lines(run.events))
    workers = len({event.rank for event in run.events})
    write_private(folder / "config.json", msgspec.json.encode({"workers": workers, "strategy": OBSERVED}))
    return folder


def _json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no trace: it is not JSON ({error})") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise UsageError(f"{path} is no trace in Chrome's format: it has no list of traceEvents")
    return found if isinstance(found, dict) else {"traceEvents": events}


def _aligned(events: list[Event], notes: list[str]) -> list[Event]:
    """The events with the clocks of all ranks set by common operations, if those contradict each other.

    An operation of all ranks ends for each of them when the last one has called it, and not before.
    """
    parts: defaultdict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for event in events:
        if isinstance(event, Collective):
            parts[event.channel, event.number][event.rank] = event
    common = [one for one in parts.values() if len(one) > 1]
    early = [one for one in common if max(p.start for p in one.values()) - min(_end(p) for p in one.values()) > _APART]
    if len(early) <= len(common) // 10:
        return events
    shifts: dict[int, float] = {}
    reference = min(min(one) for one in common)
    for rank in {rank for one in common for rank in one} - {reference}:
        apart = [_end(one[rank]) - _end(one[reference]) for one in common if rank in one and reference in one]
        if apart:
            shifts[rank] = statistics.median(apart)
    largest = max(map(abs, shifts.values()), default=0.0)
    notes.append(f"the clocks of the ranks differ; they were set by common operations, by up to {largest * 1e3:.3g} ms")
    return [
        msgspec.structs.replace(event, start=event.start - shifts[event.rank]) if event.rank in shifts else event
        for event in events
    ]


def _end(part: Collective) -> float:
    return part.start + part.seconds
