"""A model on the meta device gets its values stage by stage: it may be larger than any machine's memory."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import Host, hosts
from helpers.machines import Failure, Spread
from helpers.split_models import MODELS, adam, apart, launched, made, same_values, score
from helpers.teams import run_spread, run_team
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team, UsageError


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


def trained(team: Team | None, kind: str, steps: int, init: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the model's values; in a team the model is made on the meta device."""
    torch.manual_seed(0)
    with torch.device("cpu" if team is None else "meta"):
        model: Any = MODELS[kind][0]()
    optimizer: Any = adam(model)
    loader: Any = DataLoader(MODELS[kind][1](), batch_size=20, shuffle=True)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader, init=init)
    elif init is not None:
        model.load_state_dict(torch.load(init)["model"])
    if init is not None:
        torch.manual_seed(1)  # the plain model has drawn random numbers, and this one none
    losses: list[float] = []
    for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader, steps)), steps):
        loss = score(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "places", "strategy", "tolerance"),
    [
        (
            "convnet",
            "aab",
            "pipeline:stages=3,microbatches=1",
            2e-2,
        ),  # Adam magnifies noise of biases before batch norm
        ("chain", "ab", "pipeline:stages=2,microbatches=4", 1e-5),
        ("chain", "", "all-reduce", 1e-5),
    ],
)
def test_a_model_initialised_by_its_modules_is_the_plain_one(
    kind: str, places: str, strategy: str, tolerance: float
) -> None:
    plain, values = trained(None, kind, 4)
    launch = launched(strategy)
    found = run_spread(trained, places, kind, 4, launch=launch) if places else run_team(trained, 1, kind, 4)
    for ours, whole in found:
        assert apart(ours, plain) < 1e-5  # the order of the batches is drawn after the model is made
        assert same_values(whole, values, tolerance)


def test_a_checkpoint_gives_each_worker_the_values_of_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "before.pt"
    torch.save({"model": made("transformer", 7).state_dict(), "optimizer": {}}, path)
    plain, values = trained(None, "transformer", 4, path)
    for ours, whole in run_spread(trained, "ab", "transformer", 4, path, launch=launched("pipeline:stages=2")):
        assert apart(ours, plain) < 1e-5
        assert same_values(whole, values, 2e-2)  # Adam magnifies noise of biases of keys


class Odd(nn.Module):
    """Has what nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(12, 61), nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x * self.mask) * self.scale
        return result


def own_values(module: nn.Module) -> None:
    if isinstance(module, Odd):
        module.scale.fill_(1.0)
        module.mask.fill_(1.0)  # type: ignore[operator]
    else:
        module.reset_parameters()  # type: ignore[operator]


def forgetful(module: nn.Module) -> None:
    if isinstance(module, Odd):
        module.scale.fill_(1.0)
    else:
        module.reset_parameters()  # type: ignore[operator]


def refusals(team: Team) -> list[str]:
    """What is said of models and functions that cannot be used, and at last nothing."""
    found = []
    for init in (None, 3, "nowhere.pt", forgetful, own_values):
        torch.manual_seed(0)
        with torch.device("meta"):
            model: Any = Odd()
        try:
            team.setup(model, adam(model), init=init)
        except UsageError as error:
            found.append(str(error))
        else:
            found.append("")
    torch.manual_seed(0)
    assert torch.equal(model.inner.weight, Odd().inner.weight)
    return found


def test_what_has_no_values_is_refused_by_name() -> None:
    without, number, file, left, fine = run_team(refusals, 1)[0]
    assert "the model itself (Odd)" in without and "reset_parameters by which 'scale'" in without
    assert "init is a int" in number
    assert "'nowhere.pt', which is no file" in file
    assert "'mask'" in left and "still has no values" in left
    assert fine == ""


def too_early(team: Team) -> list[str]:
    """What is said of values that are not there yet."""
    with torch.device("meta"):
        model: Any = MODELS["chain"][0]()
    model, optimizer = team.setup(model, adam(model))
    found, x = [], MODELS["chain"][1]().tensors[0]

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    for early in (evaluate, model.state_dict, lambda: team.save("never.pt"), optimizer.step):
        try:
            early()
        except UsageError as error:
            found.append(str(error))
    return found


def test_values_that_are_not_there_yet_are_not_given_out() -> None:
    for rank, said in enumerate(run_spread(too_early, "ab", launch=launched("pipeline:stages=2"))):
        assert len(said) == (4 if rank == 0 else 3)  # only the lead saves
        assert all("at the first training call" in text for text in said)


# -- larger than a machine -------------------------------------------------------------------------------------------

WIDTH, LAYERS = 1440, 12
PARAMETERS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
"""Bytes; training with Adam needs four times as many."""
LIMIT = int(3 * PARAMETERS)
"""Private memory (RLIMIT_DATA) that a host may have besides what a process has at its start."""


def limited(team: Team, steps: int) -> dict[str, Any]:
    """Trains under a limit of memory."""
    before = _status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (before + LIMIT, before + LIMIT))
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = team.setup(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(steps):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step < steps - 1:
            optimizer.zero_grad()
    own = [one for one in model.parameters() if one in optimizer.state]
    held = sum(one.untyped_storage().nbytes() for one in model.parameters())
    held += sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    held += sum(one.nbytes for values in optimizer.state.values() for one in values.values() if one.dim())
    team.close()
    refused = ""
    try:
        model(rows)
    except UsageError as error:
        refused = str(error)
    return {
        "refused": refused,
        "losses": losses,
        "share": 4 * sum(one.nbytes for one in own),
        "held": held,
        "own": len(own),
    }


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def test_a_model_that_fits_on_no_host_trains_on_three(three: list[Host]) -> None:
    with Spread(limited, three, 1, 3, strategy="pipeline:stages=3,microbatches=3") as team:
        found = team.values(120.0)
    assert sum(one["own"] for one in found) == 2 * LAYERS
    assert sum(one["share"] for one in found) == 4 * PARAMETERS > LIMIT > max(one["share"] for one in found)
    for one in found:
        assert "keeps its own stages only" in one["refused"]
        assert one["losses"] == found[0]["losses"]
        assert one["losses"][-1] < one["losses"][0]
        assert abs(one["held"] / one["share"] - 1) < 0.1
    with Spread(limited, three[:1], 1, 3) as team:
        (alone,) = team.results()
    assert isinstance(alone, Failure)
    assert "allocate memory" in alone.message or "MemoryError" in alone.kind
