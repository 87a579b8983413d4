"""What a rule says of an operation: how each worker does its part of it, and what part of the result it then has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.tensor_parallel.placement import Placement


class ShadowTensor:
    """A tensor of which only the shape is looked at, and what part of it each worker would have."""

    __slots__ = ("placed", "shape")

    def __init__(self, shape: Sequence[int], placed: Placement | None) -> None:
        self.shape, self.placed = torch.Size(shape), placed


@dataclasses.dataclass(frozen=True, slots=True)
class Sharded:
    """Of this whole tensor, take this worker's part."""

    tensor: Any
    placement: Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """Take this whole tensor as it is; its gradient is a sum over all workers."""

    tensor: Any


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRule:
    """Each worker calls the same function with its parts."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Placement | Sequence[Placement]
    """Of the result; one per tensor if there are several."""
    random: bool = False
    """It draws random numbers, which must be each worker's own."""
    call: Callable[..., Any] | None = None
    """What to call instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class RuleRefusal:
    """It can not be done in parts; with other blocks it could."""

    blocks: tuple[int, ...] | None = None


NO = RuleRefusal()
Outcome = LocalRule | RuleRefusal
Rule = Callable[[Sequence[Any], dict[str, Any], int], Outcome]
"""Of arguments, and for so many workers. At least one argument is in parts."""


def placed(value: Any) -> Placement | None:
    """What part of it a worker has; None if it is whole, or no tensor."""
    found: Placement | None = getattr(value, "placed", None)
    return found


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, ShadowTensor))


def argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def dimension(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim
