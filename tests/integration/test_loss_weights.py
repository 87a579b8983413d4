"""Losses that are not a plain mean over samples: a team's update is that of one process on the undivided batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import apart, data, under, values
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team

LENGTH, WORDS = 6, 7
CLASS_WEIGHTS = torch.linspace(0.2, 3.0, WORDS, dtype=torch.float64)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tokens() -> TensorDataset:
    """Sentences of unlike lengths: from one word on, padded with targets that are ignored."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(WORDS, (52, LENGTH), generator=generator)
    y = torch.randint(WORDS, (52, LENGTH), generator=generator)
    for row, length in enumerate(torch.randint(1, LENGTH + 1, (52,), generator=generator).tolist()):
        y[row, length:] = -100
    y[12:18] = -100  # of the second batch, all of a worker's part
    return TensorDataset(x, y)


def by_mask(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y >= 0).flatten()
    return (F.cross_entropy(out.flatten(0, 1), y.flatten().clamp(min=0), reduction="none") * mask).sum() / mask.sum()


LOSSES: dict[str, Loss] = {
    "mean": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0)),
    "sum": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0), reduction="sum") / 8,
    "tokens": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    "class weights": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0), weight=CLASS_WEIGHTS),
    "mask": by_mask,
    "samples": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0), reduction="sum") / len(y),
}


def train(team: Team | None, loss: str, accumulate: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, WORDS)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader: Any = DataLoader(tokens(), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            (LOSSES[loss](model(x), y) / accumulate).backward()
            if (number + 1) % accumulate == 0 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "mesh:data=2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_item_counts_as_in_the_undivided_batch(loss: str, strategy: str) -> None:
    for result in run_team(train, 2, loss, launch=under(strategy, "lead" if strategy == "sync" else None)):
        assert apart(result, train(None, loss)) < 1e-10


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_that_are_summed_over_batches_count_as_in_one_process(loss: str) -> None:
    for result in run_team(train, 2, loss, 2):
        assert apart(result, train(None, loss, 2)) < 1e-10


def accumulated(team: Team | None, samples: int, reduction: str) -> list[torch.Tensor]:
    """Sums gradients over two batches; with 13 samples a worker has no part of the last one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(data(samples), batch_size=4)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            with team.step(weight="sum" if reduction == "sum" else None) if team else nullcontext():
                (F.cross_entropy(model(x), y, reduction=reduction) / 2).backward()
            if number % 2 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    ("strategy", "samples"), [("all-reduce", 13), ("all-reduce", 15), ("all-reduce", 16), ("sync", 15), ("sync", 16)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_uneven_batches_that_are_summed_count_as_in_one_process(reduction: str, strategy: str, samples: int) -> None:
    launch = under(strategy, "lead" if strategy == "sync" else None)
    found = run_team(accumulated, 2, samples, reduction, launch=launch)[0]
    assert apart(found, accumulated(None, samples, reduction)) < 1e-10


def test_a_divisor_that_may_be_a_constant_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    run_team(train, 2, "samples")
    assert capfd.readouterr().err.count("which is taken for the number of this worker's items") == 1
