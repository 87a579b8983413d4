"""Checks the arguments of `team.setup`, and chooses the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.config import Launch, Mesh, Pipeline, Strategy, Tensor, between_replicas, one_of
from paceline.data.loader import check_loader
from paceline.errors import UsageError
from paceline.policies import Policy
from paceline.strategies import PROFILING, SINGLE, Make, load, trainer_of
from paceline.strategies.base import check
from paceline.strategies.mesh_factory import is_whole


def check_setup(
    strategy: Strategy,
    model: torch.nn.Module,
    optimizer: Optimizer,
    loaders: Sequence[DataLoader[Any]],
    loss: Any,
    on_nan: str,
    sync_batch_norm: bool,
) -> None:
    """Refuses what cannot be trained, or not so, before anything is changed."""
    check(model, optimizer)
    for loader in loaders:
        check_loader(loader)
    if loss is not None and not callable(loss):
        raise UsageError(f"loss is a {type(loss).__name__}; it must be a function of the output and the targets")
    one_of("on_nan", on_nan, ("raise", "skip", "ignore"))
    if sync_batch_norm and isinstance(between_replicas(strategy, 1)[0], Policy):
        raise UsageError(
            f"sync_batch_norm needs all workers in every step, which '{strategy}' does not promise; use all-reduce"
        )
    if sync_batch_norm and isinstance(strategy, Mesh) and strategy.pipeline > 1:
        raise UsageError(
            "sync_batch_norm cannot be had with pipelines, whose stages are not at the same layer at the same time; "
            "use mesh with tensor instead"
        )


def choose_trainer(strategy: Strategy, launch: Launch, members: Members) -> Make:
    """The trainer of a strategy, for these workers."""
    if launch.profiling is not None:
        return load(PROFILING)
    elastic = launch.elastic or launch.joins is not None
    if members.size == 1 and not (elastic and isinstance(strategy, Policy)):
        return load(SINGLE)
    if isinstance(strategy, Pipeline | Tensor | Mesh):
        _check_one_machine(strategy, members, elastic)
    return trainer_of(type(strategy), elastic=elastic)


def _check_one_machine(strategy: Strategy, members: Members, elastic: bool) -> None:
    """Refuses a split model over machines or in an elastic run; whole replicas can be sharded over machines."""
    if elastic:
        raise UsageError(f"'{strategy}' cannot go on without a worker; --elastic is for whole models")
    if len(members.machines) > 1 and not is_whole(strategy):
        raise UsageError(
            f"'{strategy}' is for workers of one machine, and these are on several; over machines use "
            f"mesh:data={members.size}, which shards the model over all of them, all-reduce or a parameter server"
        )
