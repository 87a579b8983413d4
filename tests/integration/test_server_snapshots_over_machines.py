"""A run with servers on several machines, all of whose processes were killed, goes on from its newest snapshot.

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
from helpers.training import under
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Team
from paceline.config import Launch
from paceline.data.place import LoaderPlace
from paceline.team.snapshot_files import SECTION, snapshots_in

pytestmark = pytest.mark.usefixtures("warm")

SAMPLES, BATCH, EPOCHS = 60, 8, 3


def join(folder: str, lead: str) -> Team:
    """Joins the team; the folder of a worker on another machine than the lead's is another one."""
    launch = Launch.from_environment()
    here = folder if os.environ["RANK"] in lead else f"{folder}-{os.environ['RANK']}"
    launch = msgspec.structs.replace(launch, folder=launch.folder and here, resume=launch.resume and here)
    os.environ.update(launch.to_environment())
    return paceline.join()


def die(folder: str, team: Team, at: int) -> None:
    """Ends this process as kill -9 does, once there is a snapshot of this version or a later one."""
    writer = team._training.snapshots._writer
    if writer is not None:
        writer.join()
    found = [int(path.stem) for path in snapshots_in(Path(folder))]
    if found and found[0] >= at:
        os.kill(os.getpid(), signal.SIGKILL)


def check(path: Path) -> None:
    """What is in the model and what is left of the epoch must be all samples."""
    content = torch.load(path, weights_only=True)
    counts = [-round(float(row)) for row in content["model"]["weight"].flatten()]
    place = LoaderPlace.of(content[SECTION]["loaders"][0])
    left = [] if place.left is None else place.left
    assert counts == [place.epoch + (place.left is not None and key not in left) for key in range(SAMPLES)], path


def count(
    _: None, folder: str, lead: str, at: int | None = None, epochs: int = EPOCHS, checks: bool = False
) -> tuple[list[float], int]:
    """How often each sample was trained on in the history that survives, and the snapshots that were checked."""
    team = join(folder, lead)
    torch.manual_seed(3)
    model: Any = nn.Embedding(SAMPLES, 1)
    nn.init.zeros_(model.weight)
    loader: Any = DataLoader(torch.arange(SAMPLES), BATCH, shuffle=True)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    checked: set[Path] = set()
    for _ in range(epochs):
        for index in loader:
            with team.step():
                model(index).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if at is not None:
                die(folder, team, at)
            if checks and team.is_lead and (writer := team._training.snapshots._writer):
                writer.join()
                (newest, *_) = snapshots_in(Path(folder))
                if newest not in checked:
                    checked.add(newest)
                    check(newest)
    team.barrier()
    team.close()
    return [-float(row) for row in model.weight.detach().flatten()], len(checked)


@pytest.mark.parametrize(
    ("strategy", "places", "servers"),
    [("sync", "ab", "each"), ("k-sync:k=2", "aab", "0:1,1:2"), ("async", "abb", "all"), ("ssp:s=2", "ab", "lead")],
)
def test_every_snapshot_is_of_one_version_and_of_all_samples(
    tmp_path: Path, strategy: str, places: str, servers: str
) -> None:
    folder = str(tmp_path / "run")
    launch = under(strategy, servers, folder=folder, snapshot=0.0)
    arguments = (folder, "01" if places == "aab" else "0", None, 2 * EPOCHS, True)
    results = run_spread(count, places, *arguments, launch=launch, joined=False)
    assert all(counts == [2 * EPOCHS] * SAMPLES for counts, _ in results)
    assert results[0][1] >= 3


@pytest.mark.parametrize(
    ("before", "places", "servers", "after", "then"),
    [
        ("async", "ab", "each", "sync", "ab"),
        ("sync", "abb", "all", "all-reduce", "ab"),
        ("k-batch-async:k=2", "ab", "0:1,1:1", "async", "aa"),
        ("all-reduce", "ab", "", "async", "abb"),
    ],
)
def test_every_sample_counts_once_an_epoch_over_both_runs(
    tmp_path: Path, before: str, places: str, servers: str, after: str, then: str
) -> None:
    folder = str(tmp_path / "run")
    first = under(before, servers, folder=folder, snapshot=0.0)
    run_spread(count, places, folder, "0", 5, launch=first, joined=False, may_die=range(len(places)))
    newest = snapshots_in(tmp_path / "run")[0]
    assert int(newest.stem) >= 5
    assert torch.load(newest, weights_only=True)[SECTION]["loaders"][0]["epoch"] < EPOCHS
    assert not [path for path in tmp_path.glob("run-*") if snapshots_in(path)]
    second = under(after, "each" if "b" in then else "1", folder=folder, resume=folder)
    if "b" in then:
        results = run_spread(count, then, folder, "0", launch=second, joined=False)
    else:
        results = run_team(count, len(then), folder, "01", launch=second, joined=False)
    assert all(counts == [EPOCHS] * SAMPLES for counts, _ in results)


def learn(_: None, folder: str, lead: str, make: str, at: int | None = None) -> tuple[dict[int, float], Any]:
    """The losses of this worker by version, and the model at the end."""
    team = join(folder, lead)
    torch.manual_seed(team.rank)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
    made: Any = getattr(torch.optim, make)(model.parameters(), lr=0.05)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader(TensorDataset(x), BATCH, shuffle=True)
    model, optimizer, loader = team.setup(model, made, loader)
    losses = {}
    for _ in range(EPOCHS):
        for (inputs,) in loader:
            loss = mse_loss(model(inputs + 0.1 * torch.randn(6)), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[team._training.current().version] = float(loss.detach())
            if at is not None:
                die(folder, team, at)
    team.barrier()
    team.close()
    return losses, [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("places", "lead", "make", "servers"),
    [("aabb", "01", "AdamW", "each"), ("ab", "0", "Adafactor", "all"), ("ab", "0", "SGD", "lead")],
)
def test_a_run_that_goes_on_is_the_undisturbed_run_bit_for_bit(
    tmp_path: Path, places: str, lead: str, make: str, servers: str
) -> None:
    folder, everyone = str(tmp_path / "run"), range(len(places))
    undisturbed = run_spread(learn, places, folder, lead, make, launch=under("sync", servers), joined=False)
    first = under("sync", servers, folder=folder, snapshot=0.0)
    run_spread(learn, places, folder, lead, make, 9, launch=first, joined=False, may_die=everyone)
    newest = snapshots_in(tmp_path / "run")[0]
    assert int(newest.stem) >= 9
    assert set(torch.load(newest, weights_only=True)[SECTION]["random"]) == set(everyone)
    second = under("sync", servers, folder=folder, resume=folder)
    resumed = run_spread(learn, places, folder, lead, make, launch=second, joined=False)
    for (losses, values), (again, result) in zip(undisturbed, resumed, strict=True):
        assert again == {number: loss for number, loss in losses.items() if number > int(newest.stem)}
        assert all(torch.equal(one, other) for one, other in zip(values, result, strict=True))
