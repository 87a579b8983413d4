"""Programs that start at once: forks of this process, which has imported what takes most of their time."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from multiprocessing import process as multiprocessing_process
from multiprocessing import resource_tracker
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
import torch.export
import typer
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import paceline.cli
import paceline.cli.live
import paceline.cli.run
import paceline.server.main
import paceline.server.process
import paceline.strategies.all_reduce
import paceline.strategies.parameter_server
import paceline.team
from helpers.hosts import Host
from helpers.support import PACELINE, PYTHON, TORCHRUN, Outcome, Run, environment, shared_files


def _assembled_once(assemble: Callable[[str | None], Callable[..., Any]]) -> Callable[[str | None], Callable[..., Any]]:
    """Lets forks have what typer makes of the options of `paceline run`: half of a launcher's CPU time."""
    command: Any = typer.main.get_command(assemble("run"))  # type: ignore[arg-type]
    command.make_context(PACELINE, ["run"])
    command.commands["run"].make_context("run", ["train.py"])  # it makes of each option what it needs when it is used
    return lambda asked: command if asked == "run" else assemble(asked)


_main = sys.modules["paceline.cli.main"]  # not the function of that name
_assemble = _assembled_once(_main.assemble)
metadata.version = functools.cache(metadata.version)
metadata.version("torch")  # parses a long file

_Popen = subprocess.Popen
_SERVER = str(paceline.server.main.__file__)
_HIGH = 512
"""File descriptors from here on are in nobody's way."""


class Fork:
    """Runs a Python program, or torchrun, in a fork of this process, which has imported torch already.

    Anything else as `subprocess.Popen` does.

    A run of four workers and a server spends most of its time importing torch; here it starts at once. What runs is
    the real command line, with real processes, signals and pipes.
    """

    def __new__(cls, args: Sequence[str], **options: Any) -> Any:
        return super().__new__(cls) if _ours(_plain(args)) else _Popen(args, **options)

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        words = _plain(args)
        self.args = words
        self.returncode: int | None = None
        pipes = {name: os.pipe() for name in ("stdout", "stderr") if options.get(name) == subprocess.PIPE}
        streams = {1: options.get("stdout"), 2: options.get("stderr")}
        streams = {
            number: one if one is None or isinstance(one, int) else one.fileno() for number, one in streams.items()
        }
        streams |= {1 if name == "stdout" else 2: ends[1] for name, ends in pipes.items()}
        if streams[2] == subprocess.STDOUT:
            streams[2] = streams[1]
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = _program(list(words), options, streams)
            finally:
                os._exit(code)
        self.stdout: Any = None
        self.stderr: Any = None
        for name, (ours, theirs) in pipes.items():
            os.close(theirs)
            setattr(self, name, os.fdopen(ours, "rb", buffering=0))

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def communicate(self, _input: None = None, timeout: float | None = None) -> tuple[bytes | None, bytes | None]:
        """All that it says, and its end."""
        with ThreadPoolExecutor(2) as readers:
            said = [None if one is None else readers.submit(one.readall) for one in (self.stdout, self.stderr)]
            self.wait(timeout)
            out, err = (None if one is None else one.result() for one in said)
        return out, err

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _plain(words: Sequence[Any]) -> list[str]:
    """Without what makes no difference here."""
    return [str(word) for place, word in enumerate(words) if not (place == 1 and word == "-u" and words[0] == PYTHON)]


def _ours(words: list[str]) -> bool:
    """Whether a fork can do it."""
    ours = words[0] == PYTHON and (words[1].endswith(".py") or words[1:3] == ["-m", "paceline"])
    return ours or words[0] in (PACELINE, TORCHRUN)


class _ServerFork(Fork):
    """Forks parameter servers; starts anything else as `subprocess.Popen` does."""

    def __new__(cls, args: Sequence[str], **options: Any) -> Any:
        if any(str(word) == _SERVER for word in args):
            return super().__new__(cls, args, **options)
        return _Popen(args, **options)


def fork_programs() -> None:
    """Lets this process, itself a fork, be `paceline`, and start Python programs as forks."""
    subprocess.Popen = Fork  # type: ignore[misc,assignment]
    _main.assemble = _assemble  # type: ignore[attr-defined]


def fork_servers() -> None:
    """Lets this process, itself a fork, start parameter servers as forks; relays are known by their command line."""
    subprocess.Popen = _ServerFork  # type: ignore[misc,assignment]


def _program(words: list[str], options: dict[str, Any], streams: dict[int, int | None]) -> int:
    """What a fork does instead of what it was forked from."""
    gc.freeze()  # or every collection would touch, and so copy, all that was imported before
    if options.get("host") is not None:
        options["host"].enter()
    if options.get("start_new_session"):
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in streams.items():
        if source is not None:
            os.dup2(nothing if source == subprocess.DEVNULL else source, target)
    descriptors = options.get("descriptors", {})
    moved = {number: fcntl.fcntl(one, fcntl.F_DUPFD, _HIGH) for number, one in descriptors.items()}
    for number, one in moved.items():
        os.dup2(one, number)
    kept = {0, 1, 2, *options.get("pass_fds", ()), *descriptors, *_MARKS}
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with contextlib.suppress(OSError):  # replaced, not closed: objects of before may still close that number
                os.dup2(nothing, int(path.name))
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    atexit._clear()
    multiprocessing_process._children.clear()  # type: ignore[attr-defined]
    # Its number may be one of the program's own files now; the program starts a tracker when it needs one.
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    atexit.register(multiprocessing_util._exit_function)  # type: ignore[attr-defined]
    if options.get("env") is not None:
        variables = dict(options["env"])
        os.environ.clear()
        os.environ.update(variables)
    os.chdir(options.get("cwd") or ".")
    torch.set_num_threads(1)
    os.execve = _replace  # type: ignore[assignment]
    code: Any = 0
    try:
        _run_replaced(words)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)


class _Replaced(BaseException):
    """This program is to be replaced by another one, in the same process."""


def _replace(_path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    raise _Replaced(list(words), dict(environment))


def _run_replaced(words: list[str]) -> None:
    """Run a program, or the one by which it is replaced, as by `os.execve`."""
    try:
        _run(_plain(words))
    except _Replaced as replaced:
        words, environment = replaced.args
    else:
        return
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _run_replaced(words)


def _run(words: list[str]) -> None:
    if words[0] == TORCHRUN:
        sys.argv = words
        subprocess_handler.Popen = Fork  # type: ignore[attr-defined,assignment]
        torchrun.main()
    elif words[0] == PACELINE or words[1:3] == ["-m", "paceline"]:
        sys.argv = words if words[0] == PACELINE else [PACELINE, *words[3:]]
        fork_programs()
        paceline.cli.main()
    else:
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")


_MARKS: set[int] = set()
"""Descriptors that all processes of a run keep open, by which they are known."""


class QuickRun(Run):
    """`paceline run` that starts at once."""

    def __init__(
        self, command: Sequence[str], cwd: Path, stderr: int | None = None, host: Host | None = None, **extra: str
    ) -> None:
        self.cwd = cwd
        self.notes = Path(tempfile.mkdtemp(prefix="notes-", dir=cwd))
        self.shared_before = shared_files()
        self._out, self._err = self.notes / "stdout", self.notes / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err, (self.notes / "mark").open("wb") as mark:
            _MARKS.add(mark.fileno())
            variables = environment(RUN_NOTES=str(self.notes), **extra)
            streams = {"stdout": out.fileno(), "stderr": err.fileno() if stderr is None else stderr}
            self.process = Fork(command, cwd=cwd, env=variables, host=host, **streams)  # type: ignore[assignment]
            _MARKS.clear()

    def processes(self) -> list[int]:
        mark, found = str(self.notes / "mark"), []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(OSError):
                    if any(os.readlink(link) == mark for link in (path / "fd").iterdir()):  # noqa: PTH115
                        found.append(int(path.name))
        return found


@contextlib.contextmanager
def starting(words: Sequence[str | Path], cwd: Path, **extra: Any) -> Iterator[QuickRun]:
    """Start a program at once: `paceline`, or `python` with a script. Nothing of it is left afterwards."""
    run = QuickRun([str(word) for word in words], cwd, **extra)
    try:
        yield run
    finally:
        run.clear()


def playing(words: Sequence[str | Path], cwd: Path, **extra: Any) -> contextlib.AbstractContextManager[QuickRun]:
    """`paceline run` with these words."""
    return starting([PACELINE, "run", *words], cwd, **extra)


def done(words: Sequence[str | Path], cwd: Path, seconds: float = 60.0, **extra: str) -> Outcome:
    """A program that starts at once, at its end."""
    with starting(words, cwd, **extra) as run:
        return run.finish(seconds)


def played(command: Sequence[str | Path], cwd: Path, seconds: float = 60.0, **extra: str) -> Outcome:
    with playing(command, cwd, **extra) as run:
        return run.finish(seconds)
