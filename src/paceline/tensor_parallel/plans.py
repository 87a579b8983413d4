"""The plan by which a model is cut: found by its graph, and where the user says so, as the user says."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.tensor_parallel.call_graph import traced
from paceline.tensor_parallel.layers import CONVOLUTIONS
from paceline.tensor_parallel.plan_search import WHOLE, PlanSearch, layers_of
from paceline.tensor_parallel.roles import ROLES, Role

_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row"}
"""Of torch.distributed.tensor.parallel, which are taken as well."""


def find_plan(
    model: nn.Module, inputs: Sequence[Any], workers: int, wishes: Mapping[str, Any] | None, sequence: bool
) -> dict[str, Role]:
    """The role of every layer that is to be cut; refused in one sentence if there is none."""
    given = _wished(model, wishes or {})
    graph = traced(model, inputs)
    finder = PlanSearch(model, graph, workers, given)
    found = finder.find()
    for name, why in finder.impossible().items():
        raise UsageError(f"plan says '{given[name].name}' of '{name}', but {why}; let it be 'whole'")
    _check(model, found, workers)
    if not found:
        others = [n for n in range(2, 17) if n != workers and PlanSearch(model, graph, n, given).find()]
        would = f"degree={others[0]} would do" if others else "no other degree up to 16 would do either"
        raise UsageError(
            f"nothing in this model can be split over {workers} workers: it has no Linear, Conv, Embedding or "
            f"attention whose outputs or heads divide by {workers}; {would}"
        )
    if sequence:
        found = {
            name: msgspec.structs.replace(role, sequence=role.name in ("row", "vocabulary", "heads"))
            for name, role in found.items()
        }
    return found


def _wished(model: nn.Module, wishes: Mapping[str, Any]) -> dict[str, Role]:
    """What the user wants of layers, given by name or pattern."""
    known, given = layers_of(model), {}
    for pattern, wish in wishes.items():
        names = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(
                f"plan names '{pattern}', but the model has no such layer that could be split; "
                f"it has {', '.join(list(known)[:8])}{', …' if len(known) > 8 else ''}"
            )
        role = _role(pattern, wish)
        for name in names:
            can = _possible(known[name])
            if role.name not in can:
                raise UsageError(
                    f"plan says '{role.name}' of '{name}', which is a {type(known[name]).__name__}; it can be "
                    + " or ".join(f"'{one}'" for one in can)
                )
            given[name] = role
    return given


def _possible(layer: nn.Module) -> tuple[str, ...]:
    """What a layer can be."""
    if isinstance(layer, nn.Embedding):
        return ("column", "vocabulary", "whole")
    if isinstance(layer, nn.MultiheadAttention):
        return ("heads", "whole")
    if isinstance(layer, nn.Linear) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1):
        return ("column", "row", "whole")
    return ("channels", "whole")


def _role(pattern: str, wish: Any) -> Role:
    text = _STYLES.get(wish, wish) if isinstance(wish, str) else _STYLES.get(type(wish).__name__, wish)
    if text == "whole":
        return WHOLE
    if isinstance(text, str) and text in ROLES:
        return Role(text)
    raise UsageError(
        f"plan says {wish!r} of '{pattern}'; it must be 'column', 'row', 'vocabulary', 'channels', 'heads' or "
        "'whole', or ColwiseParallel() or RowwiseParallel()"
    )


def _check(model: nn.Module, found: Mapping[str, Role], workers: int) -> None:
    for name, role in found.items():
        if role.name == "channels" and not role.blocks:
            raise UsageError(
                f"layer '{name}' gets the whole, and can be split by its channels only behind a layer that is split; "
                "let it be 'whole'"
            )
        odd = [block for block in role.blocks if block % workers]
        if odd:
            raise UsageError(
                f"layer '{name}' can not be split over {workers} workers: its {odd[0]} do not divide by {workers}"
            )
        layer = model.get_submodule(name)
        if role.name == "heads" and isinstance(layer, nn.MultiheadAttention) and layer.num_heads % workers:
            raise UsageError(f"layer '{name}' has {layer.num_heads} heads, which do not divide by {workers}")


def described(model: nn.Module, found: Mapping[str, Role], workers: int) -> str:
    """One sentence for people."""
    counts = {role: sum(one.name == role for one in found.values()) for role in ROLES}
    cut = ", ".join(f"{count} {role}" for role, count in counts.items() if count)
    kept = [name for name in layers_of(model) if name not in found]
    rest = f"; whole: {', '.join(kept[:4])}{', …' if len(kept) > 4 else ''}" if kept else ""
    return f"{len(found)} layers are split over {workers} workers ({cut}){rest}"


def encode(roles: Mapping[str, Role]) -> bytes:
    return msgspec.msgpack.encode(roles)


def decode(data: bytes) -> dict[str, Role]:
    return msgspec.msgpack.decode(data, type=dict[str, Role])


def shapes_of(inputs: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)]
