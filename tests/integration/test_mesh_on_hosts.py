"""Replicas that are each split inside a host, with all-reduce or a parameter server between the hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import Host, hosts
from helpers.machines import Spread
from helpers.meshes import parts_amiss
from helpers.split_models import apart, launched, learned, same_values, struck, train
from helpers.teams import run_spread, run_team

from paceline import Team
from paceline.errors import WorkerLost
from paceline.events import Brought, Leave, Send, Update


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def losses(team: Team, kind: str, steps: int, options: dict[str, Any]) -> list[float]:
    assert len(team._members.machines) == 2
    return train(team, kind, steps, batch=20, **options)


@pytest.mark.parametrize(
    ("kind", "split", "options"),
    [
        ("transformer", "tensor=2", {}),
        ("small", "pipeline=2,microbatches=2", {}),
        ("convnet", "tensor=2", {"sync_batch_norm": True}),
        ("transformer", "tensor=2,sync=sync", {}),
        ("small", "pipeline=2,microbatches=2,sync=sync", {}),
    ],
)
def test_losses_are_those_of_the_plain_model(kind: str, split: str, options: dict[str, Any], two: list[Host]) -> None:
    with Spread(losses, two, 2, kind, 20, options, strategy=f"mesh:data=2,{split}") as team:
        found = team.values(120.0)
    assert found[0] == found[1]
    assert found[2] == found[3]
    mean = [(first + second) / 2 for first, second in zip(found[0], found[2], strict=True)]
    assert apart(mean, train(None, kind, 20, batch=20)) < 1e-5


def alone(team: Team) -> list[float]:
    return train(team, "convnet", 20, batch=20)


def test_without_synchronised_batch_norm_losses_are_those_of_one_machine(two: list[Host]) -> None:
    strategy = "mesh:data=2,pipeline=2,microbatches=2"
    with Spread(losses, two, 2, "convnet", 20, {}, strategy=strategy) as team:
        found = team.values(120.0)
    assert found == run_team(alone, 4, launch=launched(strategy), timeout=120)


# -- a parameter server between machines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "split", "servers"),
    [
        ("k-sync:k=1", "tensor=2", "lead"),
        ("k-batch-sync:k=1", "tensor=2", "lead"),
        ("async", "pipeline=2,microbatches=2", "each"),
        ("k-async:k=2", "tensor=2", "all"),
        ("k-batch-async:k=2", "tensor=2", "0:1,1:1"),
        ("ssp:s=1", "tensor=2", "lead"),
        ("groups:size=2", "tensor=2", "lead"),
        ("adaptive:of=k-async,start=1", "tensor=2", "lead"),
    ],
)
def test_every_policy_makes_updates_of_whole_gradients(
    sync: str, split: str, servers: str, two: list[Host], tmp_path: Path
) -> None:
    strategy = f"mesh:data=2,{split},sync={sync}"
    folder = tmp_path / "run"
    with Spread(losses, two, 2, "small", 6, {}, strategy=strategy, servers=servers, folder=folder) as team:
        found = team.values(120.0)
        events = team.events()
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all(torch.isfinite(torch.tensor(one)).all() for one in found)
    assert parts_amiss(events, [[0, 1], [2, 3]], apart=[2, 3]) == []
    assert any(isinstance(event, Update) and event.pushes for event in events)
    assert {event.rank for event in events if isinstance(event, Brought)} == {0, 1, 2, 3}
    assert {event.rank for event in events if isinstance(event, Leave)} == {0, 1, 2, 3}
    # What crosses the network is a replica's gradient, under its first worker's rank.
    assert {event.rank for event in events if isinstance(event, Send)} <= {0, 2}
    assert not list(folder.glob("machine-*"))


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["all-reduce", "sync"])
def test_every_machine_has_the_same_values_and_a_checkpoint_goes_from_split_to_split(
    sync: str, two: list[Host], tmp_path: Path
) -> None:
    path, later = tmp_path / "tensor.pt", tmp_path / "pipeline.pt"
    with Spread(learned, two, 2, None, path, strategy=f"mesh:data=2,tensor=2,sync={sync}") as team:
        first = team.values(120.0)
    assert all(same_values(first[0], other, 0.0) for other in first)
    assert same_values(first[0], learned(None, None, None))
    strategy = f"mesh:data=2,pipeline=2,microbatches=2,sync={sync}"
    with Spread(learned, two, 2, path, later, strategy=strategy) as team:
        second = team.values(120.0)
    assert all(same_values(second[0], other, 0.0) for other in second)
    assert same_values(second[0], learned(None, path, None))
    assert torch.load(later, weights_only=True)["version"] == 12


def test_machines_may_have_different_numbers_of_replicas() -> None:
    found = run_spread(learned, "aaaabb", None, None, launch=launched("mesh:data=3,tensor=2"))
    assert all(same_values(found[0], other, 0.0) for other in found)
    assert same_values(found[0], learned(None, None, None))


def decayed(team: Team | None) -> dict[str, torch.Tensor]:
    return learned(team, None, None, decay=0.9)


def test_changes_by_hand_count_on_a_machine_without_samples_too() -> None:
    found = run_spread(decayed, "aabb", launch=launched("mesh:data=2,pipeline=2,microbatches=2"))
    assert all(same_values(found[0], other, 0.0) for other in found)
    assert same_values(found[0], decayed(None))


# -- faults and what cannot be ---------------------------------------------------------------------------------------


def test_with_a_policy_that_can_spare_a_replica_the_others_go_on() -> None:
    launch = launched("mesh:data=2,tensor=2,sync=async", servers="lead")
    found = run_spread(struck, "aabb", 3, 5, launch=launch, may_die=[2, 3])
    assert [kind for kind, _, _ in found[:2]] == ["", ""]


@pytest.mark.parametrize("split", ["tensor=2", "pipeline=2,microbatches=2"])
def test_a_worker_that_dies_is_named_on_all_machines(split: str) -> None:
    launch = launched(f"mesh:data=2,{split}")
    for kind, message, ranks in run_spread(struck, "aabb", 3, 9, launch=launch, may_die=[3])[:3]:
        assert kind == WorkerLost.__name__, message
        assert ranks == (3,)
