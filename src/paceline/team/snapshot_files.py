"""The snapshots of a run, as files in its folder: the last few, each complete and with a checksum."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.team.checkpoints import partial_name, read, write

KEPT = 2
"""Snapshots that are kept: the newest, and one more in case that it is damaged."""
SECTION = "paceline.snapshot"
"""The entry of a checkpoint with all that a team needs to go on, beside model and optimizer."""


def folder_of(run: Path) -> Path:
    return run / "snapshots"


def path_of(run: Path, version: int) -> Path:
    return folder_of(run) / f"{version:08d}.pt"


def snapshots_in(run: Path) -> list[Path]:
    """The snapshots of a run, the newest first."""
    return sorted(folder_of(run).glob("[0-9]*.pt"), key=lambda path: path.name, reverse=True)


class SnapshotFiles:
    """The snapshots that one process writes."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._spare = partial_name(folder_of(run) / "spare")
        """An old snapshot, to be overwritten by the next."""

    def write(self, content: dict[str, Any], version: int) -> None:
        """Writes a snapshot, and removes all but the last few."""
        spare = self._spare if self._spare.is_file() else None
        write(path_of(self._run, version), content, private=True, sums=True, over=spare)
        for old in snapshots_in(self._run)[KEPT:]:
            with contextlib.suppress(OSError):
                if old.stat().st_nlink > 1 or self._spare.exists():  # it is a snapshot of another run, too
                    old.unlink()
                else:
                    old.rename(self._spare)

    def close(self) -> None:
        """Leaves nothing but the snapshots."""
        with contextlib.suppress(OSError):
            self._spare.unlink(missing_ok=True)


def read_newest(run: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest snapshot of a run that is not damaged, and a sentence about each that is."""
    damaged: list[str] = []
    for path in snapshots_in(run):
        try:
            content = read(path)
        except UsageError as error:
            damaged.append(str(error))
            continue
        if SECTION in content:
            return path, content, damaged
        damaged.append(f"{path} is no snapshot")
    why = f": {'; '.join(damaged)}" if damaged else ""
    raise UsageError(f"{run} has no snapshot to go on from{why}; snapshots are written with --snapshot 30s")
