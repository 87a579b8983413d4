"""`paceline scale`: changes the number of workers of a running run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.control import ask
from paceline.errors import UsageError


def scale(
    run: Annotated[str, typer.Argument(help="The run: its name, or its folder.", show_default=False)],
    workers: Annotated[int, typer.Argument(help="The number of workers that it is to have.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Change the number of workers of a run while it goes on.

    New workers run the script from its beginning and join the run at its current version; workers that leave first push
    the gradient that they compute. The run must have been started with `paceline run`, by the same user on the same
    machine, with a parameter server, or by all-reduce with `--elastic` and at least two workers. It has room for twice
    as many as it began with, and for at least four more.

    Example: `paceline scale first 4`
    """
    if workers < 1:
        raise UsageError(f"the number of workers is {workers}; it must be at least 1")
    folder = Path(run) if Path(run).is_dir() else Path("runs") / run
    sentence = ask(folder, workers)
    print(json.dumps({"run": folder.name, "workers": workers, "answer": sentence}) if as_json else sentence)
