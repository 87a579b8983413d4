"""A slow link does not slow those who need not wait for what goes over it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from helpers.checker import violations
from helpers.hosts import hosts
from helpers.load import above_noise
from helpers.machines import Failure, Spread

from paceline.events import Push

STEPS, FEW, WIDTH = 40, 6, 128
"""Of the worker behind the slow link there are few, each of which takes as long as a dozen of the others'."""


def paced(team: Any, factor: float) -> list[Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = team.setup(model, optimizer)
    for number in range(FEW if team.rank == 2 else STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        time.sleep(0.05 * factor)
        optimizer.step()
        optimizer.zero_grad()
    return []


def test_a_slow_link_under_k_async_leaves_the_team_its_pace(tmp_path: Path) -> None:
    def pace(folder: Path, factor: float, slow: bool) -> tuple[float, int]:
        with hosts(3) as made:
            if slow:
                made[2].limit(f"{1000 / factor:g}kbit")
            with Spread(paced, made, 1, factor, folder=folder, strategy="k-async:k=1", servers="lead") as team:
                results = team.results(90 * factor)
                assert not any(isinstance(result, Failure) for result in results), results
                recorded = team.events()
        assert violations(recorded, "k-async:k=1") == []
        first = [event.start for event in recorded if isinstance(event, Push) and event.rank in (0, 1)]
        third = sum(isinstance(event, Push) and event.rank == 2 and event.start < first[-1] for event in recorded)
        return (first[-1] - first[0]) / (len(first) - 1), third

    def check(factor: float) -> None:
        folder = tmp_path / f"{factor:g}"
        even, all_of_them = pace(folder / "even", factor, slow=False)
        slowed, some = pace(folder / "slowed", factor, slow=True)
        assert all_of_them == FEW > some  # the link was slow: the others had done all of theirs before
        assert slowed <= even / 0.8

    above_noise(check, (1.0, 2.0, 4.0))
