"""The one observer of this process, from its first process group until it ends or joins a team."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
from multiprocessing import util
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import Launch
from paceline.events import OBSERVED, Join, Leave
from paceline.events.private import lock_folder, make_private, rename_earlier, unrecorded, write_private
from paceline.events.recorder import Recorder
from paceline.events.summary import merge
from paceline.observation.operations import Operations
from paceline.observation.steps import ScriptSteps

VARIABLE = "PACELINE_RUN"
_CHOSEN = "paceline/run"
"""Where the first worker tells the others the run's folder."""

_current: Observer | None = None
_in_team = False


class Observer:
    """Records one worker of a run that has no team."""

    def __init__(self, folder: Path, rank: int, size: int, *, launched: bool) -> None:
        """launched: True if a launcher completes the folder."""
        self._folder, self._rank, self._size, self._launched = folder, rank, size, launched
        self._recorder = Recorder(folder, rank)
        where = (socket.gethostname(), "cpu", OBSERVED)
        self._recorder.add(Join(rank, time.perf_counter(), os.getpid(), *where, time.time()))
        self.steps = ScriptSteps(self._recorder, rank, size)
        self.operations = Operations(self._recorder, self.steps, rank)
        self._recorder.before_flush = self._record
        self._process = os.getpid()
        atexit.register(self.close)
        util.Finalize(None, self.close, exitpriority=0)  # where this is a process of multiprocessing

    def _record(self) -> None:
        self.steps.record()
        self.operations.settle()

    def close(self) -> None:
        """Writes the last events; the last worker to close completes the folder."""
        if os.getpid() != self._process or not self._recorder.on:
            return
        self.steps.stop()
        self.operations.settle(everything=True)
        self._recorder.add(Leave(self._rank, time.perf_counter()))
        self._recorder.close()
        if not self._launched:
            with contextlib.suppress(OSError):
                self._complete()

    def _complete(self) -> None:
        left = self._folder / f".left-{self._rank}"
        left.touch()
        if len(list(self._folder.glob(".left-*"))) < self._size:
            return
        # Only one of the workers that see all others gone renames the mark of the first.
        (self._folder / ".left-0").rename(self._folder / ".complete")
        merge(self._folder, self._size)
        for mark in (*self._folder.glob(".left-*"), self._folder / ".complete"):
            mark.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forgets all that was recorded, since the worker has a team that records its own events."""
        self.steps.stop()
        self._recorder.detach()
        with contextlib.suppress(OSError):
            (self._folder / "streams" / f"{self._rank}.jsonl").unlink()

    def detach(self) -> None:
        """Records nothing in a fork of the worker."""
        self.steps.stop()
        self._recorder.detach()


def current() -> Observer | None:
    """The observer of this process, if it is observed."""
    return _current


def wanted() -> bool:
    """True if process groups of this process are to be observed and are not yet."""
    return _current is None and not _in_team and (VARIABLE in os.environ or Launch.VARIABLE in os.environ)


def start(store: Any, rank: int, size: int, *, one_machine: bool) -> Observer | None:
    """Begins to observe this worker, unless there is nowhere to record it. All workers call it."""
    global _current
    launch = Launch.from_environment()
    text = launch.folder if launch.record else None
    launched = text is not None
    if not launched and VARIABLE in os.environ:
        if not one_machine:
            if rank == 0:
                _say(f"{VARIABLE} is for workers of one machine; this run is on several, and is not recorded")
            return None
        if rank == 0:
            store.set(_CHOSEN, _prepared(Path(os.environ[VARIABLE]), size))
        text = store.get(_CHOSEN).decode()
    if not text or (launched and not one_machine):
        return None
    _current = Observer(Path(text), rank, size, launched=launched)
    os.register_at_fork(after_in_child=_current.detach)
    return _current


def enter_team() -> None:
    """Ends the observation: from now on the team records what its worker does."""
    global _current, _in_team
    _in_team = True
    if _current is not None:
        _current.discard()
        _current = None


def _prepared(wanted: Path, size: int) -> str:
    """An empty folder of this name; an earlier one is renamed. Empty if there can be none, which is said."""
    folder, number = wanted, 1
    try:
        while folder.exists() and not rename_earlier(folder):
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        if folder != wanted:
            _say(f"{wanted} is of a run that goes on; this one is {folder}")
        make_private(folder)
        lock_folder(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))  # until this process ends
        config = {"script": sys.argv[0], "arguments": sys.argv[1:], "workers": size, "strategy": OBSERVED}
        config["cores"] = len(os.sched_getaffinity(0))
        write_private(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    except OSError as error:
        _say(unrecorded(wanted, error))
        return ""
    return str(folder.resolve())


def _say(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr, flush=True)
