"""`torch.compile` in a team: what is compiled trains as it does uncompiled, or is said to be ignored."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from helpers.teams import run_team
from helpers.training import BATCH, Values, apart, data, under, values
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline import Team
from paceline.config import Slowness

EXACT = {
    "all-reduce": "all-reduce",
    "sync": "sync",
    "pipeline": "pipeline:stages=2,microbatches=2",
    "tensor": "tensor:degree=2",
}
SPLIT = ("pipeline", "tensor")
SAMPLES = 2 * BATCH + 13
"""The last batch has another shape, for which the compiler compiles again."""
ONES = torch.ones(5, 10, dtype=torch.float64)


class Net(nn.Module):
    """A model with parts that can be compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 24)
        self.inner: nn.Module = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.last = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        result: torch.Tensor = self.last(x + self.inner(x))
        return result


class Script:
    """A model, its optimizer and its loader, of which some part is compiled before or after the setup."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = Net().double()
        self.model: Any = self.net
        """What the script gives to the setup."""
        self.optimizer: Any = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.loader: Any = DataLoader(data(SAMPLES), batch_size=BATCH)
        self.call: Callable[[torch.Tensor], torch.Tensor] = self.forward
        """The way in which the script calls its model."""
        self.step: Callable[[], Any] = self.update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)
        return result

    def update(self) -> None:
        self.optimizer.step()

    def setup(self, team: Team | None) -> None:
        if team is not None:
            self.model, self.optimizer, self.loader = team.setup(self.model, self.optimizer, self.loader)

    def train(self, team: Team | None = None, epochs: int = 2) -> None:
        for _ in range(epochs):
            for x, y in self.loader:
                with contextlib.nullcontext() if team is None else team.step():
                    cross_entropy(self.call(x), y).backward()
                    self.step()
                    self.optimizer.zero_grad()

    def warm(self) -> None:
        """Compile with the parameters where they are before the setup."""
        cross_entropy(self.call(ONES), torch.zeros(5, dtype=torch.long)).backward()
        self.net.zero_grad()


def model_before(script: Script, backend: str) -> None:
    script.model = torch.compile(script.net, backend=backend)
    script.warm()


def method_before(script: Script, backend: str) -> None:
    script.net.compile(backend=backend)
    script.warm()


def part_before(script: Script, backend: str) -> None:
    script.net.inner = torch.compile(script.net.inner, backend=backend)  # type: ignore[assignment]


def forward_before(script: Script, backend: str) -> None:
    script.call = torch.compile(script.net.forward, backend=backend)
    script.warm()


def model_after(script: Script, backend: str) -> None:
    script.call = torch.compile(script.model, backend=backend)


def function_after(script: Script, backend: str) -> None:
    script.call = torch.compile(script.forward, backend=backend)


def step_after(script: Script, backend: str) -> None:
    script.call = torch.compile(script.model.forward, backend=backend)
    script.step = torch.compile(script.update, backend=backend)


BEFORE = (model_before, method_before, part_before, forward_before)
AFTER = (model_after, function_after, step_after)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """What the compiler imports when it is first used is imported here, and not by every worker."""
    torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.zeros(3, 2)).sum().backward()


@pytest.fixture(scope="module")
def expected() -> Values:
    script = Script()
    script.train()
    return values(script.net)


def compiled(team: Team, way: Callable[[Script, str], None], backend: str) -> tuple[Values, float, int]:
    """The trained values, how far the compiled model is from the plain one with these, and how much was compiled."""
    torch._dynamo.reset()
    counters.clear()
    script = Script()
    if way in BEFORE:
        way(script, backend)
    script.setup(team)
    if way in AFTER:
        way(script, backend)
    script.train(team)
    found = {name.replace("_orig_mod.", ""): value.clone() for name, value in script.model.state_dict().items()}
    plain = Net().double()
    plain.load_state_dict(found)
    with torch.no_grad():
        gap = float((script.call(ONES) - plain(ONES)).abs().max())
    return values(plain), gap, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("way", [*BEFORE, *AFTER], ids=lambda way: way.__name__)
@pytest.mark.parametrize("strategy", EXACT)
def test_a_compiled_model_trains_as_an_uncompiled_one(
    strategy: str, way: Callable[[Script, str], None], expected: Values
) -> None:
    backend = "aot_eager" if way in (model_before, model_after) else "eager"
    for found, gap, graphs in run_team(compiled, 2, way, backend, launch=under(EXACT[strategy], None)):
        assert apart(found, expected) < 1e-9
        assert gap < 1e-9
        assert strategy in SPLIT or graphs, "nothing was compiled"


@pytest.mark.parametrize("strategy", ["async", "k-sync:k=1"])
@pytest.mark.parametrize("way", [model_before, model_after], ids=lambda way: way.__name__)
def test_a_compiled_model_uses_the_version_that_was_pulled(strategy: str, way: Callable[[Script, str], None]) -> None:
    for _, gap, graphs in run_team(compiled, 2, way, "aot_eager", launch=under(strategy, None)):
        assert gap < 1e-9, "it computes with an older version"
        assert graphs


def cancelled(team: Team) -> tuple[int, int, int]:
    torch._dynamo.reset()
    counters.clear()
    script = Script()
    script.setup(team)
    model_after(script, "aot_eager")
    left = seen = 0
    for _ in range(4):
        for x, y in script.loader:
            with team.step() as step:
                cross_entropy(script.call(x), y).backward()
                script.optimizer.step()
                script.optimizer.zero_grad()
                seen += len(x)
            left += step.cancelled
    return left, seen, len(counters["graph_break"])


def test_a_step_of_a_compiled_model_can_be_cancelled_and_its_graph_stays_whole() -> None:
    results = run_team(cancelled, 3, launch=under("k-sync:k=2", None, slow={2: Slowness(factor=8.0)}))
    assert sum(left for left, _, _ in results) > 0
    assert [breaks for _, _, breaks in results] == [0, 0, 0]
    # What was cancelled was leased again.
    assert sum(seen for _, seen, _ in results) >= 4 * SAMPLES


def noted(team: Team, part: bool) -> list[str]:
    said: list[str] = []
    team._worker.say = said.append  # type: ignore[method-assign]
    script = Script()
    if part:
        part_before(script, "eager")
    script.setup(team)
    loss = torch.compile(lambda x, y: cross_entropy(script.model(x), y, reduction="sum") / 48, backend="aot_eager")
    for x, y in script.loader:
        loss(x, y).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
    return said


def test_a_loss_inside_of_a_compiled_function_is_said_to_be_averaged_by_samples() -> None:
    said, others = run_team(noted, 2, False, launch=under("all-reduce"))
    (sentence,) = said
    assert "averaged by numbers of samples, since it comes out of a compiled function" in sentence
    assert others == []


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_compiled_model_that_is_split_is_said_to_run_uncompiled(strategy: str) -> None:
    said, _ = run_team(noted, 2, True, launch=under(EXACT[strategy], None))
    assert sum("torch.compile is ignored" in sentence for sentence in said) == 1


def copied(team: Team) -> bool:
    script = Script()
    script.setup(team)
    model_after(script, "aot_eager")
    script.train(team, epochs=1)
    team.barrier()
    copy_of: Any = copy.deepcopy(script.call)
    before = copy_of(ONES).detach()
    with torch.no_grad():
        for parameter in copy_of.parameters():
            parameter.zero_()
    after, own = copy_of(ONES), script.call(ONES)
    return bool(torch.equal(before, own) and not after.any())


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_copy_of_a_compiled_model_has_parameters_of_its_own(strategy: str) -> None:
    assert run_team(copied, 2, launch=under(strategy, None)) == [True, True]


def closed(team: Team) -> bool:
    script = Script()
    script.setup(team)
    script.train(team, epochs=1)
    team.close()
    counters.clear()
    torch.compile(Net().double(), backend="eager")(ONES)
    return counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("strategy", [EXACT["pipeline"], EXACT["tensor"]])
def test_after_a_team_that_splits_its_model_is_closed_models_are_compiled_again(strategy: str) -> None:
    assert run_team(closed, 2, launch=under(strategy, None)) == [True, True]
