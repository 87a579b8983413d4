"""The folder of a run: its own for as long as it goes on, whatever other runs are called."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from paceline.errors import UsageError
from paceline.events.private import lock_folder, rename_earlier

_LONGEST = 200
"""Bytes of a name; file systems allow 255, and a number may be added."""


def check_name(name: str) -> str:
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise UsageError(f"--name is '{name}'; it may have letters, digits and . _ + - only")
    if len(name.encode()) > _LONGEST:
        raise UsageError(f"--name has {len(name.encode())} bytes; it may have {_LONGEST}")
    return name


class RunFolder:
    """A run's folder under `runs/`, which other runs leave alone until `close`, or the end of this process."""

    def __init__(self, default: str, name: str | None) -> None:
        """Makes the folder. An earlier one of the same name is renamed; of a run that goes on, this one is.

        default: the beginning of the name of a run that has none, before the time.
        """
        wanted = check_name(name) if name else f"{default[:100]}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        runs = Path("runs")
        runs.mkdir(exist_ok=True)
        # Made and locked before it has its name: a folder of this name is whole, and somebody's.
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=runs))
        self._lock: int | None = None
        try:
            self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            lock_folder(self._lock)
            (made / "output").mkdir(mode=0o700)
            self.path = self._rename(made, runs / wanted, replaces=name is not None)
        except BaseException:
            self.close()
            shutil.rmtree(made, ignore_errors=True)
            raise

    def close(self) -> None:
        """The run is over: a later one of the same name may rename this folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _rename(self, made: Path, folder: Path, *, replaces: bool) -> Path:
        """Gives the folder its name, or the next one that is free.

        replaces: True if an earlier run of the name is to be renamed.
        """
        wanted, number = folder, 1
        while True:
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
            else:
                if replaces and folder != wanted:
                    print(f"paceline: {wanted} is of a run that goes on; this one is {folder}", file=sys.stderr)
                return folder
            if replaces and rename_earlier(folder):
                continue
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")


def make_folder(default: str, name: str | None, *, needed_by: str = "") -> RunFolder | None:
    """The folder of a run; None if it cannot be made, which is said.

    needed_by: the engine that cannot do without it.
    """
    try:
        return RunFolder(default, name)
    except OSError as error:
        why = f"runs/ cannot be written: {error.strerror or error}"
        if needed_by:
            raise UsageError(f"{why}; a run on {needed_by} needs its folder") from None
        print(f"paceline: {why}; the run is not recorded", file=sys.stderr)
        return None
