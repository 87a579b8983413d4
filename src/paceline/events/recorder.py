"""Records one process's events to a file, cheaply enough to be always on."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from paceline.events import Event
from paceline.events.private import make_private, open_private, unrecorded, write_all
from paceline.events.thinning import Thinner, level

_INTERVAL = 0.5
"""Seconds between writes, by which a reader of the file can lag."""


class Recorder:
    """Collects events in memory and appends them to `streams/<rank>.jsonl` of a run's folder twice a second."""

    def __init__(self, folder: Path | None, rank: int | str, limit: int | None = None) -> None:
        """limit: bytes of all streams of the folder, above which only a part of the events is recorded; None: none."""
        self._pending: list[Event] = []
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._next = time.perf_counter() + _INTERVAL
        self._folder, self._limit = folder, limit
        self.thinner = Thinner(time.perf_counter())
        self._file: IO[bytes] | None = None
        self.on_flush: Callable[[int], None] = lambda _size: None
        """Called with the size of the file when all events so far are in it."""
        self.before_flush: Callable[[], None] = lambda: None
        """Called before events are written: adds those whose making was put off until then, when it costs less."""
        if folder is not None:
            try:
                self._open(folder / "streams" / f"{rank}.jsonl")
            except OSError as error:
                self._stop(error)
            self._look()

    def _open(self, path: Path) -> None:
        make_private(path.parent.parent)
        make_private(path.parent)
        self._file = open_private(path, "a+b")
        end = self._file.seek(0, os.SEEK_END)
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            # An earlier process of this rank was killed while it wrote.
            write_all(self._file, b"\n")

    def _stop(self, error: OSError) -> None:
        """Records nothing any more, since the file cannot be written; says so."""
        self._pending.clear()
        self._close()
        if self._folder is not None:
            print(f"paceline: {unrecorded(self._folder, error)}", file=sys.stderr, flush=True)

    @property
    def on(self) -> bool:
        """True if events are recorded."""
        return self._file is not None

    def add(self, event: Event) -> None:
        if self._file is None:
            return
        if self.thinner.level:
            self._pending += self.thinner.add(event)
        else:
            self._pending.append(event)
        if event.start > self._next:
            self.flush()

    def poll(self, now: float) -> None:
        """Writes all events if it is time to."""
        if now > self._next:
            self.flush()

    def flush(self) -> None:
        if self._file is None:
            return
        self._next = math.inf
        self.before_flush()
        self._write()
        self._next = time.perf_counter() + _INTERVAL
        self._look()

    def _write(self) -> None:
        if self._file is None or not self._pending:
            return
        self._pending += self.thinner.settle()
        encode_into, buffer, line = self._encoder.encode_into, self._buffer, bytearray()
        buffer.clear()
        for event in self._pending:
            encode_into(event, line)
            buffer += line
            buffer += b"\n"
        try:
            write_all(self._file, buffer)
        except OSError as error:
            self._stop(error)
        self._pending.clear()
        if self._file is not None:
            self.on_flush(os.fstat(self._file.fileno()).st_size)

    def _look(self) -> None:
        """Records less where the streams of the run come close to their limit."""
        if self._limit is None or self._folder is None:
            return
        with contextlib.suppress(OSError):  # the folder is gone; the next write says so
            self.thinner.level = max(self.thinner.level, level(self._folder / "streams", self._limit))

    def detach(self) -> None:
        """Forgets all events, in a fork of the process that records them."""
        self._pending.clear()
        self._close()

    def close(self) -> None:
        self._next = math.inf
        self.before_flush()
        self._pending += self.thinner.settle()
        self._write()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class ReplicaRecorder(Recorder):
    """Of a server or relay whose workers are replicas of several: a replica's events get its first worker's rank."""

    def __init__(self, folder: Path | None, rank: int | str, each: int, limit: int | None = None) -> None:
        super().__init__(folder, rank, limit)
        self._each = each

    def add(self, event: Event) -> None:
        super().add(msgspec.structs.replace(event, rank=event.rank * self._each) if event.rank > 0 else event)


def folder_of(folder: Path, machine: int) -> Path:
    """The folder in which a machine's processes record.

    On other machines than rank 0's it is separate even on shared storage, since their clocks differ.
    """
    return folder if machine == 0 else folder / f"machine-{machine}"


def limit_of(limit: int | None, machine: int, machines: int) -> int | None:
    """The limit of the streams on one machine; those of others are forwarded to the first, so they have a part each."""
    return limit if limit is None or machine == 0 else limit // machines
