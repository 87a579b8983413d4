"""Result of a rule: how each worker computes its shard of an operation, and the placement of the operation's result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.tensor_parallel.placement import Placement


class TensorSpec:
    """Shape and placement of a tensor without values, as an argument of rules."""

    __slots__ = ("placement", "shape")

    def __init__(self, shape: Sequence[int], placement: Placement | None) -> None:
        self.shape, self.placement = torch.Size(shape), placement


@dataclasses.dataclass(frozen=True, slots=True)
class Sharded:
    """An argument: this worker's shard of a whole tensor."""

    tensor: Any
    placement: Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """An argument: a whole tensor as it is, whose gradient is summed over all workers."""

    tensor: Any


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRule:
    """Each worker calls the same function with its shards."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Placement | Sequence[Placement]
    """Placement of the result; one per tensor if there are several."""
    random: bool = False
    """True if the function draws random numbers, which must be each worker's own."""
    call: Callable[..., Any] | None = None
    """Function to call instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class RuleRefusal:
    """The operation cannot be computed on shards."""

    blocks: tuple[int, ...] | None = None
    """Blocks of the argument with which it could."""


REFUSED = RuleRefusal()
RuleResult = LocalRule | RuleRefusal
Rule = Callable[[Sequence[Any], dict[str, Any], int], RuleResult]
"""Function of an operation's arguments, at least one of which is sharded, and of the number of workers."""


def placement_of(value: Any) -> Placement | None:
    """A tensor's placement; None if it is whole, or not a tensor."""
    found: Placement | None = getattr(value, "placement", None)
    return found


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorSpec))


def argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def dimension(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim
