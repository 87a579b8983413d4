"""Traces of other programs among the runs that a command is given."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.events.foreign.traces import is_foreign, read_foreign, write_foreign

_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the command ends."""


class GivenRun(NamedTuple):
    """A run of Paceline's, or one whose events were read from traces."""

    path: Path
    """Where its events are."""
    place: Path | None = None
    """For traces: the folder that they are in."""
    name: str | None = None


def given_runs(paths: Sequence[Path], mapping: Path | None = None) -> list[GivenRun]:
    """The runs of a command's arguments; files of traces are the ranks of one run, a folder of them is a run."""
    found = []
    if mapping is not None and not any(map(is_foreign, paths)):
        raise UsageError("--mapping is for traces of other programs, and none is given")
    for foreign, group in itertools.groupby(paths, key=lambda path: is_foreign(path) and (not path.is_dir() or path)):
        members = list(group)
        if not foreign:
            found += [GivenRun(path) for path in members]
            continue
        run = read_foreign(members, mapping)
        for note in run.notes:
            print(f"paceline: {note}", file=sys.stderr)
        _folders.append(tempfile.TemporaryDirectory(prefix="paceline-trace-", ignore_cleanup_errors=True))
        place = members[0] if members[0].is_dir() else members[0].parent
        found.append(GivenRun(write_foreign(run, Path(_folders[-1].name) / run.name), place, run.name))
    return found
