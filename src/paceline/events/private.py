"""Files and folders of a run: only its user can read them, and the training does not depend on them."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import IO


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can enter, unless it is there."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Opens a file for writing, without a buffer; a new one can be read by this user only."""
    return open(path, mode, buffering=0, opener=_open)


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that is complete or not there, nor is a part of it."""
    partial = path.with_name(f".{path.name}")
    try:
        with open_private(partial, "wb") as file:
            write_all(file, data)
        partial.replace(path)
    except BaseException:  # a full disk, an interrupt
        partial.unlink(missing_ok=True)
        raise


def write_all(file: IO[bytes], data: bytes | bytearray | memoryview) -> None:
    """Writes all of it: a disk that is nearly full takes a part, and refuses the rest at the next call."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def unrecorded(folder: Path, error: OSError) -> str:
    """One sentence about a run whose files cannot be written; the same in all of its processes."""
    return f"recording of {folder.name} stops: {error.strerror or error}; the training goes on without it"


def rename_earlier(folder: Path) -> bool:
    """Renames the folder of a run that is over; False if it goes on."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # another launcher was faster
        return True
    try:
        if not lock_folder(descriptor):
            return False
        number = 1
        while (old := folder.with_name(f"{folder.name}~{number}")).exists():
            number += 1
        folder.rename(old)
        print(f"paceline: the earlier {folder} is now {old}", file=sys.stderr)
    finally:
        os.close(descriptor)
    return True


def lock_folder(descriptor: int) -> bool:
    """Locks a folder until the descriptor is closed, at the latest by the end of the process; False if it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
