"""How a team trains one model. Each strategy is one file and one line here."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from paceline.config import AllReduce, Mesh, Pipeline, Strategy, Tensor
from paceline.policies import POLICIES
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.base import Options, Surroundings, Trainer
from paceline.strategies.choosing import mesh
from paceline.strategies.mesh import MeshTrainer
from paceline.strategies.parameter_server import ParameterServerTrainer
from paceline.strategies.pipeline import PipelineTrainer

Make = Callable[[torch.nn.Module, Optimizer, Options, Surroundings], Trainer]
TRAINERS: dict[type[Strategy], Make] = {
    AllReduce: AllReduceTrainer,
    Mesh: mesh,
    Pipeline: PipelineTrainer,
    Tensor: MeshTrainer,
    **dict.fromkeys(POLICIES, ParameterServerTrainer),
}

__all__ = ["TRAINERS", "Make", "Options", "Surroundings", "Trainer"]
