"""`paceline key`: a new secret for a run over machines."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paceline.transport.keys import VARIABLE, new_key


def key(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Print a new key for a run over several machines.

    Set it in the environment of every worker, on every machine. Without it a process can neither read nor push.

    Example: `export PACELINE_KEY=$(paceline key)`
    """
    value = new_key()
    print(json.dumps({"key": value, "variable": VARIABLE}) if as_json else value)
