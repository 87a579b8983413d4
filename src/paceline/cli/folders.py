"""The folder of a run: its own for as long as it goes on, whatever other runs are called."""

from __future__ import annotations

import datetime
import fcntl
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from paceline.errors import UsageError

_LONGEST = 200
"""Bytes of a name; file systems allow 255, and a number may be added."""


def check_name(name: str) -> str:
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise UsageError(f"--name is '{name}'; it may have letters, digits and . _ + - only")
    if len(name.encode()) > _LONGEST:
        raise UsageError(f"--name has {len(name.encode())} bytes; it may have {_LONGEST}")
    return name


class RunFolder:
    """A run's folder under `runs/`, which other launchers leave alone until this process ends."""

    def __init__(self, script: Path, name: str | None) -> None:
        """Makes the folder. An earlier one of the same name is renamed; of a run that goes on, this one is."""
        wanted = check_name(name) if name else f"{script.stem[:100]}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        runs = Path("runs")
        runs.mkdir(exist_ok=True)
        # Made and locked before it has its name: a folder of this name is whole, and somebody's.
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=runs))
        try:
            self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            _lock(self._lock)
            (made / "output").mkdir(mode=0o700)
            self.path = self._rename(made, runs / wanted, replaces=name is not None)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

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
            if replaces and _rename_earlier(folder):
                continue
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")


def _rename_earlier(folder: Path) -> bool:
    """Renames the folder of a run that is over; False if it goes on."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # another launcher was faster
        return True
    try:
        if not _lock(descriptor):
            return False
        number = 1
        while (old := folder.with_name(f"{folder.name}~{number}")).exists():
            number += 1
        folder.rename(old)
        print(f"paceline: the earlier {folder} is now {old}", file=sys.stderr)
    finally:
        os.close(descriptor)
    return True


def _lock(descriptor: int) -> bool:
    """Locks a folder until the descriptor is closed, at the latest by the end of the process; False if it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
