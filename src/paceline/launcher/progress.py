"""Display of a run while it goes on: the workers' output, and a progress line."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from paceline.config.units import duration
from paceline.events import Compute, Event, Leave, Metric, Omitted, Pass, Update, decode
from paceline.events.private import open_private, unrecorded, write_all
from paceline.events.summary import Summary
from paceline.launcher.line_display import LineDisplay, line_display

_TAIL = 48 * 1024
"""Bytes at the end of a worker's stream from which its current pace is computed."""
_UNRECORDED = b"paceline: recording of "
"""The start of the sentence with which any process of a run says that it cannot record."""


class Progress:
    """Shows output line by line, and the progress line below it."""

    def __init__(
        self, folder: Path | None, workers: int, *, all_output: bool, quiet: bool, apart: bool = False
    ) -> None:
        """folder: of the run, None if it has none.

        apart: the workers' stdout goes to stderr, and stdout is left free.
        """
        self.folder, self._workers = folder, workers
        self._all_output, self._quiet, self._apart = all_output, quiet, apart
        self.display = LineDisplay() if quiet else line_display(self.note)
        self._logs: dict[int, IO[bytes]] | None = {}
        """Files of the processes' output; None if there are none, or if one could not be written."""
        self._shown: set[bytes] = set()
        self._next = 0.0
        """When the progress line is due."""

    def __enter__(self) -> Progress:
        for rank in range(self._workers):
            with self.recording():
                if (path := self.output_of(rank)) is not None:
                    open_private(path, "wb").close()
        self._next = time.monotonic() + self.display.interval
        self.display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.stop()
        self._close_logs()

    def _close_logs(self) -> None:
        logs, self._logs = self._logs or {}, None
        for log in logs.values():
            log.close()

    def output_of(self, rank: int) -> Path | None:
        """The file of a process's output; None if there is none."""
        name = str(rank) if rank >= 0 else f"server-{-1 - rank}"
        return None if self.folder is None else self.folder / "output" / f"{name}.log"

    def hint(self, rank: int) -> str:
        """The end of a sentence that says where a process's output is."""
        where = self.output_of(rank)
        return "" if where is None else f"; its output is in {where}"

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Says that recording stops if the run's folder cannot be written, and goes on."""
        try:
            yield
        except OSError as error:
            self._close_logs()
            if self.folder is not None:
                self.note_once(unrecorded(self.folder, error))

    @property
    def unrecorded(self) -> bool:
        """True if recording has stopped."""
        return any(line.startswith(_UNRECORDED) for line in self._shown)

    # -- output ------------------------------------------------------------------------------------------------------

    def output(self, rank: int, stream: str, line: bytes, force: bool = False) -> None:
        """Log a line; show it if it is the lead's, or a message of Paceline that has not been shown yet."""
        self._log(rank, line + b"\n")
        if stream == "stderr" and line.startswith(b"paceline: "):
            if line not in self._shown:
                self._shown.add(line)
                self._write(sys.stderr, line)
        elif force or self._all_output or rank == 0:
            plain = stream == "stdout" and not self._apart
            self._write(sys.stdout if plain else sys.stderr, f"[{rank}] ".encode() + line)

    def _log(self, rank: int, data: bytes) -> None:
        path = self.output_of(rank)
        if self._logs is None or path is None:
            return
        with self.recording():
            if rank not in self._logs:
                self._logs[rank] = open_private(path, "ab")
            write_all(self._logs[rank], data)

    def note_once(self, sentence: str) -> None:
        """As `note`, unless this or a worker has said the same."""
        line = f"paceline: {sentence}".encode()
        if line not in self._shown:
            self._shown.add(line)
            self._write(sys.stderr, line)

    def note(self, sentence: str) -> None:
        self._write(sys.stderr, f"paceline: {sentence}".encode())

    def _write(self, stream: IO[str], line: bytes) -> None:
        self.display.hide()
        binary = getattr(stream, "buffer", None)
        if binary is None:  # a notebook's, or a StringIO
            stream.write(line.decode(errors="replace") + "\n")
            return
        stream.flush()
        binary.write(line + b"\n")
        stream.flush()

    def _ranks(self) -> list[int]:
        """Ranks of all workers that have joined so far."""
        known = [] if self.folder is None else [path.stem for path in (self.folder / "streams").glob("*.jsonl")]
        return sorted({*range(self._workers), *(int(name) for name in known if name.isdecimal())})

    def close(self, summary: Summary, *, done: bool) -> None:
        """Print the main results on one line."""
        state = "done" if done else "ended early"
        if self.folder is None or self.unrecorded:
            self.note(f"{state}; how it went is not recorded")
            return
        words = [f"{summary.updates} updates"]
        if summary.samples_per_second:
            words.append(f"{summary.samples_per_second:,.0f} samples/s")
        if summary.seconds_per_update:
            words.append(f"{duration(summary.seconds_per_update)} per update")
        words += [f"{name} {shown(value)}" for name, value in summary.last.items()]
        where = os.path.relpath(self.folder)
        self.note(f"{state}: {', '.join(words)}; see {where}/summary.json, or: paceline report {where}")

    # -- the line ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._next = now + self.display.interval
        if line := self.line():
            self.display.show(line)

    def line(self) -> str:
        """`update 120 · loss 0.312 · 5,120 samples/s · pace 0: 1,280/s 1: 320/s` from the newest events of the streams.

        Where a worker has a part of the model, and not samples of its own, the end is `busy 0: 71% 1: 64%`.
        """
        update, metrics, workers = 0, "", []
        for rank in (-1, *self._ranks()):
            events = [] if self.folder is None else _tail(self.folder / "streams" / f"{rank}.jsonl")
            if events and isinstance(events[-1], Leave):
                continue
            for event in events:
                if isinstance(event, Update):
                    update = max(update, event.version)
                elif isinstance(event, Omitted):
                    update = max([update, *(last for _, last, _ in event.updates)])
                elif isinstance(event, Metric) and rank == 0:
                    metrics = " · ".join(f"{name} {shown(value)}" for name, value in event.values.items())
            if rank < 0:  # the server's
                continue
            computed = [event for event in events if isinstance(event, Compute | Pass | Omitted)]
            busy, done = map(sum, zip(*((0.0, 0), *map(_computed, computed)), strict=True))
            span = computed[-1].start + computed[-1].seconds - computed[0].start if computed else 0.0
            workers.append((rank, done, busy, span))
        if not update:
            return ""
        samples = sum(done / span for _, done, _, span in workers if span)
        if any(busy and not done for _, done, busy, _ in workers):
            each = [f"{rank}: {busy / span:.0%}" if span else f"{rank}: –" for rank, _, busy, span in workers]
            what = "busy"
        else:
            each = [f"{rank}: {done / busy:,.0f}/s" if busy else f"{rank}: –" for rank, done, busy, _ in workers]
            what = "pace"
        parts = [f"update {update}", metrics, f"{samples:,.0f} samples/s", f"{what} {'  '.join(each)}"]
        return " · ".join(part for part in parts if part)


def _computed(event: Compute | Pass | Omitted) -> tuple[float, int]:
    """Seconds of computing, and samples."""
    if not isinstance(event, Omitted):
        return event.seconds, event.samples
    seconds = sum(sums.seconds.get(kind, 0.0) for sums in event.sums.values() for kind in ("compute", "pass"))
    return seconds, sum(sums.samples for sums in event.sums.values())


def shown(value: float | None) -> str:
    """A reported value as it is displayed."""
    return "nan" if value is None else f"{value:.4g}"


def _tail(path: Path) -> list[Event]:
    """The newest events of a stream."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:  # it is not there yet, or cannot be read
        return []
    events = []
    for line in lines[1 if size > _TAIL else 0 : -1]:
        try:
            events.append(decode(line))
        except msgspec.DecodeError:
            continue
    return events
