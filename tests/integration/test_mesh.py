"""Replicas that are split themselves train as one process would; under any policy an update is of whole gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.checker import events_of
from helpers.forks import playing
from helpers.meshes import parts_amiss
from helpers.split_models import MODELS, adam, apart, launched, made, score, train
from helpers.support import Outcome, write_script
from helpers.teams import run_team
from torch.utils.data import DataLoader

from paceline import Team
from paceline.events import Brought, Event, Push, Update, decode

REPLICAS = [[0, 1], [2, 3]]


def losses(team: Team, kind: str, steps: int, options: dict[str, Any]) -> list[float]:
    return train(team, kind, steps, batch=20, **options)


def mean(found: Sequence[Sequence[float]]) -> list[float]:
    """Of the replicas' losses, each of one half of the batch."""
    return [(first + second) / 2 for first, second in zip(found[0], found[2], strict=True)]


@pytest.mark.parametrize(
    ("kind", "split", "options"),
    [
        ("small", "pipeline=2,microbatches=4", {}),
        ("transformer", "tensor=2", {}),
        ("convnet", "tensor=2", {"sync_batch_norm": True}),
        ("small", "tensor=2,sync=sync", {}),
        ("small", "pipeline=2,microbatches=2,sync=sync", {}),
    ],
)
def test_losses_are_those_of_the_plain_model(kind: str, split: str, options: dict[str, Any]) -> None:
    launch = launched(f"mesh:data=2,{split}", servers="lead" if "sync=" in split else None)
    found = run_team(losses, 4, kind, 8, options, launch=launch, timeout=120)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert apart(mean(found), train(None, kind, 8, batch=20)) < 1e-5


# -- any policy between replicas -------------------------------------------------------------------------------------

TRAIN = """
import sys
sys.path.insert(0, {folder!r})
import torch, paceline
from helpers.split_models import train
team = paceline.join()
torch.set_num_threads(1)
{fault}
train(team, "small", 12, batch=8)
"""


def script(folder: Path, fault: str = "") -> Path:
    text = TRAIN.replace("{folder!r}", repr(str(Path(__file__).parent.parent))).replace("{fault}", fault)
    return write_script(folder, text)


def run(folder: Path, sync: str, split: str = "tensor=2", *more: str, fault: str = "") -> Outcome:
    strategy = f"mesh:data=2,{split},sync={sync}"
    words = [script(folder, fault), "--workers", "4", "--strategy", strategy, "--name", "one", *more]
    with playing(words, folder) as started:
        outcome = started.finish(100.0)
        assert not started.processes()
        return outcome


@pytest.mark.parametrize(
    "sync",
    [
        "sync",
        "k-sync:k=1",
        "k-batch-sync:k=1",
        "async",
        "k-async:k=2",
        "k-batch-async:k=2",
        "ssp:s=1",
        "groups:size=2",
        "adaptive:of=k-async,start=1",
    ],
)
def test_every_policy_makes_updates_of_whole_gradients(sync: str, tmp_path: Path) -> None:
    launch = launched(f"mesh:data=2,tensor=2,sync={sync}", servers="lead", folder=str(tmp_path))
    found = run_team(losses, 4, "small", 4, {}, launch=launch, timeout=100)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all(torch.isfinite(torch.tensor(one)).all() for one in found)
    lines = [line for path in (tmp_path / "streams").iterdir() for line in path.read_bytes().splitlines()]
    events = [decode(line) for line in lines]
    assert parts_amiss(events, REPLICAS) == []
    assert any(isinstance(event, Update) and event.pushes for event in events)


@pytest.mark.parametrize("split", ["tensor=2", "pipeline=2,microbatches=2"])
def test_with_a_slow_replica_every_update_is_of_one_replicas_whole_gradient(split: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, "k-sync:k=1", split, "--slow", "2:6", "--slow", "3:6")
    assert outcome.code == 0, outcome.err
    events = events_of(outcome, "one")
    assert parts_amiss(events, REPLICAS) == []
    pushes = [event for event in events if isinstance(event, Push)]
    assert any(push.outcome == "dropped" for push in pushes)  # the slow replica came too late at least once
    assert {push.rank for push in pushes if push.outcome == "used"} >= {0}


def fine() -> list[Event]:
    return [
        Brought(0, 1.0, 0, 1, 0, 3, 5),
        Brought(1, 1.1, 0, 1, 0, 2, 5),
        Push(0, 1.2, 1, 0, 0, 4, [], 8, 0, "used", ""),
        Update(-1, 1.3, 0.1, 1, pushes=[1]),
    ]


@pytest.mark.parametrize(
    ("place", "change", "sentence"),
    [
        (1, {"replica": 1}, "push 1 of replica 0 has parts of ranks [0]"),
        (1, {"version": 3}, "push 1 of replica 0 is of version 0, its parts of [0, 3]"),
        (1, {"parts": 1}, "push 1 of replica 0 has 4 parts"),
        (1, {"start": 1.25}, "push 1 of replica 0 was made before all of its parts were there"),
        (3, {"pushes": [2]}, "version 1 is made of push 2"),
    ],
)
def test_the_checker_finds(place: int, change: dict[str, Any], sentence: str) -> None:
    events = fine()
    assert parts_amiss(events, REPLICAS) == []
    events[place] = msgspec.structs.replace(events[place], **change)
    assert sentence in parts_amiss(events, REPLICAS)


# -- checkpoints, faults and what cannot be --------------------------------------------------------------------------


def saved(team: Team, path: Path) -> list[float]:
    found = []
    model: Any = made("small")
    loader: Any = DataLoader(MODELS["small"][1](), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        loss = score(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    team.barrier()
    if team.is_lead:
        team.save(path)
    team.barrier()
    team.load(path)
    return found


@pytest.mark.parametrize("split", ["tensor=2", "tensor=2,sync=sync", "pipeline=2,microbatches=2,sync=sync"])
def test_a_checkpoint_is_the_plain_models(split: str, tmp_path: Path) -> None:
    path = tmp_path / "mesh.pt"
    launch = launched(f"mesh:data=2,{split}", servers="lead" if "sync=" in split else None)
    run_team(saved, 4, path, launch=launch, timeout=100)
    content = torch.load(path, weights_only=True)
    model = made("small")
    model.load_state_dict(content["model"])
    optimizer = adam(model)
    optimizer.load_state_dict(content["optimizer"])
    shapes = [state["exp_avg"].shape for state in optimizer.state.values()]
    assert shapes == [parameter.shape for parameter in model.parameters()]
    assert content["version"] == 2


def told(team: Team) -> list[bool]:
    """True for each text of the first worker that arrives: an empty one, a short one, one of three notes."""
    model: Any = made("small")
    team.setup(model, adam(model), DataLoader(MODELS["small"][1](), batch_size=20))
    client: Any = team._trainer._client  # type: ignore[union-attr]
    texts = [b"", b"order", bytes(range(256)) * 12_000]
    return [client.from_first(text if team.rank == 0 else b"") == text for text in texts]


def test_the_first_worker_of_a_replica_passes_on_texts_of_any_length() -> None:
    launch = launched("mesh:data=1,tensor=2,sync=sync", servers="lead")
    assert run_team(told, 2, launch=launch, timeout=60) == [[True] * 3] * 2


DYING = """
import os, signal
from helpers import split_models as splits
plain = splits.score
steps = 0
def score(output, y):
    global steps
    steps += 1
    if team.rank == 3 and steps == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(output, y)
splits.score = score
"""
"""The last worker dies in its fourth step."""


@pytest.mark.parametrize(("sync", "goes_on"), [("all-reduce", False), ("sync", False), ("async", True)])
def test_a_worker_that_dies_ends_the_run_or_its_replica(sync: str, goes_on: bool, tmp_path: Path) -> None:
    outcome = run(tmp_path, sync, "tensor=2", "--timeout", "20", fault=DYING)
    assert (outcome.code == 0) == goes_on, outcome.err
    assert "rank 3" in outcome.err
