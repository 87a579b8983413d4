"""Cuts a model for the workers of a replica, and keeps what each of them has where all can read it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.config import Mesh, Tensor
from paceline.errors import UsageError
from paceline.graph.opaque_layers import OpaqueLayers
from paceline.parameters.step_snapshot import StepSnapshot
from paceline.strategies.base import Options, TrainerContext
from paceline.strategies.batch_norm import TeamBatchNorm
from paceline.strategies.mesh_coord import MeshCoord, join_replica
from paceline.tensor_parallel.comm_functions import ShardSpace
from paceline.tensor_parallel.plans import decode, described, encode, find_plan
from paceline.tensor_parallel.sharded_model import ShardedModel
from paceline.transport import BarrierKind


class Inside(NamedTuple):
    """A model that is cut inside its layers."""

    cutting: ShardedModel
    sealed: OpaqueLayers
    """The layers that are cut, for tracing the model around them."""


def example(loaders: Sequence[DataLoader[Any]], model: torch.nn.Module) -> list[Any]:
    """What a model is called with: of a loader's first batch all but its last part, the targets, unless it needs them.

    Of a batch of named tensors those that the model names, too.
    """
    if not loaders:
        raise UsageError(
            "to split a model it must be seen at work: give setup the loader that it is trained with, whose batches "
            "are (inputs, targets)"
        )
    loader: Any = loaders[0]
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        size = getattr(loader.batch_sampler, "batch_size", None) or len(next(iter(loader.batch_sampler)))
    count = min(size or 1, len(loader.dataset))
    samples = [loader.dataset[number] for number in range(count)]
    batch = loader.collate_fn(samples if loader.batch_sampler is not None else samples[0])
    takes = inspect.signature(model.forward)
    if isinstance(batch, (list, tuple)):
        fewer = list(batch[:-1]) if len(batch) > 1 else list(batch)
        return fewer if _fits(takes, fewer) or not _fits(takes, batch) else list(batch)
    named = [name for name in takes.parameters if isinstance(batch, Mapping) and name in batch]
    if named and (len(named) == len(batch) or not _fits(takes, [batch])):
        names = list(takes.parameters)[: list(takes.parameters).index(named[-1]) + 1]
        return [batch[name] if name in named else takes.parameters[name].default for name in names]
    return [batch]


def _fits(takes: inspect.Signature, arguments: Sequence[Any]) -> bool:
    try:
        takes.bind(*arguments)
    except TypeError:
        return False
    return True


def cut_model(model: torch.nn.Module, options: Options, context: TrainerContext, coord: MeshCoord) -> Inside | None:
    """Cut a model's layers for the workers of a stage, as the lead finds that it can be."""
    if coord.shape.tensor == 1:
        return None
    members, strategy = context.members, context.strategy
    assert isinstance(strategy, Tensor | Mesh)
    plan, error = b"", ""
    if members.rank == 0:
        snapshot = StepSnapshot(model)
        snapshot.take()
        synchronised = {module: module.exchange for module in model.modules() if isinstance(module, TeamBatchNorm)}
        for module in synchronised:
            module.exchange = None  # the others are not here
        try:
            inputs = example(options.loaders, model)
            roles = find_plan(model, inputs, coord.shape.tensor, strategy.roles, strategy.sequence_parallel)
            plan = encode(roles)
            context.say(described(model, roles, coord.shape.tensor))
        except UsageError as refusal:
            error = str(refusal)
        except Exception as failure:
            error = (
                f"the model could not be run on its loader's first batch, which is how it is found out what to split: "
                f"{type(failure).__name__}: {failure}"
            )
        finally:
            snapshot.restore()
            for module, exchange in synchronised.items():
                module.exchange = exchange
    told = members.gather(b"!" + error.encode() if error else plan, BarrierKind.ALLOCATE)[0]
    if told[:1] == b"!":
        raise UsageError(told[1:].decode())
    member = join_replica(members, coord.stage_ranks(), context.say)
    seeds = members.gather(str(torch.initial_seed()).encode(), BarrierKind.ALLOCATE)
    space = ShardSpace(member, int(seeds[coord.lead]) % (1 << 31) + coord.stage * 1000)
    roles = decode(told)
    sealed = OpaqueLayers({name: model.get_submodule(name) for name in roles})
    return Inside(ShardedModel(model, roles, space), sealed)


def share_rest(
    cutting: ShardedModel, members: Members, coord: MeshCoord, held: set[int]
) -> dict[str, list[torch.Tensor]]:
    """Let parts of what is not trained lie where all can read them: buffers, frozen parameters. All parts, by name.

    Each part is there once for all stages of a replica, as only one of them changes it.
    """
    tensors = cutting.besides(held)
    sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
    parts = coord.shape.tensor
    memory = members.share(max(1, coord.shape.data * parts * sum(sizes)))
    found: dict[str, list[torch.Tensor]] = {}
    for part in range(parts):
        offset = (coord.replica * parts + part) * sum(sizes)
        for tensor, size in zip(tensors, sizes, strict=True):
            view = memory.tensor(offset, tensor.numel(), tensor.dtype).view(tensor.shape)
            offset += size
            if part == coord.part:
                view.copy_(tensor.data)  # the same on all stages
                tensor.data = view
            found.setdefault(cutting.names[id(tensor)], []).append(view)
    return found
