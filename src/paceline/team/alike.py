"""Checks that all workers set up the same training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.data.stream.kinds import is_stream, stream_facts
from paceline.errors import Mismatch
from paceline.parameters.hyperparameters import plain
from paceline.parameters.joint import models_of, parts_of
from paceline.strategies import Options
from paceline.transport import BarrierKind

Facts = list[tuple[str, str]]


def check_alike(
    members: Members,
    model: torch.nn.Module,
    optimizer: Optimizer,
    loaders: Sequence[DataLoader[Any]],
    options: Options,
) -> None:
    """Raises Mismatch, on all workers, if one has another model, optimizer, loader or option than the first."""
    if members.size == 1:
        return
    payloads = members.gather(msgspec.msgpack.encode(_facts(model, optimizer, loaders, options)), BarrierKind.ALLOCATE)
    first, *others = (msgspec.msgpack.decode(payload, type=Facts) for payload in payloads)
    for rank, facts in enumerate(others, 1):
        for wanted, found in itertools.zip_longest(first, facts, fillvalue=("end of the list", "")):
            if wanted != found:
                raise Mismatch(
                    f"rank {rank} has {' '.join(found)} where rank 0 has {' '.join(wanted)}; all workers must set up "
                    "the same model, optimizer, loaders and options",
                    [rank],
                )


def _facts(model: torch.nn.Module, optimizer: Optimizer, loaders: Sequence[DataLoader[Any]], options: Options) -> Facts:
    facts = [("the model", type(one).__name__) for one in models_of(model)]
    facts += [(f"the parameter '{name}'", _describe(one)) for name, one in model.named_parameters()]
    facts += [(f"the buffer '{name}'", _describe(one)) for name, one in model.named_buffers()]
    facts += [("the optimizer", type(part).__name__) for part in parts_of(optimizer)]
    for number, group in enumerate(optimizer.param_groups):
        facts.append((f"in parameter group {number}", f"{len(group['params'])} parameters"))
        facts += [(f"in parameter group {number} {key}", f"= {value}") for key, value in plain(group).items()]
    for loader in loaders:
        if is_stream(loader):
            facts += stream_facts(loader)
        else:
            facts.append(("a loader of", f"{len(loader.dataset)} samples"))  # type: ignore[arg-type]
        facts.append(("batch_size", f"= {loader.batch_size}"))
    facts += [(name, f"= {getattr(options, name)}") for name in ("gradients", "scale_lr", "warmup", "batch")]
    return facts


def _describe(tensor: torch.Tensor) -> str:
    return f"of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
