"""Trainers of one model by a team. Each strategy is one file and one line here.

A worker imports the one that it trains with: all of them take longer to import than a small run to start.
"""

import importlib
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from paceline.config import AllReduce, Mesh, Pipeline, Strategy, Tensor
from paceline.policies import Policy
from paceline.strategies.base import Trainer
from paceline.strategies.context import Options, TrainerContext

Make = Callable[[torch.nn.Module, Optimizer, Options, TrainerContext], Trainer]
_TRAINERS: dict[type[Strategy], tuple[str, str]] = {
    AllReduce: ("all_reduce", "AllReduceTrainer"),
    Mesh: ("mesh_factory", "mesh"),
    Pipeline: ("pipeline", "PipelineTrainer"),
    Tensor: ("mesh_factory", "tensor"),
    Policy: ("parameter_server", "ParameterServerTrainer"),
}
_ELASTIC: dict[type[Strategy], tuple[str, str]] = {AllReduce: ("elastic", "ElasticAllReduceTrainer")}
"""Strategies with another trainer in an elastic run."""
SINGLE = ("single", "SingleTrainer")
PROFILING = ("profiling", "ProfilingTrainer")


def trainer_of(strategy: type[Strategy], *, elastic: bool = False) -> Make:
    """The factory of the trainer of a strategy."""
    known = {**_TRAINERS, **_ELASTIC} if elastic else _TRAINERS
    return load(next(known[kind] for kind in strategy.__mro__ if kind in known))


def load(trainer: tuple[str, str]) -> Make:
    """Imports a trainer."""
    module, name = trainer
    make: Make = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return make


__all__ = ["PROFILING", "SINGLE", "Make", "Options", "Trainer", "TrainerContext", "load", "trainer_of"]
