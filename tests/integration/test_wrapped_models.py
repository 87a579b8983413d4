"""A model is trained by the team or by DistributedDataParallel, not by both."""

from __future__ import annotations

import pytest
import torch
from helpers.teams import run_team
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline import Team, UsageError
from paceline.team.framework_access import FrameworkAccess


def refusal(team: Team, *, wrapped_first: bool) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # a group of each worker alone will do
    try:
        if wrapped_first:
            wrapped = DistributedDataParallel(model)
            with pytest.raises(UsageError) as refused:
                team.setup(wrapped, optimizer)
        else:
            team.setup(model, optimizer)
            with pytest.raises(UsageError) as refused:
                DistributedDataParallel(model[0])
            DistributedDataParallel(nn.Linear(2, 2))  # another model is no business of the team
            team.close()
            DistributedDataParallel(model)
    finally:
        distributed.destroy_process_group()
    return str(refused.value)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_model_wrapped_before_or_after_setup_is_refused_on_all_workers(wrapped_first: bool) -> None:
    def work(team: Team) -> str:
        return refusal(team, wrapped_first=wrapped_first)

    said = run_team(work, 2)
    assert len(set(said)) == 1
    assert "DistributedDataParallel" in said[0]
    assert ("without the wrapper" if wrapped_first else "leave one of them out") in said[0]


def test_the_samples_of_a_step_are_shared_out_per_worker_and_the_newest_version_can_be_taken() -> None:
    def work(team: Team) -> tuple[list[float], list[bytes]]:
        model = nn.Linear(1, 1)
        model, optimizer = team.setup(model, SGD(model.parameters(), lr=0.1))
        data = torch.utils.data.TensorDataset(torch.arange(11.0).unsqueeze(1))
        parts, access = [], FrameworkAccess(team)
        for (x,) in team.loader(torch.utils.data.DataLoader(data, batch_size=2), per_worker=True):
            model(x).mean().backward()
            parts.append(round(access.part * 100))
            optimizer.step()
            optimizer.zero_grad()
        access.refresh()
        return parts, access.exchange(b"%d" % team.rank)

    (first, gathered), (second, _) = run_team(work, 2)
    assert gathered == [b"0", b"1"]
    assert [one + other for one, other in zip(first, second, strict=True)] == [100] * 3
    assert first == [50, 50, 67]
