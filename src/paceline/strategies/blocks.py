"""The blocks of a model that are gathered apart from each other, so that not all parameters are whole at once."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from paceline.errors import UsageError

_SMALL = 100
"""A block with less than one hundredth of the parameters is not worth a message of its own."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of lists and sequences of layers, inner ones before those that they are in.

    A member with most of the model is searched for more. Other modules belong to the model itself, and so do those
    that share parameters with modules outside.
    """
    total = _count(model)
    everywhere = _uses(model)
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def look(module: nn.Module) -> None:
        listing = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for child in module.children():
            if child in seen:
                continue
            seen.add(child)
            size = _count(child)
            # A list is not called itself, so nothing would trigger its gathering.
            fits = listing and not isinstance(child, nn.ModuleList | nn.ModuleDict)
            fits = fits and size * _SMALL >= total and size > 0 and _alone(child, everywhere)
            if not fits or 2 * size > total:
                look(child)
            if fits:
                found.append(child)

    look(model)
    return found


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _uses(module: nn.Module) -> Counter[int]:
    """The number of places of each parameter in a module, by id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _alone(module: nn.Module, everywhere: Counter[int]) -> bool:
    return all(everywhere[key] == count for key, count in _uses(module).items())


def check_shardable(model: nn.Module, strategy: str) -> None:
    """Refuses a model that cannot be sharded, before anything is changed."""
    dtypes: set[torch.dtype] = set()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(
                f"the parameter '{name}' is a scalar, which '{strategy}' cannot shard over "
                "machines; give it the shape (1,)"
            )
        if parameter.requires_grad:
            dtypes.add(parameter.dtype)
    if len(dtypes) > 1:
        listed = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UsageError(
            f"the model is trained in {listed}; over machines '{strategy}' needs all that is trained to be of one dtype"
        )
