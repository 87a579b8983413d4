"""Checks the arguments of `team.setup`, and chooses the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.config import (
    AllReduce,
    Launch,
    Mesh,
    Pipeline,
    Strategy,
    Tensor,
    between_replicas,
    one_of,
    positive,
    replicas_by_machine,
)
from paceline.data.loader import check_loader
from paceline.data.stream.kinds import is_stream
from paceline.errors import UsageError
from paceline.parameters.joint import Models, parts_of
from paceline.parameters.meta_model import MetaModel
from paceline.policies import Policy
from paceline.strategies import PROFILING, SINGLE, Make, load, trainer_of
from paceline.strategies.mesh_factory import is_whole
from paceline.strategies.wrapping_patch import check_unwrapped
from paceline.transport import BarrierKind
from paceline.transport.keys import demand_key


def check_setup(
    strategy: Strategy,
    model: torch.nn.Module,
    optimizer: Optimizer,
    loaders: Sequence[DataLoader[Any]],
    loss: Any,
    on_nan: str,
    sync_batch_norm: bool,
    steps_per_epoch: int | None,
) -> None:
    """Refuses what cannot be trained, or not so, before anything is changed."""
    check_model(model, optimizer)
    check_unwrapped(model)
    for loader in loaders:
        check_loader(loader)
    if loss is not None and not callable(loss):
        raise UsageError(f"loss is a {type(loss).__name__}; it must be a function of the output and the targets")
    one_of("on_nan", on_nan, ("raise", "skip", "ignore"))
    check_steps(steps_per_epoch, loaders)
    if sync_batch_norm and isinstance(between_replicas(strategy, 1)[0], Policy):
        raise UsageError(
            f"sync_batch_norm needs all workers in every step, which '{strategy}' does not promise; use all-reduce"
        )
    if sync_batch_norm and isinstance(strategy, Mesh) and strategy.pipeline > 1:
        raise UsageError(
            "sync_batch_norm cannot be had with pipelines, whose stages are not at the same layer at the same time; "
            "use mesh with tensor instead"
        )


def check_model(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuses a model or optimizer that cannot be trained, before anything is changed."""
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        raise UsageError("the model has no parameters; there is nothing to train")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise UsageError("the model has lazy parameters, whose shape is not known yet; call it once before setup")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise UsageError(
            f"the optimizer holds {foreign} parameter{'s' * (foreign > 1)} that the model does not have; "
            "make the optimizer from this model's parameters, after the model is final"
        )
    twice = len(held) - len({id(parameter) for parameter in held})
    if twice:
        raise UsageError(
            f"{twice} parameter{'s are' if twice > 1 else ' is'} in two optimizers; each can be in one only, also one "
            "that two models share"
        )
    if any(isinstance(part, torch.optim.SparseAdam) for part in parts_of(optimizer)):
        raise UsageError("SparseAdam needs sparse gradients, which a team does not exchange; use Adam")


def check_steps(steps: int | None, loaders: Sequence[DataLoader[Any]]) -> None:
    """Refuses a number of steps per epoch that is none, or for which there is no loader."""
    if steps is None:
        return
    positive("steps_per_epoch", steps)
    if not any(is_stream(loader) for loader in loaders):
        raise UsageError("steps_per_epoch is for a loader without a length, such as one of an IterableDataset")


def splits_layers(strategy: Strategy) -> bool:
    """True if layers are split over workers, by a plan for which the model is run once."""
    return isinstance(strategy, Tensor) or (isinstance(strategy, Mesh) and strategy.tensor > 1)


def choose_trainer(
    strategy: Strategy, launch: Launch, members: Members, model: torch.nn.Module, optimizer: Optimizer
) -> Make:
    """The trainer of a strategy, for these workers."""
    several = len(parts_of(optimizer)) > 1 or isinstance(model, Models)
    if several and launch.profiling is not None:
        raise UsageError("a plan is made for one model with one optimizer, and the script sets up several")
    if launch.profiling is not None:
        return load(PROFILING)
    _check_offload(strategy, members)
    _check_order(strategy, members)
    elastic = launch.elastic or launch.joins is not None
    if members.size == 1 and not (elastic and isinstance(strategy, Policy)):
        return load(SINGLE)
    if isinstance(strategy, Pipeline | Tensor | Mesh):
        _check_machines(strategy, members, elastic)
        if several and not (is_whole(strategy) and len(members.machines) == 1):
            raise UsageError(
                f"'{strategy}' is for one model with one optimizer, and these are several; use all-reduce or a "
                "parameter server"
            )
    return trainer_of(type(strategy), elastic=elastic)


def give_values(model: torch.nn.Module, init: Any, strategy: Strategy, members: Members) -> MetaModel | None:
    """Gives a model that was made on the meta device its values, and returns None.

    If it is cut into stages that are on several machines, it gets them when it is cut: then the model is returned.
    """
    meta = MetaModel.of(model, init)
    if meta is None:
        return None
    random = bytes(torch.get_rng_state().numpy())
    if members.size > 1:
        random = members.gather(random, BarrierKind.ALLOCATE)[0]
    meta.draw(torch.frombuffer(bytearray(random), dtype=torch.uint8))
    whole_layers = isinstance(strategy, Pipeline) or (isinstance(strategy, Mesh) and strategy.tensor == 1)
    if whole_layers and not _is_served(strategy) and replicas_by_machine(strategy, members.machines) is None:
        return meta
    meta.fill()
    return None


def _is_served(strategy: Strategy) -> bool:
    """True if there is a parameter server between replicas that are split."""
    between, replicas = between_replicas(strategy, 1)
    return isinstance(strategy, Mesh) and replicas > 1 and not isinstance(between, AllReduce)


def _check_offload(strategy: Strategy, members: Members) -> None:
    """Refuses to keep the optimizer's state on disk where it is in memory that the workers of a machine share."""
    if getattr(strategy, "offload", "none") == "none":
        return
    if _is_served(strategy):
        raise UsageError(
            f"'{strategy}' keeps the optimizer's state on disk, but servers have it in memory; leave out 'offload', or "
            "leave out 'sync', so that each worker has the state of its own parts"
        )
    if len(members.machines) == 1 or (
        isinstance(strategy, Mesh) and replicas_by_machine(strategy, members.machines) is not None
    ):
        raise UsageError(
            f"'{strategy}' keeps the optimizer's state on disk, but here the workers of a machine share it in memory; "
            "leave out 'offload', or put the stages of each replica on several machines"
        )


def _check_order(strategy: Strategy, members: Members) -> None:
    """Refuses an order of stages where the workers of each replica are on one machine."""
    if getattr(strategy, "order", "") and (
        len(members.machines) == 1 or replicas_by_machine(strategy, members.machines) is not None
    ):
        raise UsageError(
            f"'{strategy}' gives an order of stages over machines, but here the workers of a replica are on one; leave "
            "out 'order'"
        )


def _check_machines(strategy: Strategy, members: Members, elastic: bool) -> None:
    """Refuses a split model in an elastic run, and connections between machines without a key."""
    if elastic:
        raise UsageError(f"'{strategy}' cannot go on without a worker; --elastic is for whole models")
    if is_whole(strategy):
        return
    if not isinstance(strategy, Pipeline) and replicas_by_machine(strategy, members.machines) is not None:
        return
    if members.secret is not None and not members.secret.encrypted:
        demand_key(None, members.hosts)
