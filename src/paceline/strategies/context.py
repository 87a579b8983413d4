"""What a trainer is made with: the options of `team.setup`, and the run that it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.config import Launch, Strategy, one_of
from paceline.config.example_inputs import ExampleInputs
from paceline.events.recorder import Recorder
from paceline.events.stopwatch import Stopwatch
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.meta_model import MetaModel


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of `team.setup`."""

    gradients: str = "local"
    """The content of `.grad` after the backward pass: "local", this worker's gradient; "visible", the team's mean."""
    scale_lr: str | None = None
    warmup: int = 0
    """In updates."""
    batch: float | None = None
    """Samples of the global batch, relative to the loader's own; None without a loader that has a batch size."""
    loss: Callable[..., Any] | None = None
    """The script's loss function."""
    loaders: Sequence[DataLoader[Any]] = ()
    """The loaders that the model is trained with, before they are shared out."""
    example_inputs: ExampleInputs | None = None
    """Inputs that the model can be run on."""
    meta: MetaModel | None = None
    """The model as one without values, if each worker shall get those of its own parts only."""


def check_rate(options: Options, workers: int) -> RateScaling:
    """Checks the options of a synchronous trainer; returns how its learning rate is scaled."""
    one_of("gradients", options.gradients, ("local", "visible"))
    return RateScaling(options.scale_lr, workers, options.warmup, options.batch)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerContext:
    """The run that a trainer belongs to."""

    members: Members
    strategy: Strategy
    launch: Launch
    folder: Path | None
    """The run's folder."""
    recorder: Recorder
    stopwatch: Stopwatch
    device: torch.device
    say: Callable[[str], None]
    """Prints a line, on the lead only."""
    version: int = 0
    """Updates that the parameters have had in a run that this one goes on from."""
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The values of the policy in that run, if it is the same."""
