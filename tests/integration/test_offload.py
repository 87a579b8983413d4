"""With offload=disk the optimizer's state of a stage is in a file, with the numbers of a state in memory."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.split_models import adam, launched, train
from helpers.teams import run_spread, run_team
from torch import nn

from paceline import Team, UsageError
from paceline.parameters.disk_state import DiskState

WIDTH, LAYERS = 768, 6
SIZE = 4 * LAYERS * WIDTH * WIDTH
"""Bytes of the parameters."""
TWO = "pipeline:stages=2,microbatches=2"


@pytest.fixture(scope="module", autouse=True)
def tracing_is_loaded() -> None:
    """Once here instead of once in every worker that is forked."""
    torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),), strict=False)
    importlib.import_module("torch.distributed.pipelining")


def private() -> int:
    """Bytes of this process's memory that are in no file, without what it has freed."""
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def trained(team: Team, path: Path) -> dict[str, Any]:
    """Values after three steps and a checkpoint between them, and how much memory they took."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = team.setup(model, adam(model), example_inputs=(torch.ones(8, WIDTH),))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model(x).square().mean().backward()
    before = private()
    optimizer.step()
    grown = private() - before
    optimizer.zero_grad()
    if team.is_lead:
        team.save(path)
    step()
    team.load(path)
    step()
    state = optimizer.state_dict()["state"]
    moments = [state[number]["exp_avg_sq"].clone() for number in range(2 * LAYERS)]
    team.barrier()
    return {"grown": grown, "model": {name: one.clone() for name, one in model.state_dict().items()}, "state": moments}


def test_the_state_is_not_in_memory_and_numbers_are_the_same(tmp_path: Path) -> None:
    found = run_spread(trained, "ab", tmp_path / "disk.pt", launch=launched(f"{TWO},offload=disk"))
    plain = run_spread(trained, "ab", tmp_path / "memory.pt", launch=launched(TWO))
    for one, other in zip(found, plain, strict=True):
        assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
        assert all(map(torch.equal, one["state"], other["state"]))
    # Of both workers together, two moments: in memory, or not.
    assert sum(one["grown"] for one in plain) > 1.8 * SIZE
    assert sum(one["grown"] for one in found) < 0.5 * SIZE


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_an_update_in_parts_has_the_numbers_of_one_at_once(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.parameters.disk_state._AT_ONCE", 40_000)
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind is not torch.optim.AdamW else {}
    values = [nn.Parameter(torch.randn(96, 96).to(memory_format=torch.contiguous_format)) for _ in range(5)]
    images = nn.Parameter(torch.randn(8, 6, 5, 5).to(memory_format=torch.channels_last))
    models = [[nn.Parameter(one.detach().clone()) for one in (*values, images)] for _ in range(2)]
    plain, stored = (kind(model, lr=0.01, **options) for model in models)
    disk = DiskState(stored, tmp_path)
    for _ in range(3):
        for first, second in zip(*models, strict=True):
            first.grad = torch.randn_like(first)
            second.grad = first.grad.clone()
        plain.step()
        disk.step(stored.step, models[1])
        assert all(second.grad is not None for second in models[1])
    assert all(map(torch.equal, *models))
    for first, second in zip(*models, strict=True):
        assert plain.state[first].keys() == stored.state[second].keys()
        for name, value in plain.state[first].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(stored.state[second][name]))


def refused(team: Team) -> str:
    try:
        train(team, "chain", 1)
    except UsageError as error:
        return str(error)
    return ""


def test_it_is_refused_where_workers_share_the_state_in_memory() -> None:
    for text in run_team(refused, 2, launch=launched(f"{TWO},offload=disk")):
        assert "leave out 'offload', or put the stages of each replica on several machines" in text
