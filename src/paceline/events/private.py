"""Files of a run: only its user can read them, and the training does not depend on them."""

from __future__ import annotations

import os
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
    except OSError:
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
