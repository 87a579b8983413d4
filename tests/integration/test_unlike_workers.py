"""Workers that do not do the same, and numbers that are not finite, are noticed and named."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.teams import run_spread, run_team
from helpers.training import data, under
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline import Team
from paceline.config import Launch

STRATEGIES = ["all-reduce", "sync", "async", "tensor:degree=2"]


def launched(strategy: str) -> Launch:
    return under(strategy, None if strategy.startswith(("all", "tensor")) else "lead")


def net(width: int = 16) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 4)).double()


def sgd(model: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


SETUPS: dict[str, tuple[Callable[[Team], Any], str]] = {
    "model": (lambda team: (m := net(16 + team.rank), sgd(m)), r"rank 1 has the parameter '0\.weight' of float64 \(17"),
    "optimizer": (
        lambda team: (m := net(), torch.optim.Adam(m.parameters()) if team.rank else sgd(m)),
        "rank 1 has the optimizer Adam where rank 0 has the optimizer SGD",
    ),
    "learning rate": (lambda team: (m := net(), sgd(m, 0.1 + team.rank)), r"rank 1 has in parameter group 0 lr = 1\.1"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", SETUPS)
def test_another_setup_on_one_worker_is_refused(what: str, strategy: str) -> None:
    def work(team: Team) -> None:
        team.setup(*SETUPS[what][0](team), DataLoader(data(48), batch_size=12))

    with pytest.raises(AssertionError, match=SETUPS[what][1]):
        run_team(work, 2, launch=launched(strategy))


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_worker_that_leaves_out_a_step_is_named(strategy: str) -> None:
    def work(team: Team) -> None:
        model, optimizer, loader = team.setup(model := net(), sgd(model), DataLoader(data(48), batch_size=12))
        for number, (x, y) in enumerate(loader):
            loss = cross_entropy(model(x), y)
            if number == 1 and team.rank == 1:
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(AssertionError, match=r"rank 1 updates with another batch of the loader than rank 0"):
        run_team(work, 2, launch=launched(strategy))


def diverging(team: Team | None, on_nan: str) -> tuple[bool, int]:
    model: Any = net()
    optimizer: Any = sgd(model)
    loader: Any = DataLoader(data(48), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader, on_nan=on_nan)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        # Under async a worker may find that the other has had all samples.
        if number == 0 and (team is None or team.rank == 1 or str(team.strategy) == "async"):
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
    finite = all(bool(one.isfinite().all()) for one in model.state_dict().values())
    return finite, team._training.current().version if team else 0


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async"])
def test_a_loss_that_is_not_finite_is_an_error_that_names_the_worker(strategy: str) -> None:
    with pytest.raises(AssertionError, match=rf"the loss of rank {'.' if strategy == 'async' else 1} is nan at update"):
        run_team(diverging, 2, "raise", launch=launched(strategy), timeout=30)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async"])
def test_its_update_can_be_left_out(strategy: str) -> None:
    for finite, version in run_team(diverging, 2, "skip", launch=launched(strategy)):
        assert finite
        assert version == (3 if strategy != "async" else version)


def test_over_machines_too_it_is_an_error_or_left_out() -> None:
    launch = under("mesh:data=2", None)
    with pytest.raises(AssertionError, match="the loss of rank 1 is nan at update 1"):
        run_spread(diverging, "ab", "raise", launch=launch)
    assert run_spread(diverging, "ab", "skip", launch=launch) == [(True, 3), (True, 3)]


def test_it_can_be_ignored_as_plain_torch_does() -> None:
    assert [finite for finite, _ in run_team(diverging, 2, "ignore")] == [False, False]


def drawing(team: Team, offset: int) -> None:
    torch.manual_seed(1 + offset * team.rank)
    model, optimizer = team.setup(model := net(), sgd(model))
    torch.manual_seed(1 + offset * team.rank)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 10).double()), torch.randint(4, (8,))).backward()
        optimizer.step()


@pytest.mark.parametrize("offset", [0, 1])
def test_workers_that_draw_the_same_data_are_told(offset: int, capfd: pytest.CaptureFixture[str]) -> None:
    run_team(drawing, 2, offset)
    assert capfd.readouterr().err.count("all workers have the same loss") == (not offset)


def deciding(team: Team) -> int:
    """A script that decides by its own loss; returns how often that was said to it."""
    model, optimizer, loader = team.setup(model := net(), sgd(model), DataLoader(data(48), batch_size=12))
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        for number, (x, y) in enumerate(loader):
            loss = cross_entropy(model(x), y)
            if number % 2 == team.rank:  # as a loss would decide
                loss = 0.1 * loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return errors.getvalue().count("rank 1 computes its loss of a batch in another way than rank 0")


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "mesh:data=2,sync=sync", "over machines"])
def test_losses_that_are_computed_in_different_ways_are_said_once_by_the_lead(strategy: str) -> None:
    if strategy == "over machines":
        found = run_spread(deciding, "ab", launch=under("mesh:data=2", None))
    else:
        found = run_team(deciding, 2, launch=launched(strategy))
    assert found == [1, 0]


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "mesh:data=2,sync=sync"])
def test_rates_that_differ_later_are_said_once_by_the_lead(strategy: str) -> None:
    def work(team: Team) -> int:
        model, optimizer, loader = team.setup(model := net(), sgd(model), DataLoader(data(48), batch_size=12))
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + number * team.rank)
        return errors.getvalue().count("rank 1's learning rate")

    assert run_team(work, 2, launch=launched(strategy)) == [1, 0]
