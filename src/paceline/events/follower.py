"""Reads the events of a run at once, or while the run goes on."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UsageError
from paceline.events import Event
from paceline.events.arrivals import Arrivals
from paceline.events.reader import Reader

_LATE = 1.5
"""The most seconds by which an event is out of order in its file."""
_PIECE = 2 << 20
"""Bytes that are read from one file before the next has its turn."""

Block = tuple[list[Event], float]
"""Events, and the time before which no further ones begin."""


class EventFollower:
    """The events of a run's folder, or of one file."""

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.parent
        self.name = self.folder.resolve().name if path.is_dir() else path.name
        self._streams, self._merged = self.folder / "streams", self.folder / "events.jsonl"
        self._only = None if path.is_dir() else path
        if not path.exists():
            raise UsageError(f"there is no run at {path}; give a folder of a run, such as runs/NAME")
        if path.is_dir() and not self.files and not (path / "config.json").exists():
            raise UsageError(f"{path} is not the folder of a run: it has neither events.jsonl nor streams/")
        self._readers: dict[Path, Reader] = {}
        self._reached: defaultdict[Path, float] = defaultdict(lambda: -math.inf)
        """The time up to which each file is read."""
        self.share = 1.0
        """The share of the recorded bytes that is read."""
        self._arrivals = Arrivals()
        """Of streams; in a merged file the waits for operations are events already."""

    @property
    def files(self) -> list[Path]:
        if self._only is not None:
            return [self._only]
        merged = self._merged.exists() and not self.going
        return [self._merged] if merged else sorted(self._streams.glob("*.jsonl"))

    @property
    def going(self) -> bool:
        """True if events are still written, or the run was killed before they were merged."""
        return self._only is None and self._streams.is_dir()

    @property
    def over(self) -> bool:
        """True if the run has ended, and not only not begun."""
        return self._only is not None or (not self.going and self._merged.exists())

    def read(self) -> Iterator[Block]:
        """All recorded events."""
        ordered = not self.going
        for path in self.files:
            reader = self._readers[path] = Reader(path)
            for events in reader.all():
                settled = events[-1].start if ordered and events else -math.inf
                yield events if ordered else events + self._arrivals.add(events), settled
        yield self._arrivals.finish(), math.inf

    def follow(self, seconds: float = math.inf) -> Iterator[Block]:
        """New events of all streams, evenly, for at most `seconds`."""
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
            if reader.at_end:
                del behind[path]
                if not going:
                    reader.finish()
            if going:
                events = events + self._arrivals.add(events)
            yield events, min((self._reached[path] for path in behind), default=-math.inf) - _LATE
        self.share = min((min(0.99, reader.share) for reader in behind.values()), default=1.0)
        if not behind:
            yield [], time.perf_counter() - _LATE if going else math.inf

    def read_evenly(self) -> Iterator[Block]:
        """All events that the streams have now, evenly, so that few operations wait for their other parts."""
        yield from self.follow()
        yield self._arrivals.finish(), math.inf

    @property
    def notes(self) -> list[str]:
        """A sentence per file that could not be read completely."""
        return [reader.damage for reader in self._readers.values() if reader.damage]
