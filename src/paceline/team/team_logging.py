"""Loggers of a run: started by its launcher where it has one, else by the lead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.config import Launch
from paceline.errors import UsageError
from paceline.events import Setup
from paceline.loggers import parse_loggers
from paceline.loggers.process import Logging, LoggingProcess, request_logging


class TeamLogging:
    """The loggers that a worker of a team has asked for; only the first worker's are started."""

    def __init__(self, launch: Launch, folder: Path | None, loggers: str | Sequence[str], rank: int) -> None:
        """loggers: the script's, unless the command line names others."""
        self._process: LoggingProcess | None = None
        given = Logging(launch.loggers, launch.push_metrics)
        if rank or not launch.record or not (given.arguments or loggers):
            return
        wanted = given if given.arguments else Logging(parse_loggers(loggers, "loggers"))
        if folder is None:
            raise UsageError(
                "loggers read the records of a run, and this one has none; name it, as in "
                "paceline.join(name='first', loggers=…), or start it with paceline run"
            )
        if launch.folder is not None:
            request_logging(folder, wanted)
        else:
            self._process = LoggingProcess(folder, wanted)

    def start(self) -> None:
        """Start them, once events are recorded."""
        if self._process is not None:
            self._process.start()

    def stop(self) -> None:
        """Wait until they have all values, once the events are merged."""
        if self._process is not None:
            self._process.stop()


def setup_event(
    model: torch.nn.Module, optimizer: Optimizer, loaders: Sequence[DataLoader[object]], batch: int | None, size: int
) -> Setup:
    """The hyperparameters of a training; batch: the global one, if it is not the loader's; size: workers."""
    known: dict[str, float | int | bool | str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and isinstance(value, float | int | bool | str | tuple):
                shown = str(value) if isinstance(value, tuple) else value
                if number == 0 or known.get(name) != shown:
                    known[f"{name}/{number}" if number else name] = shown
    if batch is None and loaders:
        batch = loaders[0].batch_size
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Setup(0, time.perf_counter(), _name(model), trained, _name(optimizer), known, batch, size)


def _name(value: object) -> str:
    return type(value).__name__
