"""Prints what changes of a recorded run would bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.cli.traces import given_runs
from paceline.config.units import duration
from paceline.errors import UsageError
from paceline.simulate.what_if import Answer, WhatIf, answer


def what_if(runs: Sequence[Path], changes: Sequence[str], mapping: Path | None, *, json: bool) -> None:
    """Answers for the one run that is given, or for the traces of its ranks."""
    found = [WhatIf.parse(text) for text in changes]
    given = given_runs(runs, mapping)
    if len(given) != 1:
        raise UsageError(f"--what-if needs one run or the traces of one: --from RUN; there are {len(given)}")
    answers = answer(given[0].path, found)
    if json:
        print(msgspec.json.format(msgspec.json.encode(answers), indent=2).decode())
    else:
        _print(answers)


def _print(answers: Sequence[Answer]) -> None:
    table = Table(box=None)
    table.add_column("what if", no_wrap=True)
    for head in ("per update", "updates/s", "waiting, mean", "most"):
        table.add_column(head, justify="right", no_wrap=True)
    first = answers[0]
    rows = [("as it was", first.now, 1.0, first.waiting_now)]
    rows += [(one.what_if, one.seconds_per_update, one.speedup, one.waiting) for one in answers]
    for name, seconds, speedup, waiting in rows:
        mean, most = sum(waiting) / len(waiting), max(waiting)
        table.add_row(name, duration(seconds), f"{speedup:.2f} ×", f"{mean:.0%}", f"{most:.0%}")
    console = Console()
    console.width = max(console.width, 60 + max(len(one.what_if) for one in answers))
    console.print(table, highlight=False)
