"""Gradient tools between backward and step act on the team's gradient, as they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import apart, data, under, values
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_ as imported_clip
from torch.utils.data import DataLoader

from paceline import Team
from paceline.config import Launch

Tool = Callable[[nn.Module, list[float]], None]


def signs(model: nn.Module, _: list[float]) -> None:
    for parameter in model.parameters():
        parameter.grad.sign_()


def layers(model: nn.Module, _: list[float]) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.grad * parameter.grad.norm() * (number + 1)


def logs(model: nn.Module, seen: list[float]) -> None:
    seen.append(float(sum(parameter.grad.norm() for parameter in model.parameters())))


def clips_and_logs(model: nn.Module, seen: list[float]) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    logs(model, seen)


TOOLS: dict[str, Tool] = {
    "clip": lambda model, seen: seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))),
    "imported clip": lambda model, seen: seen.append(float(imported_clip(model.parameters(), 0.1))),
    "clip, then log": clips_and_logs,
    "clip of a part": lambda model, seen: seen.append(float(imported_clip(model[0].parameters(), 0.1))),
    "clip values": lambda model, seen: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "signs": signs,
    "layers": layers,
    "norms": logs,
}


def train(team: Team | None, tool: str, loss: str = "mean", lead_only: bool = False) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(data(49), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    seen: list[float] = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y, reduction=loss).backward()
            if not lead_only or team is None or team.is_lead:
                TOOLS[tool](model, seen)
            optimizer.step()
    return [value.clone() for value in model.state_dict().values()], seen


PIPELINE = "pipeline:stages=2,microbatches=2"


def launched(strategy: str) -> Launch:
    return under(strategy, "lead" if strategy in ("sync", "k-sync:k=2") else None)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", PIPELINE])
@pytest.mark.parametrize("tool", TOOLS)
def test_they_act_on_the_gradient_of_the_whole_batch(tool: str, strategy: str) -> None:
    expected, known = train(None, tool)
    for rank, (result, seen) in enumerate(run_team(train, 2, tool, launch=launched(strategy))):
        assert apart(result, expected) < 1e-9
        if rank == 0:
            assert seen == pytest.approx(known, rel=1e-9)


def test_they_act_on_sums_as_well() -> None:
    for result, _ in run_team(train, 2, "clip of a part", "sum"):
        assert apart(result, train(None, "clip of a part", "sum")[0]) < 1e-9


def test_one_worker_may_look_alone() -> None:
    expected, known = train(None, "norms")
    (result, seen), (other, _) = run_team(train, 2, "norms", "mean", True)
    assert max(apart(result, expected), apart(other, expected)) < 1e-9
    assert seen == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize("strategy", ["tensor:degree=2", "mesh:data=2"])
def test_of_a_sharded_model_torch_s_own_clipping_is_the_team_s(strategy: str) -> None:
    expected, known = train(None, "clip")
    results = run_team(train, 2, "clip", launch=launched(strategy))
    assert all(apart(result, expected) < 1e-9 for result, _ in results)
    assert results[0][1] == pytest.approx(known, rel=1e-6)


def test_where_gradients_are_a_worker_s_own_it_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    run_team(train, 2, "norms", launch=launched("tensor:degree=2"))
    assert capfd.readouterr().err.count("under 'tensor:degree=2' that is this worker's own gradient") == 1


def scaled(team: Team | None) -> tuple[list[torch.Tensor], list[float]]:
    """Gradients overflow in the second batch, on one of the workers."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(data(48), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if number == 1 and (team is None or team.rank == 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return values(model), scales


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_scaler_keeps_one_scale_on_all_workers(strategy: str) -> None:
    expected, scales = scaled(None)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    for result, own in run_team(scaled, 2, launch=launched(strategy)):
        assert own == scales
        assert apart(result, expected) < 1e-9


@pytest.mark.parametrize("strategy", ["all-reduce", "k-batch-async:k=2"])
def test_to_zero_the_gradients_of_a_model_or_to_move_it_is_not_to_look_at_them(strategy: str) -> None:
    def work(team: Team) -> int:
        model: Any = nn.Sequential(nn.Linear(10, 4), nn.Tanh()).double()
        model, optimizer, loader = team.setup(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(24), batch_size=12)
        )
        looks = []
        access = team._trainer._access
        access.expose = lambda _number: looks.append(1)
        for x, y in loader:
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            model[1].zero_grad()
            model.cpu()
            optimizer.step()
            model.zero_grad()
        model[0].weight.grad = None
        access.arm()
        assert model[0].weight.grad is None and looks == [1]
        return len(looks)

    assert run_team(work, 2, launch=under(strategy)) == [1, 1]
