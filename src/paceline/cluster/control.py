"""Asking the launcher of a run that goes on for more workers, or for fewer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.errors import JoinError, TeamError, UsageError
from paceline.transport.unix_connection import Closed, connect

_NAME = "launcher"
_PATIENCE = 10.0


class Scale(msgspec.Struct, frozen=True, tag=True):
    """Let there be so many workers."""

    workers: int


class Told(msgspec.Struct, frozen=True, tag=True):
    """What the launcher does about it."""

    sentence: str
    refused: bool


def announce(folder: Path, address: str) -> None:
    """Leave word in a run's folder where its launcher listens."""
    (folder / _NAME).write_text(address, encoding="ascii")


def withdraw(folder: Path) -> None:
    (folder / _NAME).unlink(missing_ok=True)


def ask(folder: Path, workers: int) -> str:
    """Ask a run's launcher for so many workers; returns what it says."""
    path = folder / _NAME
    if not folder.is_dir():
        raise UsageError(f"there is no run at {folder}")
    if not path.exists():
        raise UsageError(f"{folder} is not a run that goes on under paceline run on this machine")
    try:
        connection = connect(path.read_text(encoding="ascii"), Told, 0.0)
    except JoinError:
        raise TeamError(f"the launcher of {folder} has ended") from None
    try:
        connection.send(Scale(workers))
        answer = connection.receive_within(_PATIENCE)
    except Closed:
        raise TeamError(f"the launcher of {folder} has ended") from None
    finally:
        connection.close()
    if answer is None:
        raise TeamError(f"the launcher of {folder} did not answer in {_PATIENCE:g} s")
    if answer.refused:
        raise UsageError(answer.sentence)
    return str(answer.sentence)
