"""Records one process's events to a file, cheaply enough to be always on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from paceline.events import Event
from paceline.events.private import make_private, open_private, unrecorded, write_all

_INTERVAL = 0.5
"""Seconds between writes, by which a reader of the file can lag."""


class Recorder:
    """Collects events in memory and appends them to `streams/<rank>.jsonl` of a run's folder twice a second."""

    def __init__(self, folder: Path | None, rank: int | str) -> None:
        self._pending: list[Event] = []
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._next = time.perf_counter() + _INTERVAL
        self._folder = folder
        self._file: IO[bytes] | None = None
        self.on_flush: Callable[[int], None] = lambda _size: None
        """Called with the size of the file when all events so far are in it."""
        if folder is not None:
            try:
                self._open(folder / "streams" / f"{rank}.jsonl")
            except OSError as error:
                self._stop(error)

    def _open(self, path: Path) -> None:
        make_private(path.parent.parent)
        make_private(path.parent)
        cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = open_private(path, "ab")
        if cut_off:  # an earlier process of this rank was killed while it wrote
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
        self._pending.append(event)
        if event.start > self._next:
            self.flush()

    def flush(self) -> None:
        if self._file is None or not self._pending:
            return
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
        self._next = time.perf_counter() + _INTERVAL
        if self._file is not None:
            self.on_flush(os.fstat(self._file.fileno()).st_size)

    def detach(self) -> None:
        """Forgets all events, in a fork of the process that records them."""
        self._pending.clear()
        self._close()

    def close(self) -> None:
        self.flush()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class ReplicaRecorder(Recorder):
    """Of a server or relay whose workers are replicas of several: a replica's events get its first worker's rank."""

    def __init__(self, folder: Path | None, rank: int | str, each: int) -> None:
        super().__init__(folder, rank)
        self._each = each

    def add(self, event: Event) -> None:
        super().add(msgspec.structs.replace(event, rank=event.rank * self._each) if event.rank > 0 else event)


def folder_of(folder: Path, machine: int) -> Path:
    """The folder in which a machine's processes record.

    On other machines than rank 0's it is separate even on shared storage, since their clocks differ.
    """
    return folder if machine == 0 else folder / f"machine-{machine}"
