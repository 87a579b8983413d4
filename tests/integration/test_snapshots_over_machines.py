"""A run on several machines that was killed goes on from its newest snapshot, which lies on the lead's machine alone.

Machines are pretended: what would cross a network does so, and every machine has a folder of its own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.teams import run_spread, run_team
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Team
from paceline.config import Launch, Timeouts
from paceline.team.snapshot_files import SECTION, snapshots_in

pytestmark = pytest.mark.usefixtures("warm")

SAMPLES, BATCH, EPOCHS = 60, 8, 3


def join(folder: str, lead: str) -> Team:
    """Joins the team; the folder of a worker on another machine than the lead's is another one."""
    launch = Launch.from_environment()
    here = folder if os.environ["RANK"] in lead else f"{folder}-{os.environ['RANK']}"
    launch = msgspec.structs.replace(launch, folder=here, resume=launch.resume and here)
    os.environ.update(launch.to_environment())
    return paceline.join()


def train(
    _: None, folder: str, lead: str, make: str, at: int | None = None
) -> tuple[dict[int, float], Any, list[float]]:
    """The losses of this worker by version, the model at the end, and how often each sample was trained on."""
    team = join(folder, lead)
    torch.manual_seed(team.rank)
    counter: Any = nn.Embedding(SAMPLES, 1).double()
    nn.init.zeros_(counter.weight)
    net: Any = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
    made: Any = getattr(torch.optim, make)(net.parameters(), lr=0.05)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader(TensorDataset(x, torch.arange(SAMPLES)), BATCH, shuffle=True)
    optimizers: Any = [made, torch.optim.SGD(counter.parameters(), lr=1.0)]
    (net, counter), (optimizer, counts), loader = team.setup([net, counter], optimizers, loader)
    losses = {}
    for _ in range(EPOCHS):
        for inputs, index in loader:
            loss = mse_loss(net(inputs + 0.1 * torch.randn(6)), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counter(index).sum().backward()
            counts.step()
            counts.zero_grad()
            losses[team._training.current().version] = float(loss.detach())
            writer = team._training.snapshots._writer
            if writer is not None:
                writer.join()
            found = [int(path.stem) for path in snapshots_in(Path(folder))]
            if at is not None and found and found[0] >= at:
                os.kill(os.getpid(), signal.SIGKILL)
    team.barrier()
    team.close()
    values = [value.clone() for value in net.state_dict().values()]
    return losses, values, [-float(row) for row in counter.weight.detach().flatten()]


def settings(**more: Any) -> Launch:
    return Launch(strategy="all-reduce", timeouts=Timeouts(barrier=60.0, join=60.0), **more)


@pytest.mark.parametrize(("places", "lead", "make"), [("aabb", "01", "AdamW"), ("ab", "0", "Adafactor")])
def test_a_run_over_machines_goes_on_bit_for_bit(tmp_path: Path, places: str, lead: str, make: str) -> None:
    folder = str(tmp_path / "run")
    undisturbed = run_spread(train, places, folder, lead, make, launch=settings(), joined=False)
    first, everyone = settings(folder=folder, snapshot=0.0), range(len(places))
    run_spread(train, places, folder, lead, make, 9, launch=first, joined=False, may_die=everyone)
    version = int(snapshots_in(tmp_path / "run")[0].stem)
    assert version >= 9
    assert not [path for path in tmp_path.glob("run-*") if snapshots_in(path)]
    content = torch.load(snapshots_in(tmp_path / "run")[0], weights_only=True)
    assert set(content[SECTION]["random"]) == set(everyone)
    resumed = run_spread(train, places, folder, lead, make, launch=settings(folder=folder, resume=folder), joined=False)
    for (losses, values, counts), (again, result, counts_again) in zip(undisturbed, resumed, strict=True):
        assert again == {number: loss for number, loss in losses.items() if number > version}
        assert counts == counts_again == [float(EPOCHS)] * SAMPLES
        assert all(torch.equal(one, other) for one, other in zip(values, result, strict=True))
    # One machine can go on as well.
    launch = settings(folder=folder, resume=folder)
    for _, _, counts in run_team(train, 2, folder, "01", make, launch=launch, joined=False):
        assert counts == [float(EPOCHS)] * SAMPLES


def split(_: None, folder: str, lead: str, at: int | None = None) -> tuple[dict[int, float], Any]:
    """The losses by version, and the model at the end, of layers that can be split over workers."""
    team = join(folder, lead)
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH, shuffle=True)
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = team.setup(model, made, loader, loss=mse_loss)
    losses = {}
    for _ in range(EPOCHS):
        for inputs, wanted in loader:
            loss = mse_loss(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[team._training.current().version] = float(loss.detach())
            writer = team._training.snapshots._writer
            if writer is not None:
                writer.join()
            found = [int(path.stem) for path in snapshots_in(Path(folder))]
            if at is not None and found and found[0] >= at:
                os.kill(os.getpid(), signal.SIGKILL)
    team.barrier()
    team.close()
    return losses, [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("before", "places", "after", "then"),
    [
        ("pipeline:stages=2,microbatches=2", "ab", "pipeline:stages=2,microbatches=2", "ab"),
        ("tensor:degree=2", "ab", "tensor:degree=2", "ab"),
        ("mesh:data=1,pipeline=2,tensor=2", "aabb", "pipeline:stages=2,microbatches=4", "aa"),
        ("mesh:data=2,tensor=2", "aabb", "tensor:degree=2", "ab"),
        ("mesh:data=2,pipeline=2,microbatches=2", "abcd", "tensor:degree=2", "ab"),
    ],
)
def test_a_split_model_over_machines_goes_on_and_so_does_another_split(
    tmp_path: Path, before: str, places: str, after: str, then: str
) -> None:
    folder, lead = str(tmp_path / "run"), "01" if places == "aabb" else "0"
    launch = msgspec.structs.replace(settings(), strategy="all-reduce")
    ((losses, values),) = run_team(split, 1, folder, "0", launch=launch, joined=False)
    launch = msgspec.structs.replace(settings(folder=folder, snapshot=0.0), strategy=before)
    run_spread(split, places, folder, lead, 8, launch=launch, joined=False, may_die=range(len(places)))
    newest = snapshots_in(tmp_path / "run")[0]
    version = int(newest.stem)
    assert version >= 8
    assert set(torch.load(newest, weights_only=True)[SECTION]["random"]) == set(range(len(places)))
    launch = msgspec.structs.replace(settings(folder=folder, resume=folder), strategy=after)
    if "b" in then:
        results = run_spread(split, then, folder, "0", launch=launch, joined=False)
    else:
        results = run_team(split, len(then), folder, "01", launch=launch, joined=False)
    for again, result in results:
        assert min(again) == version + 1 and max(again) == max(losses)
        assert all(abs(losses[number] - loss) < 1e-6 * max(1.0, losses[number]) for number, loss in again.items())
        for one, other in zip(values, result, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
