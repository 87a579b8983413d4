"""The trainer of a mesh or a tensor split, by the policy between its replicas and the machines that they are on."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from paceline.config import AllReduce, Mesh, Strategy, between_replicas, parse_strategy, replicas_by_machine
from paceline.errors import UsageError
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.base import Trainer
from paceline.strategies.context import Options, TrainerContext

_SHARDS = (2, 13)
"""The first version of torch whose FSDP2 can be removed from a model again."""


def is_whole(strategy: Strategy) -> bool:
    """True if its replicas are whole, with all-reduce between them, so that it is sharded over machines."""
    if not isinstance(strategy, Mesh) or strategy.pipeline * strategy.tensor > 1:
        return False
    return isinstance(parse_strategy(strategy.sync), AllReduce)


def mesh(model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> Trainer:
    assert isinstance(context.strategy, Mesh)
    several = len(context.members.machines) > 1
    if several and is_whole(context.strategy):
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SHARDS:
            raise UsageError(
                f"'{context.strategy}' over machines needs torch {_SHARDS[0]}.{_SHARDS[1]} or newer, and this is "
                f"{torch.__version__}; use all-reduce"
            )
        from paceline.strategies.fully_sharded import FullyShardedTrainer  # with much of torch that few need

        return FullyShardedTrainer(model, optimizer, options, context)
    if replicas_by_machine(context.strategy, context.members.machines) is None:
        return _spread(model, optimizer, options, context)
    if is_whole(context.strategy):
        return AllReduceTrainer(model, optimizer, options, context)
    if isinstance(parse_strategy(context.strategy.sync), AllReduce):
        from paceline.strategies.mesh import MeshTrainer

        return MeshTrainer(model, optimizer, options, context)
    from paceline.strategies.mesh_server import MeshServerTrainer

    return MeshServerTrainer(model, optimizer, options, context)


def tensor(model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> Trainer:
    if len(context.members.machines) > 1:
        return _spread(model, optimizer, options, context)
    from paceline.strategies.mesh import MeshTrainer

    return MeshTrainer(model, optimizer, options, context)


def _spread(model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> Trainer:
    """The trainer of replicas that are each on several machines."""
    between, replicas = between_replicas(context.strategy, 1)
    if replicas > 1 and not isinstance(between, AllReduce):
        from paceline.strategies.spread_server import SpreadServerTrainer

        return SpreadServerTrainer(model, optimizer, options, context)
    if isinstance(context.strategy, Mesh) and context.strategy.tensor == 1:
        from paceline.strategies.pipeline import PipelineTrainer

        return PipelineTrainer(model, optimizer, options, context)
    from paceline.strategies.spread import SpreadTrainer

    return SpreadTrainer(model, optimizer, options, context)
