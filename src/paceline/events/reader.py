"""Reads events in blocks, also while they are being written, and counts unreadable lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from paceline.errors import UsageError
from paceline.events import Event

_BLOCK = 8 << 20
"""Bytes read at once."""
_NEWLINE = ord("\n")


class Reader:
    """Reads a file of events, each time from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Lines read so far, readable or not."""
        self.unreadable = 0
        self.first_unreadable = 0
        """The number of the first such line."""
        self.finished = False
        self.at_end = False
        """True if the last read reached the end of the file."""
        self.places: list[tuple[int, int]] = []
        """Start and end offsets of the last events' lines."""
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._rest = b""
        """The start of a line whose end is not written yet."""
        self._decoder = msgspec.json.Decoder(Event)

    def read(self, size: int | None = None) -> list[Event]:
        """The next events, from at most `size` bytes, or a block."""
        size = size or _BLOCK
        if self._file is None:
            self._file = self.path.open("rb", buffering=0)  # kept open: it can be read to its end even when removed
        data = self._file.read(size)
        self.at_end = len(data) < size
        begin = self._offset - len(self._rest)
        self._offset += len(data)
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        return self._decode(data[:end], begin)

    def all(self, block: int | None = None) -> Iterator[list[Event]]:
        """All events, from so many bytes at a time; an incomplete last line counts as unreadable."""
        try:
            size = self.path.stat().st_size
            while self._offset < size:
                yield self.read(block)
        finally:
            self.close()
        self.finish()

    @property
    def share(self) -> float:
        """The share of the file that is read."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return 1.0
        return min(1.0, self._offset / size) if size else 1.0

    def finish(self) -> None:
        """Closes the file; an incomplete last line counts as unreadable."""
        self.close()
        self.finished = True
        if self._rest:
            self._refuse()
            self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def damage(self) -> str | None:
        """One sentence about unreadable lines; None if there are none."""
        if not self.unreadable:
            return None
        if self.unreadable == self.lines:
            return f"{self.path} has no event that Paceline knows; is it the events file of a run?"
        noun = "line" if self.unreadable == 1 else "lines"
        return (
            f"{self.unreadable:,} {noun} of {self.path} could not be read, the first of them line "
            f"{self.first_unreadable:,}; everything else is shown"
        )

    def _decode(self, data: bytes, begin: int) -> list[Event]:
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        places = list(zip((begin + starts).tolist(), (begin + ends).tolist(), strict=True))
        events: list[Event]
        try:
            events = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            events = []
        if len(events) == len(places):
            self.places = places
            self.lines += len(events)
            return events
        events, self.places = [], []
        for first, last in places:
            try:
                events.append(self._decoder.decode(data[first - begin : last - begin]))
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._refuse()
            else:
                self.places.append((first, last))
                self.lines += 1
        return events

    def _refuse(self) -> None:
        self.lines += 1
        self.unreadable += 1
        self.first_unreadable = self.first_unreadable or self.lines


def read_run(path: Path) -> Iterator[list[Event]]:
    """The events of a run's folder or of one file, block by block; the events of one process are in order."""
    if not path.exists():
        raise UsageError(f"there is no run at {path}; give a folder of a run, such as runs/NAME")
    files = [path]
    if path.is_dir():
        merged = path / "events.jsonl"
        files = [merged] if merged.exists() else sorted((path / "streams").glob("*.jsonl"))
        if not files:
            raise UsageError(f"{path} is not the folder of a run: it has neither events.jsonl nor streams/")
    for file in files:
        yield from Reader(file).all()
