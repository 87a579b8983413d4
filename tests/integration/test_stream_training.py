"""A stream trains the model that one process trains with it, under every strategy that is exact."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import BATCH, Values, apart, build, data, loop, sgd, under
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline import Team
from paceline.config import Slowness
from paceline.data import ShardedDataset
from paceline.errors import Mismatch
from paceline.events import LeaseGiven, read
from paceline.events.summary import merge

pytestmark = pytest.mark.usefixtures("warm")

SHARDS = 7
"""More than any team of these tests has workers, and no multiple of them."""


POLICIES = ["sync", "async", "k-sync:k=1", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2", "ssp:s=1"]


def served(strategy: str) -> str | None:
    """Where the servers of a strategy are, if it has any."""
    return "lead" if strategy in POLICIES else None


class Stream(IterableDataset[Any]):
    """The samples of all tests, as a generator; divided among the processes of a loader."""

    def __init__(self, samples: int = 205, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        own, step = (0, 1) if process is None else (process.id, process.num_workers)
        dataset = data(self.samples)
        for number in range(self.first + own, self.samples, step):
            yield dataset[number]


def plain(epochs: int = 2, **options: Any) -> Values:
    model = build()
    loop(model, sgd(model.parameters()), DataLoader(Stream(), batch_size=BATCH, **options), epochs)
    return list(model.state_dict().values())


def streamed(team: Team, processes: int) -> Values:
    model = build(seed=team.rank)
    loader = DataLoader(Stream(), batch_size=BATCH, num_workers=processes)
    model, optimizer, loader = team.setup(model, sgd(model.parameters()), loader)
    loop(model, optimizer, loader, 2)
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("strategy", "workers", "processes"),
    [
        ("all-reduce", 3, 0),
        ("all-reduce", 2, 2),
        ("sync", 3, 0),
        ("sync", 2, 2),
        ("mesh:data=2", 2, 0),
        ("tensor:degree=2", 2, 0),
        ("pipeline:stages=2,microbatches=2", 2, 2),
    ],
)
def test_a_generator_trains_the_model_of_one_process(strategy: str, workers: int, processes: int) -> None:
    expected = plain(num_workers=processes)
    for result in run_team(
        streamed, workers, processes, launch=under(strategy, served(strategy), barrier=10.0), timeout=30.0
    ):
        assert apart(result, expected) < 1e-9


class Numbers(IterableDataset[torch.Tensor]):
    """All numbers, or so many of them."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = itertools.count() if self.count is None else iter(range(self.count))
        return (torch.tensor([float(number % 17)]).double() for number in numbers)


def fit(team: Team, dataset: Any, epochs: int, batch: int = 6, **options: Any) -> tuple[list[list[int]], float]:
    """The numbers that a worker has had in each epoch, and the weight that it ends with."""
    model: Any = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(dataset, batch_size=batch)
    model, optimizer, loader = team.setup(model, optimizer, loader, **options)
    seen: list[list[int]] = []
    for _ in range(epochs):
        seen.append([])
        for x in loader:
            with team.step() as step:
                mse_loss(model(x), 2 * x + 1).backward()
                optimizer.step()
            optimizer.zero_grad()
            seen[-1] += [] if step.cancelled else [int(value) for value in x]
    return seen, float(model.weight.detach())


@pytest.mark.parametrize("strategy", ["all-reduce", "pipeline:stages=1"])
def test_an_endless_stream_ends_its_epochs_after_so_many_steps(strategy: str) -> None:
    workers = 2 if strategy == "all-reduce" else 1
    results = run_team(
        lambda team: fit(team, Numbers(), 3, steps_per_epoch=5), workers, launch=under(strategy, None), timeout=20.0
    )
    slope = 0.0  # what one process comes to
    for x in itertools.islice(DataLoader(Numbers(), batch_size=6), 15):
        slope -= 1e-3 * float((2 * (slope * x - 2 * x - 1) * x).mean())
    for seen, weight in results:
        assert [len(epoch) for epoch in seen] == [30 // workers] * 3
        assert weight == pytest.approx(slope, abs=1e-12)
    for epoch in range(3):
        found = sorted(itertools.chain(*(seen[epoch] for seen, _ in results)))
        assert found == sorted(number % 17 for number in range(30 * epoch, 30 * epoch + 30))


def tensors(shard: Any) -> Iterator[torch.Tensor]:
    return (torch.tensor([float(value)]).double() for value in shard)


@pytest.mark.parametrize("strategy", ["all-reduce", "mesh:data=2", *POLICIES])
def test_the_shards_of_a_dataset_are_trained_on_once(strategy: str) -> None:
    def work(team: Team) -> list[list[int]]:
        shards = [range(10 * number, 10 * number + 3 + number) for number in range(SHARDS)]
        return fit(team, ShardedDataset(shards, tensors), 2)[0]

    results = run_team(work, 2, launch=under(strategy, served(strategy), barrier=10.0), timeout=20.0)
    numbers = sorted(10 * shard + place for shard in range(SHARDS) for place in range(3 + shard))
    for epoch in range(2):
        assert sorted(itertools.chain(*(seen[epoch] for seen in results))) == numbers


@pytest.mark.parametrize("strategy", POLICIES[1:])
def test_a_generator_is_trained_on_once_under_every_policy(strategy: str) -> None:
    results = run_team(lambda team: fit(team, Numbers(50), 2)[0], 2, launch=under(strategy, barrier=10.0), timeout=20.0)
    for epoch in range(2):
        found = sorted(itertools.chain(*(seen[epoch] for seen in results)))
        assert found == sorted(number % 17 for number in range(50))


def test_an_endless_stream_has_epochs_with_a_server_too() -> None:
    results = run_team(
        lambda team: fit(team, Numbers(), 3, steps_per_epoch=5)[0], 2, launch=under("async", barrier=10.0), timeout=20.0
    )
    for epoch in range(3):
        found = sorted(itertools.chain(*(seen[epoch] for seen in results)))
        assert found == sorted(number % 17 for number in range(30 * epoch, 30 * epoch + 30))


@pytest.mark.parametrize("sync", ["all-reduce", "async"])
def test_the_workers_of_a_split_replica_read_the_same_shards(sync: str) -> None:
    def work(team: Team) -> list[list[float]]:
        model: Any = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)).double()
        shards = [range(10 * number, 10 * number + 3 + number) for number in range(SHARDS)]
        loader: Any = DataLoader(ShardedDataset(shards, tensors), batch_size=4)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6), loader)
        seen = []
        for x in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append([float(value) for value in x])
        with torch.no_grad():
            assert sum(len(x) for x in loader) == sum(map(len, shards))
        return seen

    strategy = f"mesh:data=2,tensor=2,sync={sync}"
    results = run_team(work, 4, launch=under(strategy, None, barrier=10.0), timeout=30.0)
    assert results[0] == results[1] and results[2] == results[3]
    numbers = sorted(10 * shard + place for shard in range(SHARDS) for place in range(3 + shard))
    assert sorted(itertools.chain(*results[0], *results[2])) == numbers


def test_a_fast_worker_gets_more_shards(tmp_path: Path) -> None:
    def work(team: Team) -> None:
        fit(team, ShardedDataset([range(8)] * 12, tensors), 1, batch=8)

    launch = under("async", barrier=10.0, folder=str(tmp_path), slow={1: Slowness(length="constant(0.5)")})
    run_team(work, 2, launch=launch, timeout=20.0)
    merge(tmp_path, 2)
    leases = [event for event in read(tmp_path / "events.jsonl") if isinstance(event, LeaseGiven)]
    shards = [{lease.source for lease in leases if lease.rank == rank} for rank in range(2)]
    assert len(shards[0]) > 2 * len(shards[1])
    assert not shards[0] & shards[1] and shards[0] | shards[1] == set(range(12))


@pytest.mark.parametrize("how", ["other samples", "other length", "divided by rank", "divided shards"])
@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_workers_that_read_different_streams_are_noticed(how: str, strategy: str) -> None:
    def work(team: Team) -> str:
        datasets: dict[str, Any] = {
            "other samples": Stream(205, first=team.rank),
            "other length": Numbers(60 + 12 * team.rank),
            "divided by rank": Numbers(60) if team.rank else Stream(205),
            "divided shards": ShardedDataset([[float(team.rank)], [1.0]], lambda shard: map(torch.tensor, shard)),
        }
        try:
            model: Any = nn.LazyLinear(1).double()
            model(torch.zeros(1, 10 if how in ("other samples", "divided by rank") else 1).double())
            loader: Any = DataLoader(datasets[how], batch_size=6)
            model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
            for batch in loader:
                x = batch[0] if isinstance(batch, list) else batch
                if x.shape[-1] == model.in_features:
                    model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except Mismatch as error:
            return str(error)
        return "nothing noticed"

    results = run_team(work, 2, launch=under(strategy, served(strategy), barrier=10.0), timeout=20.0)
    if (strategy, how) == ("async", "other length"):  # a worker may have left before the other one comes to its end
        assert any("other samples than rank" in said for said in results)
        return
    for said in results:
        assert {
            "other length": "the end of its stream",
            "divided shards": "first sample of its first shard",
        }.get(how, "other samples than rank") in said
