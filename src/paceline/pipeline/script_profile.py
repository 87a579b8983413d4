"""Profiles the model of a training script, which runs until its first training call of the model and ends there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from paceline.config import Launch, Profiling
from paceline.errors import UsageError
from paceline.graph.model_profile import ModelProfile, model_profile
from paceline.graph.trace import trace

_TIMEOUT = 600.0
"""Seconds within which a script must have called its model."""


def profile_script(script: Path, arguments: Sequence[str], microbatches: int, norm: str = "batch") -> ModelProfile:
    """The profile of a script's model; the script runs in a process of its own, where `write_profile` is called."""
    if not script.is_file():
        raise UsageError(f"there is no script at {script}")
    with tempfile.TemporaryDirectory(prefix="paceline-partition-") as folder:
        path = Path(folder) / "profile.json"
        launch = Launch(record=False, profiling=Profiling(path=str(path), microbatches=microbatches, norm=norm))
        try:
            ended = subprocess.run(
                [sys.executable, str(script), *arguments],
                # One thread, as every worker of a run has.
                env={"OMP_NUM_THREADS": "1", **os.environ, **launch.to_environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"the script did not call its model within {_TIMEOUT:g} s") from None
        if not path.exists():
            lines = ended.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "it ended without an error message"
            raise UsageError(f"the script did not get as far as to call its model after team.setup: {why}")
        answer = path.read_bytes()
    error = msgspec.json.decode(answer).get("error")
    if error:
        raise UsageError(error)
    return msgspec.json.decode(answer, type=ModelProfile)


def write_profile(profiling: Profiling, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes the model's profile, or the reason why it has none, to the file that `profile_script` reads."""
    try:
        traced = trace(model, args, kwargs, parts=2)
        answer: Any = model_profile(traced, model, args, kwargs, profiling.microbatches, profiling.norm)
    except UsageError as error:
        answer = {"error": str(error)}
    Path(profiling.path).write_bytes(msgspec.json.encode(answer))
