"""Processes of one machine: starts them, reads their output line by line, collects their exit reports, and ends them.

Plain Python that imports nothing else of the package: the Ray engine sends it to nodes that have not imported it yet.

A spare is a process that has imported what takes long, and waits for the script that it is to run: one that replaces a
process which was killed begins at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PATIENCE = 1.5
"""Seconds between SIGTERM and SIGKILL."""
_IMPORTS = ("paceline.team.team", "paceline.server.process", "paceline.strategies.parameter_server")
"""Modules that a spare imports; the worker's strategy and a server import few others."""


class ProcessEnd(NamedTuple):
    """A process that has ended."""

    rank: int
    code: int
    exit_report: bytes | None
    """Written by its bootstrap if its script failed."""
    host: str = ""
    """The machine, if the process was lost with it."""


@dataclasses.dataclass(slots=True)
class _Pipe:
    """A process's stdout or stderr, and the beginning of a line that is not complete yet."""

    rank: int
    name: str
    partial: bytes = b""


@dataclasses.dataclass(slots=True)
class _Spare:
    """A process that waits at its end of a connection for the script that it is to run."""

    process: subprocess.Popen[bytes]
    ours: socket.socket


class ProcessSet:
    """Processes by rank. All of it belongs to one thread: a process dies with the thread that started it."""

    def __init__(self, bootstrap: Path, exit_reports: Path, output: Callable[[int, str, bytes], None]) -> None:
        """Takes the path of bootstrap.py, a folder for exit reports, and a function that gets each line of output."""
        self._bootstrap, self._exit_reports, self._output = bootstrap, exit_reports, output
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._spare: _Spare | None = None
        self._selector = selectors.DefaultSelector()

    def spawn(
        self,
        rank: int,
        script: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int] = (),
    ) -> None:
        """Start a script as the process of this rank, in the spare if there is one; it inherits these descriptors."""
        report = self._exit_report_of(rank)
        report.unlink(missing_ok=True)
        words = [str(report), str(script), *arguments]
        process = self._use_spare(words, environment, inherited)
        if process is None:
            process = self._popen(words, environment, inherited)
        self._processes[rank] = process
        assert process.stdout is not None and process.stderr is not None
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream.fileno(), selectors.EVENT_READ, _Pipe(rank, name))
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start a spare, unless there is one; environment: variables that matter while it imports."""
        if self._spare is None:
            ours, theirs = socket.socketpair()
            with theirs:
                process = self._popen(["", f"--spare={theirs.fileno()}", *_IMPORTS], environment, [theirs.fileno()])
            self._spare = _Spare(process, ours)

    def _popen(
        self, words: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(self._bootstrap), str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others in order
        )

    def _use_spare(
        self, words: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Let the spare run this; None if there is none, or it has ended."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        order = json.dumps({"words": words, "environment": dict(environment), "descriptors": list(inherited)}).encode()
        try:
            with spare.ours as ours:
                socket.send_fds(ours, [len(order).to_bytes(8, "big")], list(inherited))
                ours.sendall(order)
        except OSError:
            _end(spare.process)
            return None
        return spare.process

    def listen(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call `callback` in `poll` when this descriptor is ready to read."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def unlisten(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def poll(self, seconds: float) -> list[ProcessEnd]:
        """Wait up to `seconds` for output and ends, and handle them; returns the processes that have ended."""
        ends = []
        for key, _ in self._selector.select(seconds):
            if key.fd not in self._selector.get_map():
                continue  # its process was reaped a moment ago
            if isinstance(key.data, _Pipe):
                self._pump(key.data, key.fd)
            elif isinstance(key.data, int):
                ends.append(self._reap(key.data, key.fd))
            else:
                key.data()
        return ends

    @property
    def ranks(self) -> set[int]:
        """Of the processes that run."""
        return set(self._processes)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to the processes of these ranks, or to all, and to those that they have started."""
        for rank, process in self._processes.items():
            if process.poll() is None and (ranks is None or rank in ranks):
                # Its whole session, so that the loader processes that it started end with it.
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it has none yet
                    process.send_signal(number)

    def preempt(self, ranks: Collection[int] | None = None) -> None:
        """Tell these workers, or all, to leave. Processes that they have started end with them, and get no signal."""
        for rank, process in self._processes.items():
            if rank >= 0 and (ranks is None or rank in ranks) and process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End all that still run: SIGTERM, then SIGKILL."""
        if self._spare is not None:
            self._spare.ours.close()
            _end(self._spare.process)
            self._spare = None
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
        """Pass on the lines that a process has written; False once there is nothing more to read."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(descriptor)
            self._flush(pipe)
            return False
        *lines, pipe.partial = (pipe.partial + data).split(b"\n")
        for line in lines:
            self._output(pipe.rank, pipe.name, line)
        return True

    def _flush(self, pipe: _Pipe) -> None:
        """Pass on a last line that has no newline."""
        if pipe.partial:
            self._output(pipe.rank, pipe.name, pipe.partial)
            pipe.partial = b""

    def _reap(self, rank: int, descriptor: int) -> ProcessEnd:
        """Collect the output and the exit report of a process that has ended."""
        process = self._processes.pop(rank)
        # Processes that it started end with it. Its id is not reused yet: it has not been waited for.
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
                self._flush(key.data)
                if key.fd in self._selector.get_map():  # a process that it started still holds the other end
                    self._selector.unregister(key.fd)
        _close(process)
        path = self._exit_report_of(rank)
        return ProcessEnd(rank, code, path.read_bytes() if path.exists() else None)

    def _exit_report_of(self, rank: int) -> Path:
        return self._exit_reports / f"{rank}.json"


def _end(spare: subprocess.Popen[bytes]) -> None:
    spare.kill()
    spare.wait()
    _close(spare)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def machine() -> str:
    """A name that is equal in two processes exactly if they see each other in /proc and share a network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "/".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))])
