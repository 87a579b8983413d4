"""A pipeline trains as one process would, whatever the model, the schedule and the loop; or says why it cannot."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from splits import apart, launched, made, train
from teams import run_team
from torch import nn

from paceline import Team


@pytest.fixture(scope="module", autouse=True)
def tracing_is_loaded() -> None:
    """Once here instead of once in every worker that is forked."""
    torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),), strict=False)
    importlib.import_module("torch.distributed.pipelining")


def losses(team: Team, kind: str, steps: int, options: dict[str, Any]) -> list[float]:
    return train(team, kind, steps, **options)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("kind", ["transformer", "convnet"])
def test_losses_are_those_of_the_plain_model(kind: str, workers: int) -> None:
    found = run_team(losses, workers, kind, 20, {}, launch=launched(f"pipeline:stages={workers},microbatches=4"))
    assert apart(found[0], train(None, kind, 20)) < 1e-5
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(
    "options",
    [
        "microbatches=4,schedule=gpipe",
        "microbatches=3,schedule=1f1b",
        "microbatches=4,schedule=interleaved",
        "microbatches=4,schedule=zero-bubble",
        "microbatches=5,schedule=zero-bubble-2p",
        "microbatches=1",
    ],
)
def test_every_schedule_gives_the_same_losses(options: str) -> None:
    found = run_team(losses, 2, "transformer", 6, {}, launch=launched(f"pipeline:stages=2,{options}"))
    assert apart(found[0], train(None, "transformer", 6)) < 1e-5
