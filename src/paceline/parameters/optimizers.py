"""Which torch optimizers treat every element by itself, and how to make one of the same kind on other parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.parameters.joint import JointOptimizer, divided, parts_of

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
"""Optimizers that treat every element by itself, so that any part of a parameter can be updated apart."""
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
"""Optimizers whose whole step torch does in one pass over memory, also on the CPU."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """True if an optimizer treats every element by itself."""
    return all(type(part) in ELEMENTWISE for part in parts_of(optimizer))


StateSpec = dict[str, tuple[bool, torch.dtype]]
"""The state of one parameter: by name, True if it has one value per element, and its dtype."""


def same_kind_as(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same kind on other parameters."""
    made = [same_kind(type(part), own, part.defaults) for part, own in divided(optimizer, groups)]
    return made[0] if len(made) == 1 else JointOptimizer(made, fresh=True)


def same_kind(kind: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> Optimizer:
    """An optimizer of that kind on other parameters; its constructor gets the defaults of the original."""
    known = inspect.signature(kind).parameters
    _fill(groups)
    made: Optimizer = kind(groups, **{name: value for name, value in defaults.items() if name in known})
    return made


def same_kind_fused(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same kind on other parameters; fused where torch can."""
    made = [_fused(type(part), own) for part, own in divided(optimizer, groups)]
    return made[0] if len(made) == 1 else JointOptimizer(made, fresh=True)


def _fused(kind: type[Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    _fill(groups)
    for group in groups:
        if "lr" in group:
            group["lr"] = float(group["lr"])
        dtypes = {parameter.dtype for parameter in group["params"]}
        fused = kind in _FUSED and all(dtype.is_floating_point for dtype in dtypes)
        if kind is torch.optim.SGD:
            # Without momentum it is one operation anyway, and torch does it faster without the bookkeeping of the fused
            # form. In half precision, torch's fused SGD leaves the elements that fill a vector register as they were.
            fused = fused and group["momentum"] != 0 and dtypes <= {torch.float32, torch.float64}
        group["fused"] = fused
        group["foreach"] = group["differentiable"] = False
    return kind(groups)  # type: ignore[call-arg]


def _fill(groups: list[dict[str, Any]]) -> None:
    """Adds a parameter where there is none: a group may be empty, but some optimizers want at least one in all."""
    if not any(group["params"] for group in groups):
        groups[0]["params"] = [torch.nn.Parameter(torch.zeros(2, 2))]


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The optimizer's step without torch's profiling and the user's hooks, which belong to the whole update."""
    if isinstance(optimizer, JointOptimizer):
        return lambda joint: [bare_step(part)(part) for part in parts_of(joint) if _has_parameters(part)]
    step: Callable[[Optimizer], Any] = inspect.unwrap(type(optimizer).step)
    return step


def _has_parameters(optimizer: Optimizer) -> bool:
    return any(group["params"] for group in optimizer.param_groups)


def state_specs(optimizer: Optimizer, dtype: torch.dtype) -> list[StateSpec]:
    """The state that this optimizer keeps for parameters of a dtype, by group; found by a step on a probe."""
    specs = []
    for part, group in [(owner, group) for owner in parts_of(optimizer) for group in owner.param_groups]:
        probe = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        probe.grad = torch.zeros(1, dtype=dtype)
        trial = same_kind_fused(part, [{**without_parameters(group), "params": [probe]}])
        with torch.no_grad():
            bare_step(part)(trial)
        state = trial.state[probe].items()
        specs.append({name: (v.dim() == 1, v.dtype) for name, v in state if isinstance(v, torch.Tensor)})
    return specs
