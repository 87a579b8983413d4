"""A replica that is split inside its layers over hosts trains as one process does; each worker has its own parts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import Host, hosts
from helpers.huge_pages import prepare_to_fork
from helpers.huggingface import gpt2, samples
from helpers.machines import Spread
from helpers.split_models import adam, apart, dies, launched, learned, made, same_values, score, train, words
from helpers.teams import run_spread
from torch.utils.data import DataLoader

from paceline import Team, UsageError
from paceline.collectives.machines_group import MachinesGroup
from paceline.collectives.operation import Op
from paceline.strategies.mesh_coord import join_replica
from paceline.strategies.split_checks import log_calls


@pytest.fixture(scope="module", autouse=True)
def transformers_is_loaded() -> None:
    """Once here instead of once in every worker that is forked."""
    importlib.import_module("transformers.models.gpt2")
    gpt2()
    prepare_to_fork()


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def losses(team: Team, kind: str, steps: int) -> list[float]:
    assert len(team._members.machines) == 2
    return train(team, kind, steps, batch=20)


@pytest.mark.parametrize(
    ("kind", "each", "strategy"),
    [
        ("transformer", 1, "tensor:degree=2"),
        ("convnet", 1, "tensor:degree=2"),
        ("small", 2, "mesh:data=1,pipeline=2,tensor=2,microbatches=2"),
    ],
)
def test_losses_are_those_of_the_plain_model(kind: str, each: int, strategy: str, two: list[Host]) -> None:
    with Spread(losses, two, each, kind, 20, strategy=strategy) as team:
        found = team.values(120.0)
    assert all(one == found[0] for one in found)
    assert apart(found[0], train(None, kind, 20, batch=20)) < 1e-5


def hugging_face(team: Team | None, steps: int) -> list[float]:
    """Losses of a causal language model that computes them itself."""
    torch.manual_seed(0 if team is None else team.rank)
    if team is None or team.is_lead:
        torch.manual_seed(0)
    model: Any = gpt2()
    optimizer: Any = adam(model)
    loader: Any = DataLoader(samples("gpt2", 40), batch_size=4)  # type: ignore[arg-type]
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    found: list[float] = []
    while len(found) < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("places", "strategy"),
    [
        ("aabb", "tensor:degree=4"),
        ("abc", "pipeline:stages=3,microbatches=2"),
        ("aabb", "mesh:data=1,pipeline=2,tensor=2,microbatches=2"),
    ],
)
def test_a_hugging_face_model_has_the_losses_of_the_plain_one(places: str, strategy: str) -> None:
    found = run_spread(hugging_face, places, 20, launch=launched(strategy), timeout=120.0)
    assert all(one == found[0] for one in found)
    assert apart(found[0], hugging_face(None, 20)) < 1e-5


# -- collectives -----------------------------------------------------------------------------------------------------

SIZES = (1, 1000, 5000, 40_000, 300_001)


def collectives(team: Team) -> list[list[torch.Tensor]]:
    """What all members get of each kind, in a group of all workers."""
    members = team._members
    calls = log_calls(members, members.machines[members.machine])
    machines = MachinesGroup(members, print)
    communicator = join_replica(members, list(range(members.size)), print, calls, machines)
    found = []
    for size in SIZES:
        own = torch.randn(size, generator=torch.Generator().manual_seed(members.rank))
        total, gathered = own.clone(), [torch.empty(size) for _ in range(members.size)]
        communicator.all_reduce(total, Op.SUM, "shared")
        communicator.all_gather(gathered, own, "shared")
        part = torch.empty(size)
        communicator.reduce_scatter(part, gathered, Op.SUM, "shared")
        from_first = own.clone()
        communicator.broadcast(from_first, 0)
        found.append([total, *gathered, part / members.size, from_first])
    team.barrier()
    machines.close()
    return found


@pytest.mark.parametrize("places", ["ab", "aabb", "aab", "abcd"])
def test_collectives_between_machines_have_equal_bits_everywhere(places: str) -> None:
    found = run_spread(collectives, places)
    for index, size in enumerate(SIZES):
        own = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(len(places))]
        for rank, results in enumerate(found):
            total, *gathered, part, from_first = results[index]
            assert torch.equal(total, found[0][index][0])
            assert torch.allclose(total, torch.stack(own).sum(0), atol=1e-5)
            assert all(map(torch.equal, gathered, own))
            assert torch.allclose(part, own[rank], atol=1e-5)
            assert torch.equal(from_first, own[0])


# -- state -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_from_split_to_split(tmp_path: Path) -> None:
    path, later = tmp_path / "tensor.pt", tmp_path / "mesh.pt"
    first = run_spread(learned, "ab", None, path, launch=launched("tensor:degree=2"))
    assert same_values(first[0], first[1], 0.0)
    assert same_values(first[0], learned(None, None, None))
    second = run_spread(learned, "aabb", path, later, launch=launched("mesh:data=1,pipeline=2,tensor=2,microbatches=2"))
    assert all(same_values(values, learned(None, path, None)) for values in second)
    third = run_spread(learned, "ab", later, None, launch=launched("tensor:degree=2"))
    assert same_values(third[1], learned(None, later, None))


def looked_at(team: Team) -> dict[str, Any]:
    """What a worker has, what is refused, and the model that a closed team leaves."""
    model: Any = made("small").double()
    loader: Any = DataLoader(words(), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(value.untyped_storage().nbytes() for value in model.parameters())
    state = sum(one.nbytes for values in optimizer.state.values() for one in values.values() if one.dim())
    x, y = words()[:4]
    refused = ""
    if team.world_size == 2:
        score(model(x), y).backward()
        with torch.no_grad():
            model.blocks[0].think[0].weight.mul_(0.5)
        try:
            optimizer.step()
        except UsageError as error:
            refused = str(error)
        with torch.no_grad():
            model.blocks[0].think[0].weight.mul_(2.0)
    team.close()
    with torch.no_grad():
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        answer = model(x)
    return {
        "held": held,
        "state": state,
        "refused": refused,
        "whole": whole,
        "answer": answer,
        "moments": {name: optimizer.state[value]["exp_avg"] for name, value in model.named_parameters()},
    }


@pytest.mark.parametrize(
    ("places", "strategy", "share"),
    [("ab", "tensor:degree=2", 0.7), ("aabb", "mesh:data=1,pipeline=2,tensor=2,microbatches=2", 0.6)],
)
def test_a_worker_has_its_parts_and_a_closed_teams_model_is_whole(places: str, strategy: str, share: float) -> None:
    found = run_spread(looked_at, places, launch=launched(strategy))
    plain = made("small").double()
    size = sum(value.nbytes for value in plain.parameters())
    plain.load_state_dict(found[0]["whole"])
    with torch.no_grad():
        answer = plain(words()[:4][0])
    for one in found:
        assert one["held"] < share * size
        assert one["state"] < 2 * share * size
        assert ("sharded over workers" in one["refused"]) == (len(places) == 2)
        assert same_values(one["whole"], found[0]["whole"], 0.0)
        assert torch.allclose(one["answer"], answer)
        assert {name: one.shape for name, one in one["moments"].items()} == {
            name: value.shape for name, value in plain.named_parameters()
        }


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_dies_is_named_on_all_machines(victim: int) -> None:
    launch = launched("tensor:degree=3")
    for rank, text in enumerate(run_spread(dies, "aab", victim, launch=launch, may_die=range(3))):
        if rank != victim:
            assert f"WorkerLost: rank {victim} " in text, text
