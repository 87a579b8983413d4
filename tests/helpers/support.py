"""What the tests of whole runs share: starting one, reading what its scripts noted, and seeing what it left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.load import allowed

PYTHON = sys.executable
PACELINE = str(Path(sys.executable).with_name("paceline"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

_NOTES = "RUN_NOTES"
"""Names the folder of a run's notes. All processes of the run inherit it, so it also tells them from all others."""
_PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PREAMBLE = """
import json, os, pathlib, signal, sys, time

def note(name, **facts):
    folder = pathlib.Path(os.environ["RUN_NOTES"])
    partial = folder / f"{name}.{os.getpid()}.partial"
    partial.write_text(json.dumps({"at": time.monotonic(), "pid": os.getpid(), **facts}))
    partial.rename(folder / f"{name}.json")
"""
"""Lets a script leave word for its test; the steady clock is the same in all processes of a machine."""

DRILL = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

{fault}

team = paceline.join({join})
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(4096, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
came = time.monotonic()
try:
    for number, (x, y) in enumerate(loader):
        mse_loss(model(x), y).backward()
        if number == 5:
            fault(team.rank)
        came = time.monotonic()
        optimizer.step()
        optimizer.zero_grad()
except paceline.TeamError as error:
    note(
        f"caught-{team.rank}",
        kind=type(error).__name__,
        message=str(error),
        ranks=error.ranks,
        waited=time.monotonic() - came,
    )
    raise
"""
)
"""A training script in which `fault(rank)` is called on every rank between the sixth backward pass and its update."""


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def drill(folder: Path, fault: str, join: str = "") -> Path:
    """A script that trains until its fault strikes; `fault` is the source of a function of the rank."""
    return write_script(folder, DRILL.replace("{fault}", fault).replace("{join}", join), "drill.py")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str
    ended: float
    """When, on the steady clock."""
    run: Run

    @property
    def tracebacks(self) -> int:
        return self.err.count("Traceback (most recent call last)")


class Run:
    """A command that was started, with everything that it starts in turn."""

    def __init__(self, command: Sequence[str], cwd: Path, stderr: int | None = None, **extra: str) -> None:
        self.cwd = cwd
        self.notes = Path(tempfile.mkdtemp(prefix="notes-", dir=cwd))
        self.shared_before = shared_files()
        # Files, not pipes: whoever outlives the command would hold a pipe open.
        self._out, self._err = self.notes / "stdout", self.notes / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment(**{_NOTES: str(self.notes)}, **extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
            )

    def note(self, name: str, seconds: float = 60.0) -> dict[str, Any]:
        """What a script noted under this name, as soon as it has."""
        path = self.notes / f"{name}.json"
        wait_until(lambda: path.exists() or self.ended, seconds, f"the note '{name}'")
        assert path.exists(), f"the run ended without the note '{name}':\n{self._err.read_text()}"
        return dict(json.loads(path.read_bytes()))

    def noted(self, name: str) -> bool:
        return (self.notes / f"{name}.json").exists()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def finish(self, seconds: float = 60.0) -> Outcome:
        wait_until(lambda: self.ended, seconds, "the command to end")
        code, ended = self.process.wait(), time.monotonic()
        return Outcome(code, self._out.read_text(), self._err.read_text(), ended, self)

    def processes(self) -> list[int]:
        """Who lives of this run: the command, and all that descend from it, whoever their parent is by now."""
        mark = f"{_NOTES}={self.notes}".encode()
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
        return found

    def summary(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.cwd / "runs" / name / "summary.json").read_bytes()))

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.cwd / "runs" / name / "events.jsonl").read_bytes().splitlines()
        return [json.loads(line) for line in lines]

    def clear(self) -> None:
        """End by their ids whichever processes of this run still live."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def started(command: Sequence[str | Path], cwd: Path, **extra: Any) -> Iterator[Run]:
    """Start a command; whatever the test finds out, nothing of it is left afterwards."""
    run = Run([str(word) for word in command], cwd, **extra)
    try:
        yield run
    finally:
        run.clear()


def finished(command: Sequence[str | Path], cwd: Path, seconds: float = 60.0, **extra: Any) -> Outcome:
    """Run a command to its end."""
    with started(command, cwd, **extra) as run:
        return run.finish(seconds)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher may have put there."""
    kept = {key: value for key, value in os.environ.items() if key not in _PLACES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Waits for a condition, longer where the machine is busy; returns how long it took."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < seconds or waited < allowed(seconds), f"waited {waited:g} s in vain for {what}"
        time.sleep(0.02)
    return time.monotonic() - start


def answered(end: Connection, seconds: float) -> bool:
    """True if something has come through a pipe within these seconds, or longer where the machine is busy."""
    return end.poll(seconds) or end.poll(max(0.0, allowed(seconds) - seconds))


def state_of(pid: int) -> str:
    """The letter that the kernel gives a process: R, S, T (stopped), …; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_behind(before: set[str]) -> set[str]:
    """What is new in /dev/shm and in nobody's hands: other programs keep files there, too, and use them."""
    new = shared_files() - before
    return new - _in_use() if new else new


def _in_use() -> set[str]:
    """Of the files in /dev/shm, those that a living process has mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r" /dev/shm/(\S+)$", (process / "maps").read_text(), re.MULTILINE))
            found |= {name.removeprefix("/dev/shm/") for name in map(os.readlink, (process / "fd").iterdir())}
    return found


@contextlib.contextmanager
def stderr() -> Iterator[Callable[[], str]]:
    """A function that returns what this process and its children have written to stderr inside the block."""
    with tempfile.TemporaryFile("w+", buffering=1) as file, contextlib.redirect_stderr(file):
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        found = ""

        def read() -> str:
            return found

        try:
            yield read
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            found = file.read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def can_listen(port: int) -> bool:
    """Whether a new server could take this port, as servers do it."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()
        except OSError:
            return False
        return True
