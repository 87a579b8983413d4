"""The bubble of a pipeline is the formula's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import above_noise
from helpers.split_models import Nap, launched
from helpers.teams import run_team
from torch import nn

from paceline import Team
from paceline.events.summary import merge


def asleep(team: Team, microbatches: int, factor: float) -> None:
    model: Any = nn.Sequential(*(Nap(0.03 * factor, 0.06 * factor) for _ in range(2 * team.world_size)))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(5):
        model(torch.ones(microbatches, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "formula"),
    [("gpipe", 2, 4, 1 / 5), ("1f1b", 2, 2, 1 / 3), ("1f1b", 4, 4, 3 / 7)],
)
def test_the_bubble_is_the_formulas_where_stages_are_equally_long(
    schedule: str, stages: int, microbatches: int, formula: float, tmp_path: Path
) -> None:
    spec = f"pipeline:stages={stages},microbatches={microbatches},schedule={schedule}"

    def check(factor: float) -> None:
        folder = tmp_path / f"{factor:g}"
        launch = launched(spec, folder=str(folder))
        run_team(asleep, stages, microbatches, factor, launch=launch, timeout=60 * factor)
        summary = merge(folder, stages)
        assert summary.bubble is not None and summary.bubble.formula == pytest.approx(formula)
        assert summary.updates == 5 and summary.minibatches == 5
        assert sum(worker.samples for worker in summary.workers.values()) == 5 * microbatches
        assert summary.bubble.measured == pytest.approx(formula, rel=0.1)

    above_noise(check)
