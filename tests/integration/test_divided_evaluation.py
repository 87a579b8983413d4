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


def look(team: Team, how: str) -> list[int]:
    """Trains, and looks at single batches in training mode; returns their sizes."""
    model: Any = nn.Linear(10, 4).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, other = (DataLoader(data(12), batch_size=4) for _ in range(2))
    model, optimizer, loader, other = team.setup(model, optimizer, loader, other)
    kept, sizes = iter(other) if how == "kept" else None, []
    for number, (x, _) in enumerate(loader):
        if how == "limit" and number == 2:
            break
        more = [next(iter(other))[0]] if how == "both" else []
        if how in {"new", "kept", "same"}:
            seen = next(kept or iter(loader if how == "same" else other))[0]
            sizes.append(len(seen))
            with torch.no_grad():
                model(seen)
        with team.step():
            model(torch.cat([x, *more])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if how == "own method":
        seen = next(iter(other))[0]
        sizes.append(len(seen))
        float((seen @ model.weight.detach().T).sum())
    return sizes


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


@pytest.mark.parametrize(
    ("how", "strategy", "said"),
    [
        ("new", "all-reduce", True),
        ("new", "sync", True),
        ("kept", "all-reduce", True),
        ("same", "all-reduce", True),
        ("own method", "all-reduce", True),
        ("both", "all-reduce", False),
        ("limit", "all-reduce", False),
    ],
)
def test_a_look_at_a_single_divided_batch_is_said_once(how: str, strategy: str, said: bool, capfd: Any) -> None:
    for sizes in run_team(look, 2, how, launch=under(strategy, "lead" if strategy == "sync" else None)):
        assert set(sizes) <= {2}
    assert capfd.readouterr().err.count(SAID) == said
