"""The zoo's registry: every script is one function that trains in a team, or plainly where that is None.

A script is written as in one process; `ported` is all that it has in addition, as in the README's diff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Result = tuple[dict[str, torch.Tensor], list[float]]
"""What a script ends with: its model's values, and the numbers that it has printed."""


class Script(NamedTuple):
    """A script of the zoo, and how near its results must be to those of the plain one."""

    name: str
    train: Callable[[Any], Result]
    what: str
    """For the table: what is special about it."""
    dtype: torch.dtype
    within: float


SCRIPTS: dict[str, Script] = {}


def script(
    what: str, dtype: torch.dtype = torch.float64, within: float | None = None
) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    """Registers a script; `what` describes it in the table.

    dtype: torch's default dtype while it runs. within: how far its numbers may be from the plain ones, relatively; by
    default 1e-9 in float64 and 1e-5 in float32. Infinity: its model draws numbers, so it only has to come to an end.
    """

    def register(train: Callable[[Any], Result]) -> Callable[[Any], Result]:
        near = within or (1e-9 if dtype == torch.float64 else 1e-5)
        name = train.__name__.replace("_", " ")
        SCRIPTS[name] = Script(name, train, what, dtype, near)
        return train

    return register


def ported(team: Any, model: Any, optimizer: Any, *loaders: Any, **options: Any) -> Any:
    """What the README's diff adds: `model, optimizer, loader = team.setup(model, optimizer, loader)`."""
    if team is None:
        return (model, optimizer, *loaders)
    return team.setup(model, optimizer, *loaders, **options)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    """Numbers for samples, drawn without a change to torch's own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(high: int, *shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))
