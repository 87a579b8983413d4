"""The engine of a process that torchrun has started: replaces it by the script. torchrun supervises it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from paceline.cluster.engines.base import Engine, EngineCallbacks
from paceline.cluster.servers import BOOTSTRAP
from paceline.config import Launch, Place


class TorchrunEngine(Engine):
    """Runs the script in place of a worker that torchrun has started."""

    NAME = "torchrun"
    DECIDES = ("workers", "on", "restarts", "live", "all_output", "quiet")
    DECIDES_REASON = (
        "torchrun has started this worker, and decides how many there are, where, what is shown of them and what is "
        "started again (--nproc-per-node, --max-restarts)"
    )

    @classmethod
    def detected(cls) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ

    @classmethod
    def world_size(cls, workers: int) -> int:
        return Place.from_environment().world_size

    def run(self, launch: Launch, callbacks: EngineCallbacks) -> NoReturn:
        """Replace this program by the script, unbuffered and with the same process id, as torchrun would start it."""
        os.execve(
            sys.executable,
            [sys.executable, "-u", str(BOOTSTRAP), "0", "", str(self.job.script), *self.job.arguments],
            {**os.environ, **self.job.environment, **launch.to_environment()},
        )
