"""Values of a run in MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.events.scalars import Values
from paceline.loggers.base import Logger

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""Metrics and parameters that MLflow takes at once."""
_LONGEST = 500
"""Characters of a parameter's value."""
_FOREIGN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in names."""


class MlflowLogger(Logger):
    """A run of MLflow with the name of this one, where `MLFLOW_TRACKING_URI` says, or where MLflow itself puts it."""

    NAME, MODULE, PACKAGE = "mlflow", "mlflow", "mlflow"

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._parameter = Metric, Param
        self._client: Any = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run: str = self._client.create_run(experiment, run_name=folder.name).info.run_id

    def configure(self, config: dict[str, Any]) -> None:
        known = [self._parameter(_key(name), str(value)[:_LONGEST]) for name, value in config.items()]
        for first in range(0, len(known), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=known[first : first + _MOST_PARAMETERS])

    def log(self, values: Sequence[Values]) -> None:
        metrics = [
            self._metric(_key(name), value, int(wall * 1000), version)
            for version, wall, scalars in values
            for name, value in scalars.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _key(name: str) -> str:
    return _FOREIGN.sub("_", name)
