"""What a parameter server trained is whole in a checkpoint and at the end, and goes on from there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import (
    BATCH,
    ROUNDS,
    Make,
    Values,
    adafactor,
    adamw,
    apart,
    build,
    data,
    loop,
    plain,
    same_bits,
    under,
    values,
)
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team

pytestmark = pytest.mark.usefixtures("warm")


def saving(team: Team, path: str, epochs: int, make: Make = adamw) -> Values:
    model = build(seed=team.rank)
    loader = DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader)
    loop(model, optimizer, loader, epochs)
    team.save(path, epoch=epochs)
    team.barrier()
    return values(model)


def resuming(team: Team, path: str, epochs: int, again: str | None = None, make: Make = adamw) -> Values:
    model = build(seed=5 + team.rank)
    loader = DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader)
    loop(model, optimizer, loader, 1)  # to have something to forget
    start = team.load(path)["epoch"]
    loop(model, optimizer, loader, epochs, start)
    if again is not None:
        team.save(again)
        team.barrier()
    return values(model)


@pytest.mark.parametrize("make", [adamw, adafactor])
@pytest.mark.parametrize("servers", ["lead", "all"])
def test_a_checkpoint_goes_on_anywhere(tmp_path: Path, servers: str, make: Make) -> None:
    path = str(tmp_path / "deep" / "checkpoint.pt")
    run_team(saving, 3, path, 2, make, launch=under("sync", servers))
    expected = plain(make, torch.float64, 4)
    content = torch.load(path)
    assert (content["version"], content["epoch"]) == (2 * ROUNDS, 2)
    model = build(seed=9)
    optimizer = make(model.parameters())
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    loop(model, optimizer, DataLoader(data(), batch_size=BATCH), 2, 2)
    assert apart(values(model), expected) < 1e-10
    for workers, strategy in ((2, "sync"), (4, "all-reduce")):
        for result in run_team(resuming, workers, path, 2, None, make, launch=under(strategy, servers)):
            assert apart(result, expected) < 1e-10


def test_a_checkpoint_of_all_reduce_goes_on_with_a_parameter_server(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    run_team(saving, 2, path, 2, launch=under("all-reduce"))
    for result in run_team(resuming, 2, path, 2, launch=under("sync", "all")):
        assert apart(result, plain(adamw, torch.float64, 4)) < 1e-10


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_versions_go_on_from_where_a_checkpoint_was(tmp_path: Path, strategy: str) -> None:
    path, again = str(tmp_path / "first.pt"), str(tmp_path / "second.pt")
    run_team(saving, 2, path, 2, launch=under(strategy))
    run_team(resuming, 2, path, 1, again, launch=under(strategy))
    assert torch.load(again)["version"] == 3 * ROUNDS


def one_weight(team: Team, path: str, load: bool) -> float:
    """Three updates without a loader, who would tell the worker its version anew."""
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if load:
        team.load(path)
    for _ in range(3):
        with team.step():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        team.barrier()
    team.save(path)
    team.barrier()
    team.close()
    return float(model.weight)


@pytest.mark.parametrize(("strategy", "updates"), [("all-reduce", 3), ("sync", 3), ("k-async:k=2", 3), ("async", 6)])
def test_no_gradient_is_lost_after_a_checkpoint_is_loaded(tmp_path: Path, strategy: str, updates: int) -> None:
    path = str(tmp_path / "checkpoint.pt")
    for runs, load in ((1, False), (2, True)):
        for value in run_team(one_weight, 2, path, load, launch=under(strategy)):
            assert value == pytest.approx(1 - 0.1 * updates * runs)
        assert torch.load(path)["version"] == updates * runs


def test_the_optimizer_s_state_is_whole_on_every_worker() -> None:
    def work(team: Team) -> Any:
        model = build()
        loader = DataLoader(data(), batch_size=BATCH)
        model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
        loop(model, optimizer, loader, 1)
        assert not optimizer.state
        state = copy.deepcopy(optimizer.state_dict())
        team.barrier()
        return state

    model = build()
    expected = adamw(model.parameters())
    loop(model, expected, DataLoader(data(), batch_size=BATCH), 1)
    reference = expected.state_dict()
    for state in run_team(work, 3, launch=under("sync", "all")):
        assert state["param_groups"] == reference["param_groups"]
        assert state["state"].keys() == reference["state"].keys()
        for index, known in reference["state"].items():
            for name, value in known.items():
                torch.testing.assert_close(state["state"][index][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_closing_leaves_plain_torch_with_the_newest_values(servers: str) -> None:
    def work(team: Team) -> Values:
        model = build(seed=team.rank)
        loader = DataLoader(data(), batch_size=BATCH)
        model, optimizer, shared = team.setup(model, adamw(model.parameters()), loader)
        loop(model, optimizer, shared, 2)
        team.close()
        assert not any(parameter.is_shared() for parameter in model.parameters())
        assert type(optimizer).step is torch.optim.AdamW.step and "step" not in vars(optimizer)
        loop(model, optimizer, DataLoader(data(), batch_size=BATCH), 2, 2)
        return values(model)

    for result in run_team(work, 2, launch=under("sync", servers)):
        assert apart(result, plain(adamw, torch.float64, 4)) < 1e-10


def test_after_async_everybody_closes_with_the_same_values() -> None:
    def work(team: Team) -> Values:
        model = build(torch.float32, seed=team.rank)
        loader = DataLoader(data(dtype=torch.float32), batch_size=5)
        model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
        loop(model, optimizer, loader, 2)
        team.barrier()
        team.close()
        return values(model)

    first, *others = run_team(work, 4, launch=under("async"))
    assert all(same_bits(first, other) for other in others)
