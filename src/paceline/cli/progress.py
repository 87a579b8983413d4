"""Display of a run while it goes on: the workers' output, and a progress line."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.events import Compute, Event, Leave, Metric, Pass, Update, decode
from paceline.events.private import open_private, unrecorded, write_all

_TAIL = 48 * 1024
"""Bytes at the end of a worker's stream from which its current pace is computed."""
_PLAIN_INTERVAL = 10.0
"""Seconds between progress lines where there is no terminal to rewrite one on."""
_REFRESH = 0.5
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
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._logs: dict[int, IO[bytes]] | None = {}
        """Files of the processes' output; None if there are none, or if one could not be written."""
        self._shown: set[bytes] = set()
        self._next = time.monotonic() + _PLAIN_INTERVAL
        """When the progress line is due."""

    def __enter__(self) -> Progress:
        for rank in range(self._workers):
            with self.recording():
                if (path := self.output_of(rank)) is not None:
                    open_private(path, "wb").close()
        if not self._quiet and self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._next = time.monotonic() + _REFRESH
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._close_logs()

    def _close_logs(self) -> None:
        logs, self._logs = self._logs or {}, None
        for log in logs.values():
            log.close()

    def output_of(self, rank: int) -> Path | None:
        """The file of a process's output; None if there is none."""
        name = str(rank) if rank >= 0 else f"server-{-1 - rank}"
        return None if self.folder is None else self.folder / "output" / f"{name}.log"

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
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
        stream.flush()
        stream.buffer.write(line + b"\n")  # type: ignore[attr-defined]
        stream.flush()

    def _ranks(self) -> list[int]:
        """Ranks of all workers that have joined so far."""
        known = [] if self.folder is None else [path.stem for path in (self.folder / "streams").glob("*.jsonl")]
        return sorted({*range(self._workers), *(int(name) for name in known if name.isdecimal())})

    # -- the line ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._next = now + (_REFRESH if self._live is not None else _PLAIN_INTERVAL)
        line = self.line()
        if line and self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis", style="dim"), refresh=True)
        elif line:
            self.note(line)

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
                elif isinstance(event, Metric) and rank == 0:
                    metrics = " · ".join(f"{name} {shown(value)}" for name, value in event.values.items())
            if rank < 0:  # the server's
                continue
            computed = [event for event in events if isinstance(event, Compute | Pass)]
            busy = sum(event.seconds for event in computed)
            done = sum(event.samples for event in computed)
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
