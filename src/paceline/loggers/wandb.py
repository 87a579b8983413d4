"""Values of a run in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.events.scalars import Values
from paceline.loggers.base import Logger


class WandbLogger(Logger):
    """A run of W&B with the name of this one; W&B's environment variables decide about all else (`WANDB_MODE`, …)."""

    NAME, MODULE, PACKAGE = "wandb", "wandb", "wandb"

    def __init__(self, folder: Path) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=os.environ.get("WANDB_DIR", str(folder)),
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )
        # Not W&B's own step, which must not fall: two values may tell of one version, or come out of order.
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def configure(self, config: dict[str, Any]) -> None:
        self._run.config.update(config)

    def log(self, values: Sequence[Values]) -> None:
        for version, _, scalars in values:
            self._run.log({"version": version, **scalars})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # only with its own process all values are in the file
