"""Which trainer a mesh has, by what is between its replicas."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from paceline.config import AllReduce, Mesh, parse_strategy
from paceline.strategies.base import Options, Surroundings, Trainer
from paceline.strategies.mesh import MeshTrainer
from paceline.strategies.mesh_server import MeshServerTrainer


def mesh(model: torch.nn.Module, optimizer: Optimizer, options: Options, around: Surroundings) -> Trainer:
    assert isinstance(around.strategy, Mesh)
    by_all_reduce = isinstance(parse_strategy(around.strategy.sync), AllReduce)
    return (MeshTrainer if by_all_reduce else MeshServerTrainer)(model, optimizer, options, around)
