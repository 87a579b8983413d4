"""How many versions of the parameters a server holds at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import data, under
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline import Team
from paceline.config import capacity, parse_slowness
from paceline.server.sessions import VersionPool

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_a_free_buffer_is_never_held_and_never_the_newest(workers: int) -> None:
    source = random.Random(workers)
    pool = VersionPool(workers + 2)
    held = [0] * workers
    for _ in held:
        pool.hold(0)
    for _ in range(2000):
        worker = source.randrange(workers)
        if source.random() < 0.7:
            free = pool.take()
            assert 0 <= free < workers + 2
            assert free not in held and free != pool.newest
            pool.publish(free, 0)
        pool.release(held[worker])
        held[worker] = pool.newest
        pool.hold(held[worker])
    assert 2 <= pool.most <= workers + 2


def test_more_versions_than_there_is_room_for_can_not_be() -> None:
    pool = VersionPool(2)
    pool.hold(0)
    pool.publish(pool.take(), 1)
    with pytest.raises(RuntimeError, match="all buffers of versions are held"):
        pool.take()


def buffers(team: Team) -> tuple[set[int], int]:
    """Which buffers a worker was told to use, and how many there are."""
    torch.manual_seed(0)
    model: Any = nn.Linear(10, 4)
    loader: Any = DataLoader(data(400, torch.float32), batch_size=2 * team.world_size)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    trainer: Any = team._trainer
    told: set[int] = set()
    adopt = trainer._adopt

    def watch(answer: Any) -> None:
        told.add(answer.buffer)
        adopt(answer)
        held = {view.data_ptr() for _, view in trainer._memory.versions._places(answer.buffer)}
        assert {parameter.data_ptr() for parameter in model.parameters()} == held

    trainer._adopt = watch
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told, len(trainer._memory.versions.buffers)


def test_no_more_versions_exist_than_workers_and_two() -> None:
    launch = under("async", slow=parse_slowness(["all:exp(0.001)"], 4))
    results = run_team(buffers, 4, launch=launch)
    told = set().union(*(seen for seen, _ in results))
    assert 3 <= len(told) <= 6
    assert told <= set(range(6))
    # There is room for more, for workers who join later; what was never used takes no memory.
    assert {count for _, count in results} == {capacity(4) + 2}


def test_in_step_two_buffers_are_enough() -> None:
    assert set().union(*(seen for seen, _ in run_team(buffers, 4, launch=under("sync")))) == {0, 1}
