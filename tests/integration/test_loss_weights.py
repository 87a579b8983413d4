"""Losses that are not a plain mean over samples: a team's update is that of one process on the undivided batch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.teams import run_spread, run_team
from helpers.training import apart, data, under, values
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team, join

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


def padded(_: None) -> str:
    """Sums gradients over batches; only the second worker's part has padding. Returns what is said."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), join() as team:
        model: Any = nn.Linear(10, 4)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = data(16).tensors
        y[2::4] = -100
        loader: Any = DataLoader(TensorDataset(x.float(), y), batch_size=4)
        model, optimizer, loader = team.setup(model, optimizer, loader)
        for number, (x, y) in enumerate(loader, 1):
            (F.cross_entropy(model(x), y) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return errors.getvalue()


def halved(team: Team | None, accumulate: int) -> list[torch.Tensor]:
    """Divides sums by 2, which is also the size of two of three workers' parts."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader: Any = DataLoader(data(28), batch_size=7)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for number, (x, y) in enumerate(loader, 1):
        (F.cross_entropy(model(x), y, reduction="sum") / 2).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_divisor_that_is_the_size_of_some_parts_is_a_constant_for_all(strategy: str, accumulate: int) -> None:
    for result in run_team(halved, 3, accumulate, launch=under(strategy, "lead" if strategy == "sync" else None)):
        assert apart(result, halved(None, accumulate)) < 1e-10


def test_it_is_said_if_only_another_worker_leaves_out_samples_of_summed_batches() -> None:
    errors = [said for said in run_team(padded, 2, launch=under("sync", "lead"), joined=False) if said]
    assert len(errors) == 1
    assert "averaged by numbers of samples, while rank 1's losses do not count all samples alike" in errors[0]


def test_a_divisor_that_may_be_a_constant_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    run_team(train, 2, "samples")
    assert capfd.readouterr().err.count("which is taken for the number of this worker's items") == 1


def contrastive(team: Team, compares: bool) -> list[str]:
    """What the team says about a loss that compares the samples of a batch, or treats each by itself."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
    loader: Any = DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=16)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        for _ in range(3):
            for (x,) in loader:
                optimizer.zero_grad()
                z = F.normalize(model(torch.cat([x, x + 0.1])), dim=1)
                other = z if compares else torch.eye(len(z), 8)
                F.cross_entropy(z @ other.T, torch.arange(len(z)).roll(len(x)) % len(other)).backward()
                optimizer.step()
    return [line for line in errors.getvalue().splitlines() if "of which each worker has a part" in line]


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("sync", 2), ("mesh:data=2,pipeline=2,microbatches=1", 4), ("mesh:data=2,sync=async", 2), ("over machines", 2)],
)
def test_samples_that_meet_in_a_loss_are_said_once(strategy: str, workers: int, compares: bool) -> None:
    if strategy == "over machines":
        lines = run_spread(contrastive, "ab", compares, launch=under("mesh:data=2", None))
    else:
        lines = run_team(contrastive, workers, compares, launch=under(strategy, None))
    assert [len(said) for said in lines] == [int(compares)] + [0] * (workers - 1)


def test_a_team_with_whole_batches_has_nothing_to_say() -> None:
    assert run_team(contrastive, 2, True, launch=under("tensor:degree=2", None)) == [[], []]
