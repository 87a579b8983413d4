"""A team's model as plain torch knows it: every name of a tensor in its state, and copies of the object itself."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.split_models import launched
from helpers.teams import run_spread, run_team
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team, UsageError

WORDS, WIDTH = 64, 32
SPLITS = {
    "tensor:degree=2": 2,
    "pipeline:stages=2,microbatches=2": 2,
    "mesh:data=2,tensor=2": 4,
    "mesh:data=1,pipeline=2,microbatches=2,tensor=2": 4,
    "mesh:data=2,pipeline=2,microbatches=2": 4,
    "mesh:data=2,tensor=2,sync=async": 4,
}
WHOLE = ("all-reduce", "sync", "async", "k-sync:k=1", "mesh:data=2")


class Tied(nn.Module):
    """One weight under three names, one of which nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.embed = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.embed.weight = self.shared.weight
        self.aside = nn.Module()
        self.aside.table = self.shared.weight
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 8 * WIDTH)
        self.unused.weight = self.up.weight
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x).mean(1)
        result: torch.Tensor = self.head(self.down(torch.relu(self.up(hidden))))
        return result


def trained(team: Team | None, steps: int = 2) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model: Any = Tied()
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p is not model.unused.bias], lr=0.1)
    x = torch.arange(64).view(16, 4) % WORDS
    loader: Any = DataLoader(TensorDataset(x, x[:, 0] % 7), batch_size=8)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader, global_batch=8)
    for inputs, labels in loader:
        if not steps:
            break
        steps -= 1
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def numbers(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in state.items()}


def state_of(team: Team, path: str) -> dict[str, Any]:
    model, _ = trained(team)
    parts = {name: numbers(model.get_submodule(name).state_dict()) for name in ("aside", "shared", "unused")}
    team.barrier()
    team.save(path)
    team.barrier()
    loaded = torch.load(path)["model"]
    team.load(path)
    return {
        "state": numbers(model.state_dict()),
        "saved": numbers(loaded),
        "parts": {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()},
    }


@pytest.mark.parametrize("strategy", SPLITS)
def test_every_name_of_a_tied_weight_is_saved_whole(strategy: str, tmp_path: Path) -> None:
    plain = numbers(trained(None)[0].state_dict())
    exact = "async" not in strategy
    for told in run_team(state_of, SPLITS[strategy], str(tmp_path / "ck.pt"), launch=launched(strategy)):
        assert list(told["state"]) == list(told["saved"]) == list(plain)
        for name, value in plain.items():
            assert torch.tensor(told["state"][name]).shape == torch.tensor(value).shape, name
            assert told["state"][name] == told["saved"][name], name
            if exact:
                assert torch.allclose(torch.tensor(told["saved"][name]), torch.tensor(value), atol=1e-5), name
        for name, value in told["parts"].items():
            assert torch.tensor(value).shape == torch.tensor(plain[name]).shape, name
            if exact:  # else the run went on in between
                assert value == told["saved"][name], name


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copied(team: Team, how: str) -> tuple[str, str]:
    """What a copy of the model, and of a part of it, is refused with; empty if it has the model's values."""
    model, _ = trained(team)
    said = []
    for one in (model, model.up):
        make: Any = pickled if how == "save" else copy.deepcopy
        try:
            other = make(one)
        except UsageError as error:
            said.append(str(error))
        else:
            assert numbers(other.state_dict()) == numbers(one.state_dict())
            assert not {"__deepcopy__", "__reduce_ex__"} & {name for part in other.modules() for name in vars(part)}
            assert not any(part._forward_pre_hooks for part in other.modules())
            with torch.no_grad():
                next(iter(other.parameters())).add_(1.0)  # of its own
            assert numbers(other.state_dict()) != numbers(one.state_dict())
            said.append("")
    team.barrier()
    team.close()
    again = pickled(model) if how == "save" else copy.deepcopy(model)
    assert numbers(again.state_dict()) == numbers(model.state_dict())
    again(torch.zeros(2, 4, dtype=torch.long))
    return said[0], said[1]


@pytest.mark.parametrize("how", ["save", "deepcopy"])
@pytest.mark.parametrize("strategy", [*SPLITS, *WHOLE])
def test_a_copy_of_the_model_has_its_values_or_is_refused_in_a_sentence(strategy: str, how: str) -> None:
    for refusals in run_team(copied, SPLITS.get(strategy, 2), how, launch=launched(strategy)):
        if strategy in WHOLE:
            assert refusals == ("", "")
        elif how == "save" or "tensor" in strategy:
            for refusal in refusals:
                assert "team.save" in refusal
                assert "state_dict" in refusal
                assert "\n" not in refusal
        else:  # of a pipeline's model; the copy itself cannot be called
            assert refusals == ("", "")


def normed(team: Team, how: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, _ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_batch_norm=True)
    other = pickled(model) if how == "save" else copy.deepcopy(model)
    if team.is_lead:
        other(torch.randn(8, 4)).sum().backward()  # without the others
    assert numbers(other[0].state_dict()) == numbers(model[0].state_dict())


@pytest.mark.parametrize("how", ["save", "deepcopy"])
def test_a_copy_with_synchronised_batch_norm_is_not_the_teams(how: str) -> None:
    run_team(normed, 2, how, launch=launched("all-reduce"))


@pytest.mark.parametrize("how", ["save", "deepcopy"])
def test_a_model_that_is_sharded_over_machines_says_so_as_well(how: str) -> None:
    for refusals in run_spread(copied, "ab", how, launch=launched("mesh:data=2")):
        assert all("team.save" in refusal and "\n" not in refusal for refusal in refusals), refusals


def damaged(team: Team, path: str) -> str:
    model, _ = trained(team)
    before = numbers(model.state_dict())
    team.barrier()
    try:
        team.load(path)
    except UsageError as error:
        assert numbers(model.state_dict()) == before
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "tensor:degree=2"])
def test_a_damaged_checkpoint_is_one_sentence_on_all_workers(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "ck.pt"
    path.write_bytes(b"PK" + bytes(3000))
    for said in run_team(damaged, 2, str(path), launch=launched(strategy)):
        assert str(path) in said
        assert "\n" not in said


def damaged_on_one(team: Team, path: str) -> str:
    return damaged(team, path if team.rank == 0 else f"{path}.absent")


def test_machines_without_the_file_are_told_that_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "ck.pt"
    path.write_bytes(b"PK" + bytes(3000))
    for said in run_spread(damaged_on_one, "ab", str(path), launch=launched("all-reduce")):
        assert str(path) in said
        assert "\n" not in said
