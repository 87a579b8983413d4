"""A checkpoint of a model that is split over machines is written tensor by tensor: no machine has it twice."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.split_models import adam, launched
from helpers.teams import run_spread
from torch import nn

from paceline import Team

WIDTH, LAYERS = 768, 8
SIZE = 3 * 4 * LAYERS * WIDTH * (WIDTH + 1)
"""Bytes of the parameters and of Adam's two moments."""


@pytest.fixture(scope="module", autouse=True)
def tracing_is_loaded() -> None:
    """Once here instead of once in every worker that is forked."""
    torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),), strict=False)
    importlib.import_module("torch.distributed.pipelining")
    importlib.import_module("torch._subclasses.fake_tensor")


def memory(what: str) -> int:
    """Bytes of this process's memory: `VmRSS` now, or `VmHWM` at most since it was reset."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def trained(team: Team | None, path: Path) -> dict[str, Any]:
    """A step, a checkpoint, and another step; with how much more memory the lead had at most while it saved."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer: Any = adam(model)
    if team is not None:
        model, optimizer = team.setup(model, optimizer, example_inputs=(torch.ones(8, WIDTH),))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    grown = 0

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    step()
    if team is not None and team.is_lead:
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        team.save(path, note={"epoch": 3, "best": torch.arange(3)})
        grown = memory("VmHWM") - before
    elif team is None and path.exists():
        content = torch.load(path, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    after = step()
    if team is not None:
        rest = team.load(path)
        assert rest["note"]["epoch"] == 3
        assert rest["note"]["best"].tolist() == [0, 1, 2]
        assert step() == after
    return {"grown": grown, "loss": after}


@pytest.mark.parametrize("strategy", ["pipeline:stages=2,microbatches=2", "tensor:degree=2"])
def test_no_machine_has_the_model_twice_when_it_is_saved(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    plain = trained(None, path)
    found = run_spread(trained, "ab", path, launch=launched(strategy))
    # Half of it is the lead's own. Fetched, it would be another half; and copied, a whole.
    assert found[0]["grown"] < SIZE / 4, found
    assert all(abs(one["loss"] - plain["loss"]) < 1e-6 for one in found)
    # The file is the plain model's, with its optimizer.
    assert abs(trained(None, path)["loss"] - plain["loss"]) < 1e-6
    content = torch.load(path, weights_only=True)
    assert list(content) == ["note", "model", "optimizer", "version", "paceline.checksum"]
    assert content["optimizer"]["state"][0]["exp_avg"].shape == (WIDTH, WIDTH)
