"""Several optimizers as one, and several models as one module.

A GAN has two models with an optimizer each. Their parameters lie in one layout, and one update may concern those of one
optimizer only: the other parameters have no gradient in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError


class Models(torch.nn.ModuleList):
    """Several models that are trained together."""


def as_one_model(model: Any) -> torch.nn.Module:
    """A model, or several as one module."""
    if isinstance(model, torch.nn.Module):
        return model
    return Models(_checked(model, torch.nn.Module, "torch.nn.Module first"))


def as_one_optimizer(optimizer: Any) -> Optimizer:
    """An optimizer, or several as one."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    return JointOptimizer(_checked(optimizer, Optimizer, "torch.optim.Optimizer second"))


def _checked(given: Any, kind: type, what: str) -> list[Any]:
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for one in several:
        if not isinstance(one, kind):
            raise UsageError(f"setup takes a {what}, or a list of them; it got a {type(one).__name__}")
    if not several:
        raise UsageError(f"setup takes a {what}, or a list of them; it got an empty list")
    return several


def models_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The models that a module stands for: itself, or several."""
    return list(model) if isinstance(model, Models) else [model]


def model_state(model: torch.nn.Module) -> Any:
    """The `state_dict` of a model, or of several a list."""
    return [one.state_dict() for one in model] if isinstance(model, Models) else model.state_dict()


def load_model_state(model: torch.nn.Module, state: Any) -> None:
    """Loads what `model_state` has returned."""
    if isinstance(state, list) != isinstance(model, Models) or (isinstance(model, Models) and len(state) != len(model)):
        count = len(state) if isinstance(state, list) else 1
        raise UsageError(f"the checkpoint has {count} model{'s' * (count > 1)}, and the team {len(models_of(model))}")
    for one, values in zip(models_of(model), state if isinstance(model, Models) else [state], strict=True):
        one.load_state_dict(values)


def compact(value: Any) -> Any:
    """A copy whose tensors own just their own memory, so that a file holds nothing else."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.preserve_format)
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [compact(item) for item in value]
    return value


class JointOptimizer(Optimizer):
    """Several optimizers with different parameters, seen as one: its groups are those of all."""

    def __init__(self, parts: Sequence[Optimizer], *, fresh: bool = False) -> None:
        """fresh: the parts are new, and share one dictionary for their state: then it may be that of other tensors."""
        # torch's constructor would make groups of its own.
        self.parts = tuple(parts)
        self.defaults = {}
        if fresh:
            self.state = defaultdict(dict)
            for part in parts:
                part.state = self.state
        else:
            self.state = _States(self.parts)  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class _States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state of all parts, each entry with the part that holds the parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts

    def _of(self, parameter: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for part in self._parts:
            if any(parameter is own for group in part.param_groups for own in group["params"]):
                return part.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self._of(parameter)
        if parameter not in state:
            raise KeyError(parameter)
        found: dict[str, Any] = state[parameter]
        return found

    def __setitem__(self, parameter: torch.Tensor, value: dict[str, Any]) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from list(part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def clear(self) -> None:
        for part in self._parts:
            part.state.clear()


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that one stands for: itself, or several."""
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)


def describe(optimizer: Optimizer) -> str:
    """The names of an optimizer's classes."""
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts_of(optimizer)))


def divided(optimizer: Optimizer, groups: Sequence[Any]) -> list[tuple[Optimizer, list[Any]]]:
    """The optimizers that one stands for, each with its part of a list with an item for every parameter group."""
    found, start = [], 0
    for part in parts_of(optimizer):
        stop = start + len(part.param_groups)
        found.append((part, list(groups[start:stop])))
        start = stop
    return found


def split_parameters(
    model: torch.nn.Module, optimizer: Optimizer
) -> tuple[list[tuple[str, torch.nn.Parameter]], list[torch.nn.Parameter]]:
    """The parameters that the optimizer updates, with their names, and the rest."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held]
    return trained, [parameter for parameter in model.parameters() if id(parameter) not in held]
