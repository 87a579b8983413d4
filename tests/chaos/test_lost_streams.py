"""Every sample of a dataset in shards counts once, also if the worker that reads a shard is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team
from paceline.data import ShardedDataset
from paceline.events import Ended, LeaseGiven, Lost, Push, Return, Update, read
from paceline.events.summary import merge

SHARDS = [list(range(100 * number, 100 * number + size)) for number, size in enumerate([30, 7, 26, 1, 19, 40, 12])]


def tensors(shard: list[int]) -> Iterator[torch.Tensor]:
    return (torch.tensor([float(value)]) for value in shard)


def work(team: Team, processes: int) -> None:
    model: Any = nn.Linear(1, 1)
    loader: Any = DataLoader(ShardedDataset(SHARDS, tensors), batch_size=9, num_workers=processes)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
    steps = 0
    for _ in range(2):
        for x in loader:
            with team.step():
                model(x).mean().backward()
                steps += 1
                if team.rank == 1 and steps == 5:
                    os.kill(os.getpid(), signal.SIGKILL)  # with samples of a shard that it has and has not read
                optimizer.step()
            optimizer.zero_grad()


def trained(folder: Path, epoch: int) -> Counter[int]:
    """How often each sample was part of an update, from the events of a run alone."""
    events = list(read(folder / "events.jsonl"))
    leases = {event.number: event for event in events if isinstance(event, LeaseGiven)}
    pushes = {event.ticket: event for event in events if isinstance(event, Push)}
    ends = {(event.epoch, event.source): event.samples for event in events if isinstance(event, Ended)}
    used = [ticket for event in events if isinstance(event, Update) for ticket in event.pushes]
    found: Counter[int] = Counter()
    for number in (number for ticket in used for number in pushes[ticket].leases):
        lease = leases[number]
        if lease.epoch == epoch:
            end = min(lease.first + lease.samples, ends[epoch, lease.source])
            found.update(SHARDS[lease.source][lease.first : end])
    return found


@pytest.mark.parametrize(
    ("strategy", "processes"), [("async", 0), ("async", 2), ("k-sync:k=2", 0), ("k-batch-async:k=2", 0)]
)
def test_the_shards_of_a_killed_worker_are_read_by_the_others(strategy: str, processes: int, tmp_path: Path) -> None:
    launch = under(strategy, barrier=20.0, folder=str(tmp_path))
    run_team(work, 3, processes, launch=launch, timeout=40.0, may_die=[1])
    merge(tmp_path, 3)
    events = list(read(tmp_path / "events.jsonl"))
    assert [event.rank for event in events if isinstance(event, Lost)] == [1]
    assert any(event.rank == 1 and event.why == "lost" for event in events if isinstance(event, Return))
    for epoch in range(2):
        assert trained(tmp_path, epoch) == Counter(value for shard in SHARDS for value in shard)
