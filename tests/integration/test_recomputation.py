"""Stages that keep their inputs only, and compute their forward passes again, train as others do."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from helpers.split_models import apart, launched, train
from helpers.teams import run_team
from torch import nn

from paceline import Team

_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""The graphs of `Kept` that have not been freed."""
_SEEN: list[int] = []
"""How many there were at each backward pass."""


class _Token:
    """Lives as long as the graph that it belongs to."""


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.token = _Token()
        _ALIVE.add(ctx.token)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _SEEN.append(len(_ALIVE))
        return gradient


class Kept(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Keep.apply(x)  # type: ignore[no-any-return]


def most_kept(team: Team) -> int:
    inner: list[nn.Module] = [nn.Linear(8, 8), Kept(), nn.Linear(8, 8), Kept(), nn.Linear(8, 8), nn.Linear(8, 8)]
    model: Any = nn.Sequential(*inner)
    model, _ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _SEEN.clear()
    model(torch.ones(16, 8)).square().mean().backward()
    return max(_SEEN, default=0)


@pytest.mark.parametrize(("recompute", "kept"), [("false", 4), ("true", 1)])
def test_a_stage_that_is_computed_again_keeps_one_microbatch_at_a_time(recompute: str, kept: int) -> None:
    options = f"microbatches=4,schedule=gpipe,recompute={recompute}"
    first, _ = run_team(most_kept, 2, launch=launched(f"pipeline:stages=2,{options}"))
    assert first in (kept, 2 * kept)  # as many as the first stage has of these layers, for each microbatch


@pytest.mark.parametrize(("kind", "stages", "options"), [("small", 2, "1f1b"), ("convnet", 2, "gpipe")])
def test_losses_are_the_same_if_stages_are_computed_again(kind: str, stages: int, options: str) -> None:
    strategy = f"pipeline:stages={stages},microbatches=4,schedule={options},recompute=true"
    found = run_team(train, stages, kind, 4, launch=launched(strategy))
    assert apart(found[0], train(None, kind, 4)) < 1e-5


def dropped_out(team: Team) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def test_a_stage_that_is_computed_again_draws_the_same_random_numbers() -> None:
    first, second = (
        run_team(dropped_out, 2, launch=launched(f"pipeline:stages=2,microbatches=2,recompute={recompute}"))
        for recompute in ("false", "true")
    )
    assert first == second
