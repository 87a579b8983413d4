"""The report tells what kind of slowness a script has: where in the step it lies, and in which pattern it comes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import above_noise
from helpers.split_models import launched
from helpers.teams import run_team
from torch.utils.data import DataLoader, Dataset

from paceline import Team
from paceline.report.source import open_run

WORKERS, STEPS, EACH = 3, 44, 2
USUAL = 0.003
"""Seconds of each part of a usual step."""


class Slowness:
    """Sleeps of one worker, by a pattern that a seed draws."""

    def __init__(self, rank: int, place: str, pattern: str, seed: int, factor: float) -> None:
        draw = random.Random(seed)
        victim, phase, self.once = draw.randrange(WORKERS), draw.randrange(7), draw.randrange(10, STEPS - 5)
        seconds = {"persistent": 2 * USUAL, "intermittent": 15 * USUAL, "one-off": 100 * USUAL, "rotating": 8 * USUAL}
        self._rank, self._place, self._seconds, self._factor = rank, place, seconds[pattern], factor
        self._slow = {
            "persistent": lambda step: rank == victim,
            "intermittent": lambda step: rank == victim and step % 7 == phase,
            "one-off": lambda step: rank == victim and step == self.once,
            "rotating": lambda step: rank == step % WORKERS,
        }[pattern]
        self.victims = list(range(WORKERS)) if pattern == "rotating" else [victim]
        self.step = 0

    def sleep(self, place: str) -> None:
        time.sleep(self._factor * USUAL)
        if place == self._place and self._slow(self.step):
            time.sleep(self._factor * self._seconds)


class Samples(Dataset[Any]):
    def __init__(self, slowness: Slowness) -> None:
        self._slowness = slowness

    def __len__(self) -> int:
        return STEPS * EACH * WORKERS

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self._slowness.sleep("loading")
        return [torch.ones(2) for _ in indices]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slowness: Slowness) -> torch.Tensor:
        ctx.slowness = slowness
        slowness.sleep("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.slowness.sleep("backward")
        return gradient, None


def train(team: Team, place: str, pattern: str, seed: int, factor: float) -> None:
    slowness = Slowness(team.rank, place, pattern, seed, factor)
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(Samples(slowness), batch_size=EACH * WORKERS)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for x in loader:
        Sleep.apply(model(x), slowness).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        slowness.sleep("elsewhere")
        slowness.step += 1


PATTERNS = ["persistent", "intermittent", "one-off", "rotating"]
PLACES = ["loading", "forward", "backward", "elsewhere"]


@pytest.mark.parametrize(
    ("strategy", "place", "pattern"),
    [
        *(("all-reduce", place, pattern) for place in PLACES for pattern in PATTERNS),
        ("sync", "backward", "intermittent"),
        ("async", "forward", "persistent"),
        ("async", "elsewhere", "persistent"),
        ("async", "backward", "one-off"),
        ("k-sync:k=2", "loading", "rotating"),
    ],
)
def test_its_place_and_its_pattern_are_named(strategy: str, place: str, pattern: str, tmp_path: Path) -> None:
    def check(factor: float) -> None:
        seed = int(factor)
        folder = tmp_path / f"{factor:g}"
        run_team(train, WORKERS, place, pattern, seed, factor, launch=launched(strategy, folder=str(folder)))
        facts = open_run(folder).facts(pictures=False)
        told = Slowness(0, place, pattern, seed, factor)
        found = [(one["pattern"], one["part"], one["ranks"]) for one in facts["slowness"]]
        assert found == [(pattern, place, told.victims)], facts["verdict"]
        finding = facts["slowness"][0]
        if pattern == "intermittent":
            assert finding["period"] == 7
        if pattern == "one-off":
            assert finding["step"] in (told.once + 1, told.once + 2)

    above_noise(check)


def test_without_slowness_nobody_is_named(tmp_path: Path) -> None:
    def check(factor: float) -> None:
        folder = tmp_path / f"{factor:g}"
        run_team(train, WORKERS, "nowhere", "rotating", 0, factor, launch=launched("all-reduce", folder=str(folder)))
        facts = open_run(folder).facts(pictures=False)
        assert facts["slowness"] == []
        assert "No worker is slow by itself." in facts["verdict"]

    above_noise(check)
