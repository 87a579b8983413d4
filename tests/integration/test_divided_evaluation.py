"""An evaluation that looks like training when it begins: its batches are divided, which is said once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import data, under
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team

SAID = "a loader was iterated over without a backward pass"


def evaluate(team: Team, how: str) -> int:
    """Trains for an epoch, then evaluates twice; returns the samples of the last evaluation."""
    model: Any = nn.Linear(10, 4).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, test = (DataLoader(data(12), batch_size=4) for _ in range(2))
    model, optimizer, loader, test = team.setup(model, optimizer, loader, test)
    for x, _ in loader:
        with team.step():
            model(x).square().mean().backward()
        if how == "single steps":
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    count = 0
    for _ in range(2 if how != "single steps" else 0):
        model.train(how != "eval")
        with torch.set_grad_enabled(how != "no_grad"):
            batches = iter(test)
        count = 0
        for x, _ in batches:
            with torch.no_grad():
                model(x)
            count += len(x)
    return count


@pytest.mark.parametrize(
    ("how", "strategy", "samples", "times"),
    [
        ("no_grad inside the loop", "all-reduce", 6, 1),
        ("no_grad inside the loop", "sync", 6, 1),
        ("no_grad", "all-reduce", 12, 0),
        ("eval", "all-reduce", 12, 0),
        ("single steps", "all-reduce", 0, 0),
    ],
)
def test_it_is_said_once(how: str, strategy: str, samples: int, times: int, capfd: Any) -> None:
    found = run_team(evaluate, 2, how, launch=under(strategy, "lead" if strategy == "sync" else None))
    assert found == [samples, samples]
    assert capfd.readouterr().err.count(SAID) == times
