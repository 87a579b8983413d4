"""Several replicas that are each on several hosts train as one process does; each worker has its own parts only."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import Host, hosts
from helpers.machines import Spread
from helpers.split_models import MODELS, adam, apart, dies, launched, learned, made, same_values, score, train, words
from helpers.teams import run_spread
from torch.utils.data import DataLoader

from paceline import Mismatch, Team, UsageError

PIPELINES, LAYERS = "mesh:data=2,pipeline=2,microbatches=2", "mesh:data=2,tensor=2"


@pytest.fixture(scope="module", autouse=True)
def tracing_is_loaded() -> None:
    """Once here instead of once in every worker that is forked."""
    x = MODELS["small"][1]().tensors[0]
    torch.export.export(made("small"), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    importlib.import_module("torch.distributed.pipelining")


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


def refused(team: Team) -> str:
    try:
        train(team, "small", 1)
    except UsageError as error:
        return str(error)
    return ""


def test_with_a_parameter_server_between_them_each_replica_must_be_inside_a_machine() -> None:
    for text in run_spread(refused, "abcd", launch=launched(f"{LAYERS},sync=k-sync:k=1")):
        assert "with 'k-sync:k=1' between replicas each must be inside a machine: leave out 'sync'" in text
