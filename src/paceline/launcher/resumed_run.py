"""A run that another one goes on from: its options and its snapshots."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.events.private import make_private

_SNAPSHOTS = "snapshots"
_OPTIONS = (
    "workers",
    "strategy",
    "servers",
    "correct",
    "compress",
    "elastic",
    "restarts",
    "slow",
    "seed",
    "timeout",
    "grace",
    "record_limit",
)
"""Options of a run that one which goes on from it has, too, unless others are given."""


def name_of(run: str) -> str:
    """The name that a run has which goes on from this one."""
    return re.sub(r"~\d+$", "", Path(run).name)


class ResumedRun:
    """A run that has ended, with snapshots."""

    def __init__(self, run: str) -> None:
        """run: its name, or the path of its folder."""
        folder = Path("runs") / run if (Path("runs") / run).is_dir() else Path(run)
        if not folder.is_dir():
            raise UsageError(f"there is no run '{run}': neither runs/{run} nor {run} is a folder")
        self.folder = folder.absolute()
        self.name = name_of(self.folder.name)
        """That a run which goes on from it has."""
        self._config: dict[str, Any] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        # Open, since the folder gets another name when a run of its name is made.
        try:
            self._snapshots = os.open(folder / _SNAPSHOTS, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self._snapshots = -1
        if not any(name.endswith(".pt") for name in self._names()):
            raise UsageError(
                f"{folder} has no snapshot to go on from; a named run writes one every 30 s, and others with --snapshot"
            )
        self._check_over(folder)

    def _names(self) -> list[str]:
        if self._snapshots < 0:
            return []
        with os.scandir(self._snapshots) as entries:
            return [entry.name for entry in entries if entry.name[:1].isdecimal()]

    def _check_over(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"the run {folder} goes on; stop it before another one goes on from it") from None
        except OSError:
            pass  # a file system without locks
        finally:
            os.close(descriptor)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the run, as `RunOptions` has them."""
        return {name: self._config[name] for name in _OPTIONS if self._config.get(name) is not None}

    def script(self, given: Path | None, arguments: list[str] | None) -> tuple[Path, list[str]]:
        """The script and its arguments, by default those of the run."""
        if given is not None and not given.is_file() and given.suffix != ".py":
            given, arguments = None, [str(given), *(arguments or [])]  # `--resume RUN -- ARGS`
        if given is not None:
            return given, arguments or []
        known = self._config.get("script")
        if known is None:
            raise UsageError(f"{self.folder} does not say which script it has run; name it: --resume RUN SCRIPT")
        return Path(known), self._config.get("arguments", []) if arguments is None else arguments

    def hand_over(self, folder: Path) -> None:
        """Gives a new run the snapshots, so that it has them even if it ends before it has written one of its own."""
        target = folder / _SNAPSHOTS
        make_private(target)
        with os.scandir(self._snapshots) as entries:
            unfinished = [entry.name for entry in entries if entry.name.startswith(".")]
        for name in unfinished:
            os.unlink(name, dir_fd=self._snapshots)
        for name in self._names():
            try:
                os.link(name, target / name, src_dir_fd=self._snapshots)
            except OSError:  # another file system, or one without links
                found = os.open(name, os.O_RDONLY, dir_fd=self._snapshots)
                with os.fdopen(found, "rb") as source, (target / name).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        os.close(self._snapshots)
        self._snapshots = -1
