"""Scripts that draw their own data train under strategies that need to see the model's inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.nn.functional import mse_loss

from paceline import Team
from paceline.errors import Mismatch, UsageError
from paceline.pipeline.deferred import Deferred

pytestmark = pytest.mark.usefixtures("warm")


class Scaled(nn.Module):
    """A model with an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x))) * scale
        return result


def drawn(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).double()


def train(team: Team | None, seed: int = 0, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Scaled().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if team is not None:
        model, optimizer = team.setup(model, optimizer, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number in range(5):
        x = drawn(seed + number)
        optimizer.zero_grad()
        mse_loss(model(x, scale=2.0), x[:, :2]).backward()
        optimizer.step()
        schedule.step()
    return [value.detach().clone() for value in model.state_dict().values()]


EXAMPLES: dict[str, Any] = {
    "none": None,
    "tensor": drawn(9),
    "tuple": (drawn(9),),
    "names": {"x": drawn(9), "scale": 2.0},
}


@pytest.mark.parametrize("how", EXAMPLES)
def test_layers_are_split_by_example_inputs_or_by_the_first_call(how: str) -> None:
    expected = train(None)
    launch = under("tensor:degree=2", None, barrier=10.0)
    for result in run_team(lambda team: train(team, example_inputs=EXAMPLES[how]), 2, launch=launch, timeout=30.0):
        for ours, theirs in zip(result, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["mesh:data=2,tensor=2", "mesh:data=2,tensor=2,sync=async"])
def test_replicas_may_draw_other_data_than_each_other(strategy: str) -> None:
    def work(team: Team) -> float:
        return float(sum(value.sum() for value in train(team, seed=100 * (team.rank // 2))))

    results = run_team(work, 4, launch=under(strategy, None, barrier=10.0), timeout=30.0)
    assert results[0] == pytest.approx(results[1]) and results[2] == pytest.approx(results[3])


@pytest.mark.parametrize("strategy", ["tensor:degree=2", "pipeline:stages=2,microbatches=2"])
def test_workers_that_share_a_model_and_draw_other_data_are_noticed(strategy: str) -> None:
    def work(team: Team) -> str:
        try:
            train(team, seed=team.rank)
        except Mismatch as error:
            return str(error)
        return "nothing noticed"

    for said in run_team(work, 2, launch=under(strategy, None, barrier=10.0), timeout=30.0):
        assert "rank 1 did not call the model with the inputs of the other workers that share it" in said


def test_the_weight_of_a_step_counts_in_the_first_one_too() -> None:
    def work(team: Team) -> tuple[float | None, bool]:
        model: Any = Scaled().double()
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with team.step(accumulate=True, weight=7):
            model(drawn()).mean().backward()
            before = model.second.bias.detach().clone()
            optimizer.step()
        trainer: Any = team._trainer
        return trainer.weight, torch.equal(before, model.second.bias)

    launch = under("tensor:degree=2", None, barrier=10.0)
    assert run_team(work, 2, launch=launch, timeout=30.0) == [(7.0, True)] * 2


def test_what_needs_the_split_model_is_refused_before_its_first_call() -> None:
    def work(team: Team) -> list[str]:
        model: Any = Scaled().double()
        said = []
        for wrong in (
            lambda: team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), example_inputs=3),
            team.save,
        ):
            try:
                wrong()
            except UsageError as error:
                said.append(str(error))
            if len(said) == 1:
                team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(drawn()).mean().backward()
        return said

    launch = under("tensor:degree=2", None, barrier=10.0)
    for said in run_team(work, 2, launch=launch, timeout=30.0):
        assert "example_inputs is a int" in said[0]
        assert "the model is split at its first call" in said[1] and "example_inputs" in said[1]


def test_the_first_call_is_one_of_the_split_model() -> None:
    def work(team: Team) -> tuple[list[str], bool]:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = copy.deepcopy(model)
        kinds = []
        for number in range(2):
            output = model(drawn(number))
            kinds.append(type(output).__name__)
            output.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return kinds, own(drawn()).shape == (8, 2) and not isinstance(own(drawn()), Deferred)

    launch = under("mesh:data=1,pipeline=2,tensor=2,microbatches=2", None, barrier=10.0)
    assert run_team(work, 4, launch=launch, timeout=30.0) == [(["Deferred", "Deferred"], True)] * 4
