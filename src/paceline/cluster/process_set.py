"""Processes under one roof: starts them, reads what they say line by line, takes their last words, and ends them.

Plain Python that imports nothing of ours: the Ray engine sends it to nodes where nothing has been imported yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PATIENCE = 1.5
"""Seconds between the order to stop and the end."""


class ProcessEnd(NamedTuple):
    """A process that has ended."""

    rank: int
    code: int
    exit_report: bytes | None
    """What its bootstrap left behind, if its script failed."""


@dataclasses.dataclass(slots=True)
class _Pipe:
    """A process's stdout or stderr, and the beginning of a line that it has not finished yet."""

    rank: int
    name: str
    partial: bytes = b""


class ProcessSet:
    """Processes by rank. All of it belongs to one thread: a process dies with the thread that started it."""

    def __init__(self, exit_reports: Path, relay: Callable[[int, str, bytes], None]) -> None:
        self._exit_reports, self._relay = exit_reports, relay
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()

    def exit_report_of(self, rank: int) -> Path:
        """Where the bootstrap of this process is to leave its last words."""
        return self._exit_reports / f"{rank}.json"

    def spawn(
        self, rank: int, words: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int] = ()
    ) -> None:
        self.exit_report_of(rank).unlink(missing_ok=True)
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, who ends the others in order
        )
        self._processes[rank] = process
        assert process.stdout is not None and process.stderr is not None
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream.fileno(), selectors.EVENT_READ, _Pipe(rank, name))
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def listen(self, descriptor: int, heard: Callable[[], None]) -> None:
        """Call `heard` when there is something to read from this descriptor."""
        self._selector.register(descriptor, selectors.EVENT_READ, heard)

    def unlisten(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def turn(self, seconds: float) -> list[ProcessEnd]:
        """Relay what is said within so many seconds, or less; returns who has ended."""
        gone = []
        for key, _ in self._selector.select(seconds):
            if key.fd not in self._selector.get_map():
                continue  # its process was buried a moment ago
            if isinstance(key.data, _Pipe):
                self._pump(key.data, key.fd)
            elif isinstance(key.data, int):
                gone.append(self._bury(key.data, key.fd))
            else:
                key.data()
        return gone

    @property
    def ranks(self) -> set[int]:
        """Of those who run."""
        return set(self._processes)

    def signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                # Its whole session, so that the loader processes that it started end with it.
                os.killpg(process.pid, number)

    def stop(self) -> None:
        """End whatever still runs; asked first, then made to."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                process.wait()
        for process in self._processes.values():
            _close(process)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, int):
                os.close(key.fd)
        self._selector.close()

    def _pump(self, pipe: _Pipe, descriptor: int) -> bool:
        """Relay what a process has written; False once there is nothing more to read."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(descriptor)
            return False
        *lines, pipe.partial = (pipe.partial + data).split(b"\n")
        for line in lines:
            self._relay(pipe.rank, pipe.name, line)
        return True

    def _bury(self, rank: int, descriptor: int) -> ProcessEnd:
        """A process has ended: take its last words."""
        process = self._processes.pop(rank)
        # What it started ends with it. Nobody else can have its id yet: it has not been waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        self._selector.unregister(descriptor)
        os.close(descriptor)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            key = self._selector.get_map().get(stream.fileno())
            if key is not None:
                while self._pump(key.data, key.fd):
                    pass
                if key.data.partial:
                    self._relay(rank, key.data.name, key.data.partial)
                if key.fd in self._selector.get_map():  # a process that it started still holds the other end
                    self._selector.unregister(key.fd)
        _close(process)
        path = self.exit_report_of(rank)
        return ProcessEnd(rank, code, path.read_bytes() if path.exists() else None)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
