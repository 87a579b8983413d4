"""Requests of `paceline scale` to the launcher of a run for another number of workers."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

import msgspec

from paceline.errors import JoinError, TeamError, UsageError
from paceline.events.private import write_private
from paceline.transport.unix_connection import Closed, connect

_NAME = "launcher"
_PATIENCE = 10.0


class ScaleRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for this number of workers."""

    workers: int


class ScaleReply(msgspec.Struct, frozen=True, tag=True):
    """What the launcher does, or why it refuses."""

    sentence: str
    refused: bool


def announce(folder: Path, address: str) -> None:
    """Write the address of a run's launcher into the run's folder."""
    write_private(folder / _NAME, address.encode("ascii"))


def withdraw(folder: Path) -> None:
    (folder / _NAME).unlink(missing_ok=True)


def ask(folder: Path, workers: int) -> str:
    """Ask a run's launcher for this number of workers; returns its answer."""
    path = folder / _NAME
    if not folder.is_dir():
        raise UsageError(f"there is no run at {folder}")
    if (owner := folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"the run at {folder} belongs to {_user(owner)}, who alone can scale it")
    if not path.exists():
        raise UsageError(f"{folder} is not a run that goes on; only one that `paceline run` started here can be scaled")
    try:
        with contextlib.closing(connect(path.read_text(encoding="ascii"), ScaleReply, 0.0)) as connection:
            connection.send(ScaleRequest(workers))
            answer = connection.receive_within(_PATIENCE)
    except (JoinError, Closed):
        raise TeamError(f"the launcher of {folder} has ended") from None
    if answer is None:
        raise TeamError(f"the launcher of {folder} did not answer in {_PATIENCE:g} s")
    if answer.refused:
        raise UsageError(answer.sentence)
    return str(answer.sentence)


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user with the number {number}"
