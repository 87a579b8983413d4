"""What a plan splits and what it leaves whole, in sentences for the user."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paceline.tensor_parallel.layer_kinds import layers_of
from paceline.tensor_parallel.layers import ROLES, Role, layer_shards

_FEW = 3
"""Most reasons, and most layers of each, that are named."""


def described(model: nn.Module, found: Mapping[str, Role], workers: int) -> str:
    """Numbers of split layers, and the names of some that are not."""
    counts = {role: sum(one.name == role for one in found.values()) for role in ROLES}
    cut = ", ".join(f"{count} {role}" for role, count in counts.items() if count)
    split = _split_parameters(model, found)
    kept = [name for name, layer in layers_of(model).items() if not split & set(map(id, layer.parameters()))]
    rest = f"; replicated: {', '.join(kept[:4])}{', …' if len(kept) > 4 else ''}" if kept else ""
    return f"{len(found)} layers are split over {workers} workers ({cut}){rest}"


def left_whole(model: nn.Module, found: Mapping[str, Role], reasons: Mapping[str, str]) -> str:
    """The largest layers that stay whole, and why, if those are most of the parameters; else nothing.

    reasons: by layer, of those that could be split but are not.
    """
    split = _split_parameters(model, found)
    total = sum(parameter.numel() for parameter in model.parameters())
    whole: dict[str, dict[str, int]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in split:
            layer = name.rpartition(".")[0]
            why = reasons.get(layer) or f"{type(model.get_submodule(layer)).__name__} is no layer that can be split"
            sizes = whole.setdefault(why, {})
            sizes[layer] = sizes.get(layer, 0) + parameter.numel()
    left = sum(sum(sizes.values()) for sizes in whole.values())
    if 2 * left <= total:
        return ""
    largest = sorted(whole.items(), key=lambda item: -sum(item[1].values()))[:_FEW]
    return f"only {1 - left / total:.0%} of the parameters are split; whole on every worker: " + "; ".join(
        f"{_named(sizes)} ({why})" for why, sizes in largest
    )


def _split_parameters(model: nn.Module, found: Mapping[str, Role]) -> set[int]:
    """The ids of parameters of which each worker has a shard."""
    layers = [(model.get_submodule(name), role) for name, role in found.items()]
    return {id(layer._parameters.get(own)) for layer, role in layers for own in layer_shards(layer, role)}


def _named(sizes: Mapping[str, int]) -> str:
    """The largest of some layers."""
    names = [name or "the model's own parameters" for name in sorted(sizes, key=lambda name: -sizes[name])]
    return ", ".join(names[:_FEW]) + f" and {len(names) - _FEW} more" * (len(names) > _FEW)
