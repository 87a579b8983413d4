"""A split model that one worker calls alone is named within seconds, on all workers, and trains on nothing wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import zoo.table  # noqa: F401
from helpers.load import allowed
from helpers.split_models import launched
from helpers.teams import run_team
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from zoo.cells import plain, run_cell
from zoo.scripts import SCRIPTS

from paceline import Mismatch, Team

WHERE = ["before a step", "before backward", "with gradients", "after an epoch", "at the end"]
SAMPLES = TensorDataset(torch.randn(32, 10), torch.zeros(32).long())


def evaluate(model: Any, batch: int, grad: bool = False) -> float:
    model.eval()
    total = 0.0
    with torch.set_grad_enabled(grad):
        for x, y in DataLoader(SAMPLES, batch_size=batch):
            total += cross_entropy(model(x), y).item()
    model.train()
    return total


def train(team: Team, where: str, batch: int) -> tuple[str, float]:
    """Trains with an evaluation on the lead only; returns what is raised there, and after how many seconds."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(SAMPLES, batch_size=8)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    start = time.monotonic()
    try:
        for epoch in range(3):
            for number, (x, y) in enumerate(loader):
                alone = team.is_lead and epoch == 1
                if alone and where == "before a step" and number == 1:
                    evaluate(model, batch)
                loss = cross_entropy(model(x), y)
                if alone and where == "before backward" and number == 1:
                    evaluate(model, batch)
                loss.backward()
                if alone and where == "with gradients" and number == 1:
                    evaluate(model, batch, grad=True)
                optimizer.step()
                optimizer.zero_grad()
                start = time.monotonic() if epoch == 0 else start
            if team.is_lead and where == "after an epoch" and epoch == 1:
                evaluate(model, batch)
        if team.is_lead and where == "at the end":
            evaluate(model, batch)
        team.barrier()
    except Mismatch as error:
        return str(error), time.monotonic() - start
    return "", 0.0


STRATEGIES = {
    "pipeline:stages=2,microbatches=2": 2,
    "mesh:data=2,tensor=2": 4,
    "tensor:degree=2": 2,
    "mesh:data=1,pipeline=2,microbatches=2,sync=sync": 2,
    "pipeline:stages=3,microbatches=2": 3,
    "mesh:data=2,pipeline=2,microbatches=2": 4,
}
"""With the number of workers."""


CASES = [
    *((strategy, "before a step", 8) for strategy in STRATEGIES),
    *((strategy, where, 16) for strategy in list(STRATEGIES)[::2] for where in WHERE),
]


@pytest.mark.parametrize(("strategy", "where", "batch"), CASES)
def test_it_is_named_on_all_workers_within_seconds(strategy: str, where: str, batch: int) -> None:
    for said, seconds in run_team(train, STRATEGIES[strategy], where, batch, launch=launched(strategy)):
        assert "the workers of one replica must call a split model together" in said
        assert "rank 0 calls the model" in said
        assert seconds < allowed(8.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_that_call_it_together_are_not(strategy: str) -> None:
    assert all(said == "" for said, _ in run_team(train, STRATEGIES[strategy], "nowhere", 8, launch=launched(strategy)))


@pytest.mark.parametrize("strategy", ["mesh:data=2,tensor=2", "mesh:data=1,pipeline=2,microbatches=2,sync=sync"])
def test_an_evaluation_on_a_loader_of_the_team_is_not_taken_for_an_epoch(strategy: str) -> None:
    script = SCRIPTS["evaluated by lead"]
    cell = run_cell(script, strategy, plain(script), STRATEGIES[strategy])
    assert cell.kind == "refused"
    assert "rank 0 is at the start of an evaluation of a split model" in cell.text
