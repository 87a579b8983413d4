"""Several replicas that are each on several hosts train as one process does; each worker has its own parts only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import Host, hosts
from helpers.machines import Spread
from helpers.meshes import parts_amiss
from helpers.split_models import (
    adam,
    apart,
    dies,
    launched,
    learned,
    made,
    same_values,
    score,
    struck,
    train,
    words,
)
from helpers.teams import run_spread
from torch.utils.data import DataLoader

from paceline import Mismatch, Team
from paceline.errors import WorkerLost
from paceline.events import Brought, Update

PIPELINES, LAYERS = "mesh:data=2,pipeline=2,microbatches=2", "mesh:data=2,tensor=2"


@pytest.fixture(scope="module")
def four() -> Iterator[list[Host]]:
    with hosts(4) as made:
        yield made


def losses(team: Team, kind: str, steps: int) -> list[float]:
    assert len(team._members.machines) == 4
    return train(team, kind, steps, batch=20)


@pytest.mark.parametrize(("kind", "strategy"), [("transformer", PIPELINES), ("small", LAYERS)])
def test_losses_are_those_of_the_plain_model(kind: str, strategy: str, four: list[Host]) -> None:
    with Spread(losses, four, 1, kind, 20, strategy=strategy) as team:
        found = team.values(120.0)
    assert found[0] == found[1]
    assert found[2] == found[3]
    mean = [(first + second) / 2 for first, second in zip(found[0], found[2], strict=True)]
    assert apart(mean, train(None, kind, 20, batch=20)) < 1e-5


def test_a_checkpoint_goes_from_split_to_split(tmp_path: Path) -> None:
    """In the last batch of each epoch is one sample, of which one replica has none; gradients are clipped."""
    path, later = tmp_path / "pipeline.pt", tmp_path / "tensor.pt"
    first = run_spread(learned, "abab", None, path, launch=launched(PIPELINES))
    assert all(same_values(first[0], other, 0.0) for other in first)
    assert same_values(first[0], learned(None, None, None))
    second = run_spread(learned, "abcd", path, later, launch=launched(LAYERS))
    assert all(same_values(second[0], other, 0.0) for other in second)
    assert same_values(second[0], learned(None, path, None))
    third = run_spread(learned, "ab", later, None, launch=launched("pipeline:stages=2,microbatches=2"))
    assert same_values(third[1], learned(None, later, None))


def looked_at(team: Team | None) -> dict[str, Any]:
    """What a worker has after two updates, each of a sum of two unlike batches, and what is refused."""
    model: Any = made("small", 0 if team is None else team.rank).double()
    optimizer: Any = adam(model)
    loader: Any = DataLoader(words(50), batch_size=20)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            score(model(x), y).backward()
            if number:
                optimizer.step()
                optimizer.zero_grad()
    found: dict[str, Any] = {
        "here": {name for name, value in model.named_parameters() if not value.isnan().any()},
        "held": sum(value.untyped_storage().nbytes() for value in model.parameters()),
        "whole": {name: value.clone() for name, value in model.state_dict().items()},
        "refused": "",
    }
    if team is None:
        return found
    x, y = words()[:4]
    score(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters() if team.rank >= 2 else ():
            if parameter.untyped_storage().nbytes() == parameter.nbytes:
                parameter.mul_(0.5)
    try:
        optimizer.step()
    except Mismatch as error:
        found["refused"] = str(error)
    team.barrier()
    return found


def test_each_worker_has_its_own_stages_and_replicas_cannot_be_changed_unlike() -> None:
    found = run_spread(looked_at, "abcd", launch=launched(PIPELINES))
    plain = looked_at(None)
    names = dict(made("small").double().named_parameters())
    for stage in range(2):
        one, other = found[stage], found[stage + 2]
        assert one["here"] == other["here"]
        assert set(names) > one["here"]
        assert abs(one["held"] - sum(names[name].nbytes for name in one["here"])) < 8 * len(names)
    for one in found:
        assert same_values(one["whole"], plain["whole"])
        assert "were changed outside of the optimizer, by rank" in one["refused"]


@pytest.mark.parametrize("strategy", [PIPELINES, LAYERS])
def test_a_worker_that_dies_is_named_on_all_machines(strategy: str) -> None:
    for text in run_spread(dies, "abcd", 3, launch=launched(strategy), may_die=range(4))[:3]:
        assert "WorkerLost: rank 3 " in text, text


# -- a parameter server between replicas -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "split", "servers"),
    [
        ("k-sync:k=1", "pipeline=2,microbatches=2", None),
        ("async", "tensor=2", "lead"),
        ("k-batch-async:k=2", "tensor=2", "0:1,2:2"),
    ],
)
def test_updates_are_of_whole_gradients_and_a_replica_has_parts_of_one_version(
    sync: str, split: str, servers: str | None, four: list[Host], tmp_path: Path
) -> None:
    strategy = f"mesh:data=2,{split},sync={sync}"
    with Spread(losses, four, 1, "small", 6, strategy=strategy, servers=servers, folder=tmp_path / "run") as team:
        found = team.values(120.0)
        events = team.events()
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert parts_amiss(events, [[0, 1], [2, 3]], apart=[1, 2, 3]) == []
    assert any(isinstance(event, Update) and event.pushes for event in events)
    assert {event.rank for event in events if isinstance(event, Brought)} == {0, 1, 2, 3}
    assert not list((tmp_path / "run").glob("machine-*"))


@pytest.mark.parametrize("split", ["pipeline=2,microbatches=2", "tensor=2"])
def test_checkpoints_of_a_parameter_server_are_the_plain_model_s(split: str, tmp_path: Path) -> None:
    path, later = tmp_path / "first.pt", tmp_path / "second.pt"
    launch = launched(f"mesh:data=2,{split},sync=sync")
    for before, after in ((None, path), (path, later)):
        found = run_spread(learned, "abcd", before, after, launch=launch)
        assert all(same_values(found[0], other, 0.0) for other in found)
        assert same_values(found[0], learned(None, before, None))
    content = torch.load(later, weights_only=True)
    assert content["version"] == 12
    assert set(content["optimizer"]["state"]) == set(range(len(list(made("small").parameters()))))


def own_parts(team: Team) -> tuple[set[str], int]:
    """The parameters that a worker of a pipeline has after an update, and whether all are there at the end."""
    model, loader = made("small", team.rank), DataLoader(words(40), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    here = {name for name, value in model.named_parameters() if not value.isnan().any()}
    team.close()
    return here, sum(bool(value.isnan().any()) for value in model.parameters()) + len(optimizer.state)


def test_with_a_parameter_server_each_worker_has_its_own_stages_until_the_end() -> None:
    found = run_spread(own_parts, "abcd", launch=launched(f"{PIPELINES},sync=sync"))
    names = {name for name, _ in made("small").named_parameters()}
    for stage in range(2):
        assert found[stage][0] < names
        assert found[stage][0] | found[1 - stage][0] == names
    assert {count for _, count in found} == {len(names)}


def test_a_replica_that_is_lost_is_spared_if_its_machines_have_no_servers() -> None:
    launch = launched(f"{LAYERS},sync=async", servers="0:1,1:1")
    found = run_spread(struck, "abcd", 3, 5, launch=launch, may_die=[2, 3])
    assert [kind for kind, _, _ in found[:2]] == ["", ""]
    assert found[2][0] == WorkerLost.__name__
    assert found[2][2] == (3,)
