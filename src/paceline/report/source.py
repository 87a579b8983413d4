"""Reads a run for a report, from its folder or from a file of events."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.events.reader import Reader
from paceline.report.aggregate import RunAggregate
from paceline.report.facts import facts

_LATE = 1.5
"""The most seconds by which an event is out of order in its file."""
_PIECE = 2 << 20
"""Bytes that are read from one file before the next has its turn."""


class RunSource:
    """A run that is read at once with `read`, or while it goes on with `follow`."""

    def __init__(self, path: Path, limit: int = 100_000) -> None:
        """limit: single intervals to keep for the zoomed timeline."""
        self.folder = path if path.is_dir() else path.parent
        self._streams = self.folder / "streams"
        self.name = self.folder.resolve().name if path.is_dir() else path.name
        self._only = None if path.is_dir() else path
        if not path.exists():
            raise UsageError(f"there is no run at {path}; give a folder of a run, such as runs/NAME")
        if path.is_dir() and not self.files and not (path / "config.json").exists():
            raise UsageError(f"{path} is not the folder of a run: it has neither events.jsonl nor streams/")
        self.run = RunAggregate(limit)
        self._readers: dict[Path, Reader] = {}
        self._reached: defaultdict[Path, float] = defaultdict(lambda: -math.inf)
        """The time up to which each file is read."""
        self.share = 1.0
        """The share of the recorded bytes that is read."""

    @property
    def files(self) -> list[Path]:
        if self._only is not None:
            return [self._only]
        merged = self.folder / "events.jsonl"
        return [merged] if merged.exists() and not self.going else sorted(self._streams.glob("*.jsonl"))

    @property
    def going(self) -> bool:
        """True if events are still written, or the run was killed before they were merged."""
        return self._only is None and self._streams.is_dir()

    def read(self) -> None:
        """Reads all recorded events."""
        ordered = not self.going
        for path in self.files:
            reader = self._readers[path] = Reader(path)
            for events in reader.all():
                self.run.feed(events)
                if ordered and events:
                    self.run.advance(events[-1].start)
        self.run.advance()

    def follow(self, seconds: float = math.inf) -> None:
        """Reads new events of all streams evenly, for at most `seconds`."""
        until = time.monotonic() + seconds
        going = self.going
        if going or not self._readers:
            for path in self.files:
                self._readers.setdefault(path, Reader(path))
        behind = {path: reader for path, reader in self._readers.items() if going or not reader.finished}
        while behind and time.monotonic() < until:
            path = min(behind, key=self._reached.__getitem__)
            reader = behind[path]
            try:
                events = reader.read(_PIECE)
            except FileNotFoundError:
                del self._readers[path], behind[path]  # it was merged before it was first read
                continue
            if events:
                self._reached[path] = max(self._reached[path], events[-1].start)
                self.run.feed(events)
            if reader.at_end:
                del behind[path]
                if not going:
                    reader.finish()
            if behind:
                self.run.advance(min(self._reached[path] for path in behind) - _LATE)
        self.share = min((min(0.99, reader.share) for reader in behind.values()), default=1.0)
        if not behind:
            self.run.advance(time.perf_counter() - _LATE if going else math.inf)

    @property
    def notes(self) -> list[str]:
        """A sentence per file that could not be read completely."""
        return [reader.damage for reader in self._readers.values() if reader.damage]

    def config(self) -> dict[str, Any]:
        try:
            known = msgspec.json.decode((self.folder / "config.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        return known if isinstance(known, dict) else {}

    def facts(self, *, name: str | None = None, pictures: bool = True, **more: Any) -> dict[str, Any]:
        return facts(
            self.run, name=name or self.name, config=self.config(), notes=self.notes, pictures=pictures, **more
        )


def open_run(path: Path, limit: int = 100_000) -> RunSource:
    """A run with all its events read; an error if there are none."""
    source = RunSource(path, limit)
    source.read()
    if not source.run.tallies:
        raise UsageError(source.notes[0] if source.notes else f"{path} has no events: nothing was recorded")
    return source
