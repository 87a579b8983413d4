"""A run that goes on has the scale of its `GradScaler`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team
from paceline.team.snapshot_files import SECTION, snapshots_in

pytestmark = pytest.mark.usefixtures("warm")


def scaled(team: Team, folder: str, at: int | None = None, several: bool = False) -> tuple[dict[int, float], float]:
    """By version, the scale after it; and the weight at the end."""
    torch.manual_seed(1)
    model: Any = nn.Linear(4, 1, bias=False)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(x, 8, shuffle=True)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5) for _ in range(2 if several else 1)]
    scales = {}
    for _ in range(3):
        for inputs in loader:
            with team.step():
                scalers[0].scale(model(inputs).square().mean()).backward()
                scalers[0].step(optimizer)
                scalers[0].update()
                optimizer.zero_grad()
            scales[team._training.current().version] = scalers[0].get_scale()
            if writer := team._training.snapshots._writer:
                writer.join()
            found = [int(path.stem) for path in snapshots_in(Path(folder))] if at is not None else []
            if at is not None and found and found[0] >= at:
                os.kill(os.getpid(), signal.SIGKILL)
    team.barrier()
    team.close()
    return scales, float(model.weight.detach().sum())


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_scale_goes_on_where_it_was(tmp_path: Path, strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    (scales, weight), *_ = run_team(scaled, 2, folder, launch=under(strategy))
    assert len(set(scales.values())) > 2
    run_team(scaled, 2, folder, 7, launch=under(strategy, "lead", folder=folder, snapshot=0.0), may_die=range(2))
    newest = snapshots_in(tmp_path / "run")[0]
    version = int(newest.stem)
    kept = torch.load(newest, weights_only=True)[SECTION]["scaler"]
    assert kept["scale"] == scales[version] > 4.0
    launch = under(strategy, "lead", folder=folder, resume=folder)
    for again, result in run_team(scaled, 2, folder, launch=launch):
        assert again == {number: scale for number, scale in scales.items() if number > version}
        assert result == weight
    run_team(scaled, 2, folder, None, True, launch=launch)
    assert capfd.readouterr().err.count("the state of a GradScaler, and the script has none, or several") == 1
