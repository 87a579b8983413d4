"""Parameters that a script changes itself, outside of the optimizer: what all workers do alike counts once."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import apart, data, under
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline import Team
from paceline.config import Launch

PIPELINE = "pipeline:stages=2,microbatches=2"
Batch = tuple[torch.Tensor, torch.Tensor]


def launched(strategy: str) -> Launch:
    return under(strategy, None if strategy.startswith(("all", "tensor", "pipe", "mesh")) else "lead")


def step(model: Any, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def decay(model: Any, optimizer: Any, batch: Batch) -> None:
    step(model, optimizer, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.97)


def clamp(model: Any, optimizer: Any, batch: Batch) -> None:
    step(model, optimizer, batch)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def assign(model: Any, optimizer: Any, batch: Batch) -> None:
    step(model, optimizer, batch)
    model[0].weight.data = model[0].weight.data * 0.9


def sharpness(model: Any, optimizer: Any, batch: Batch) -> None:
    """SAM: the gradient at a point uphill, applied to the parameters as they were."""
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    before = [parameter.data.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad * (0.1 / norm))
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    for parameter, old in zip(model.parameters(), before, strict=True):
        parameter.data = old
    optimizer.step()


def second_optimizer(model: Any, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    torch.optim.SGD(model[2].parameters(), lr=0.05).step()


def averaged(model: Any, optimizer: Any, batch: Batch) -> None:
    """Evaluates with other values, and puts the former ones back."""
    step(model, optimizer, batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 0.5 for name, value in before.items()})
    with torch.no_grad():
        model(batch[0])
    model.load_state_dict(before)


HABITS: dict[str, Callable[[Any, Any, Batch], None]] = {
    "decay": decay,
    "clamp": clamp,
    "assign": assign,
    "sharpness": sharpness,
    "second optimizer": second_optimizer,
    "averaged": averaged,
}


def train(team: Team | None, habit: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(data(49), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    if habit == "again":
        torch.manual_seed(5)
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.weight)
    for _ in range(2):
        for batch in loader:
            HABITS.get(habit, step)(model, optimizer, batch)
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", PIPELINE])
@pytest.mark.parametrize("habit", [*HABITS, "again"])
def test_it_counts_once(habit: str, strategy: str) -> None:
    expected = train(None, habit)
    assert apart(run_team(train, 2, habit, launch=launched(strategy))[0], expected) < 1e-9


def test_it_counts_once_in_a_team_that_may_lose_workers() -> None:
    found = run_team(train, 2, "decay", launch=under("all-reduce", elastic=True))
    assert apart(found[0], train(None, "decay")) < 1e-9


def test_a_worker_without_samples_knows_which_gradient_the_others_step_with() -> None:
    def work(team: Team | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Linear(10, 4).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(data(14), batch_size=12)  # two samples are left for three workers
        if team is not None:
            model, optimizer, loader = team.setup(model, optimizer, loader)
        for batch in loader:
            sharpness(model, optimizer, batch)
        return [value.clone() for value in model.state_dict().values()]

    expected = work(None)
    for ours in run_team(work, 3):
        assert apart(ours, expected) < 1e-9


def reading(team: Team | None) -> list[float]:
    """Reads parameters that were listed once, before and after each step; the workers are late in turns."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(data(48), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    listed, seen = list(model.parameters()), []
    for number, (x, y) in enumerate(loader):
        cross_entropy(model(x), y).backward()
        time.sleep(0.04 * (team is not None and team.rank == number % 2))
        seen.append(sum(float(parameter.detach().norm()) for parameter in listed))
        optimizer.step()
        seen.append(sum(float(parameter.detach().norm()) for parameter in listed))
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", PIPELINE, "mesh:data=1,pipeline=2"])
def test_what_a_script_reads_is_what_one_process_would_have_there(strategy: str) -> None:
    plain = reading(None)
    for seen in run_team(reading, 2, launch=launched(strategy)):
        assert seen == pytest.approx(plain, rel=1e-12)


def averaging(team: Team) -> str:
    """What an error of the script's own says, that of an average over shards."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    average = copy.deepcopy(model)
    loader = DataLoader(data(12, dtype=torch.float32), batch_size=6)
    model, *_ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    try:
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.1)
    except RuntimeError as error:
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            sys.excepthook(type(error), error, None)
        return shown.getvalue()
    return ""


def test_an_average_over_shards_names_the_way_to_whole_parameters() -> None:
    for shown in run_team(averaging, 2, launch=launched("tensor:degree=2")):
        assert "under 'tensor:degree=2' a parameter of the model is this worker's shard of it" in shown
        assert "read model.state_dict()" in shown


@pytest.mark.parametrize("habit", ["decay", "again"])
def test_shards_may_not_be_changed_by_hand(habit: str) -> None:
    with pytest.raises(
        AssertionError, match=r"changed parameters outside of the optimizer \(0\.weight.*that are sharded"
    ):
        run_team(train, 2, habit, launch=launched("tensor:degree=2"))


def test_other_values_of_a_sharded_model_may_be_loaded_and_the_former_ones_again() -> None:
    assert apart(run_team(train, 2, "averaged", launch=launched("tensor:degree=2"))[0], train(None, "averaged")) < 1e-9


def test_values_that_are_loaded_into_a_sharded_model_count() -> None:
    def work(team: Team | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(data(48), batch_size=12)
        if team is not None:
            model, optimizer, loader = team.setup(model, optimizer, loader)
        torch.manual_seed(3)
        model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
        for batch in loader:
            step(model, optimizer, batch)
        return [value.clone() for value in model.state_dict().values()]

    assert apart(run_team(work, 2, launch=launched("tensor:degree=2"))[0], work(None)) < 1e-9


@pytest.mark.parametrize("strategy", ["async", "k-sync:k=1"])
def test_where_versions_differ_it_is_refused(strategy: str) -> None:
    with pytest.raises(AssertionError, match=r"changed parameters outside of the optimizer \(0\.weight"):
        run_team(train, 2, "decay", launch=launched(strategy))


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_workers_that_change_them_to_unlike_values_are_told(strategy: str) -> None:
    def work(team: Team) -> None:
        model, optimizer, loader = prepared(team)
        for batch in loader:
            step(model, optimizer, batch)
            with torch.no_grad():
                model[0].weight.add_(team.rank + 1)

    with pytest.raises(AssertionError, match=r"rank 1 to other values than by rank 0"):
        run_team(work, 2, launch=launched(strategy))


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async", "tensor:degree=2", PIPELINE])
@pytest.mark.parametrize("convert", [lambda model: model.float(), lambda model: model.bfloat16()])
def test_a_model_that_is_converted_after_setup_is_refused(strategy: str, convert: Callable[[Any], Any]) -> None:
    def work(team: Team) -> None:
        model, optimizer, loader = prepared(team)
        for number, (x, y) in enumerate(loader):
            if number == 1:
                convert(model)
            step(model, optimizer, (x.to(next(model.parameters()).dtype), y))

    with pytest.raises(AssertionError, match=r"convert, move or resize the model before team\.setup"):
        run_team(work, 2, launch=launched(strategy))


def prepared(team: Team) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(48), batch_size=12))


def unfreezing(team: Team | None, epoch: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model[0].requires_grad_(False)
    optimizer: Any = torch.optim.Adam(model[2].parameters(), lr=0.01)
    loader: Any = DataLoader(data(48), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for number in range(3):
        if number == epoch:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.003})
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for batch in loader:
            step(model, optimizer, batch)
            schedule.step()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("strategy", ["all-reduce", "mesh:data=2", PIPELINE])
def test_parameters_that_are_added_to_the_optimizer_are_trained(strategy: str) -> None:
    launch = under(strategy, None)
    assert apart(run_team(unfreezing, 2, launch=launch)[0], unfreezing(None)) < 1e-9


def test_with_a_server_added_parameters_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"under 'sync' the server knows the optimizer's parameters from setup on"):
        run_team(unfreezing, 2, 0, launch=launched("sync"))
