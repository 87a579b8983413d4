"""`paceline scale`: more or fewer workers for a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.control import ask
from paceline.errors import UsageError


def scale(
    run: Annotated[str, typer.Argument(help="The run: its name, or its folder.", show_default=False)],
    workers: Annotated[int, typer.Argument(help="How many workers it shall have.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Let a run that goes on have more workers, or fewer.

    New workers run the script from its beginning and join the run where it is; workers who leave first push what they
    compute. The run must have been started with `paceline run`, by the same user on the same machine, with a parameter
    server.

    Example: `paceline scale first 4`
    """
    if workers < 1:
        raise UsageError(f"the number of workers is {workers}; it must be at least 1")
    folder = Path(run) if Path(run).is_dir() else Path("runs") / run
    sentence = ask(folder, workers)
    print(json.dumps({"run": folder.name, "workers": workers, "answer": sentence}) if as_json else sentence)
