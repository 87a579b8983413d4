"""A run that was killed goes on from its newest snapshot, in the middle of an epoch, as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from paceline import Team
from paceline.config import Launch
from paceline.data.place import LoaderPlace
from paceline.events import Update, read
from paceline.events.summary import merge
from paceline.team.snapshot_files import SECTION, path_of, snapshots_in

pytestmark = pytest.mark.usefixtures("warm")

SAMPLES, BATCH, EPOCHS = 60, 8, 3


class Numbers(Dataset[int]):
    """Every sample is its own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Counter(nn.Module):
    """A parameter per sample, which plain gradient descent lowers by one each time that the sample is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SAMPLES, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(index)
        return rows


def die(folder: str, team: Team, at: int) -> None:
    """Ends this process as kill -9 does, once there is a snapshot of this version or a later one."""
    writer = team._training.snapshots._writer
    if writer is not None:
        writer.join()
    found = [int(path.stem) for path in snapshots_in(Path(folder))]
    if found and found[0] >= at:
        os.kill(os.getpid(), signal.SIGKILL)


def version_of(team: Team) -> int:
    trainer = team._training.current()
    return trainer.version


def make_loader(kind: str) -> DataLoader[Any]:
    numbers = Numbers()
    if kind == "plain":
        return DataLoader(numbers, BATCH)
    if kind == "shuffled":
        return DataLoader(numbers, BATCH, shuffle=True)
    if kind == "processes":
        return DataLoader(numbers, BATCH, shuffle=True, num_workers=2)
    if kind == "drop_last":
        return DataLoader(numbers, BATCH, shuffle=True, drop_last=True)
    assert kind == "batches"
    return DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), BATCH, drop_last=False))


def count(team: Team, folder: str, kind: str, at: int | None = None) -> tuple[list[float], int]:
    """How often each sample was trained on in the history that survives, and the version at the end."""
    torch.manual_seed(3)
    model: Any = Counter()
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), make_loader(kind))
    for _ in range(EPOCHS):
        for index in loader:
            with team.step():
                model(index).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if at is not None:
                die(folder, team, at)
    team.barrier()
    version = version_of(team)
    team.close()
    return [-float(row) for row in model.table.weight.detach().flatten()], version


def launches(tmp_path: Path, strategy: str, servers: str | None = "lead", **more: Any) -> tuple[Launch, Launch]:
    """Of a run with snapshots, and of one that goes on from it."""
    folder = str(tmp_path / "run")
    first = under(strategy, servers, folder=folder, snapshot=0.0, **more)
    return first, under(strategy, servers, folder=folder, resume=folder, **more)


@pytest.mark.parametrize(
    ("before", "workers", "after", "then", "kind"),
    [
        ("all-reduce", 2, "all-reduce", 2, "shuffled"),
        ("all-reduce", 2, "all-reduce", 3, "plain"),
        ("all-reduce", 3, "async", 2, "processes"),
        ("all-reduce", 2, "all-reduce", 2, "drop_last"),
        ("all-reduce", 2, "sync", 3, "batches"),
        ("sync", 2, "sync", 2, "shuffled"),
        ("sync", 3, "all-reduce", 2, "batches"),
        ("async", 3, "async", 2, "shuffled"),
        ("async", 2, "all-reduce", 3, "processes"),
        ("k-batch-async:k=2", 2, "sync", 2, "plain"),
        ("all-reduce", 1, "async", 2, "shuffled"),
    ],
)
def test_every_sample_counts_once_an_epoch_over_both_runs(
    tmp_path: Path, before: str, workers: int, after: str, then: int, kind: str
) -> None:
    first, _ = launches(tmp_path, before)
    _, second = launches(tmp_path, after)
    folder = str(tmp_path / "run")
    run_team(count, workers, folder, kind, 9, launch=first, may_die=range(workers))
    found = [int(path.stem) for path in snapshots_in(tmp_path / "run")]
    assert found and found[0] >= 9
    epochs = torch.load(snapshots_in(tmp_path / "run")[0], weights_only=True)[SECTION]["loaders"][0]["epoch"]
    assert epochs < EPOCHS
    for counts, _ in run_team(count, then, folder, kind, launch=second):
        if kind == "drop_last":
            assert sum(counts) == EPOCHS * (SAMPLES // BATCH * BATCH)
        else:
            assert counts == [EPOCHS] * SAMPLES


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are changed at random, by each of the generators that scripts use."""

    def __init__(self) -> None:
        self._x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index] + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.normal())
        return x, x.sum(0, keepdim=True)


Result = tuple[dict[int, float], list[torch.Tensor], list[float]]


def learn(team: Team, folder: str, make: str, own: bool, at: int | None = None) -> Result:
    """The loss of each version of this worker, the model at the end, and its learning rates.

    own: the loader has a generator of its own.
    """
    torch.manual_seed(team.rank)
    random.seed(team.rank)
    np.random.seed(team.rank)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)).double()
    made: Any = getattr(torch.optim, make)(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(5) if own else None
    loader: Any = DataLoader(Noisy(), BATCH, shuffle=True, generator=generator)
    model, optimizer, loader = team.setup(model, made, loader)
    every_batch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    every_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses, rates = {}, []
    for _ in range(EPOCHS):
        for x, y in loader:
            with team.step():
                loss = mse_loss(model(x.double()), y.double())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[version_of(team)] = float(loss)
                every_batch.step()
                rates.append(optimizer.param_groups[0]["lr"])
            if at is not None:
                die(folder, team, at)
        every_epoch.step()
    team.barrier()
    team.close()
    return losses, [value.clone() for value in model.state_dict().values()], rates


@pytest.mark.parametrize(
    ("strategy", "make", "own", "at"),
    [
        ("all-reduce", "AdamW", False, 3),
        ("all-reduce", "Adafactor", True, 11),
        ("sync", "AdamW", True, 8),
        ("sync", "SGD", False, 16),
        ("sync", "Adafactor", False, 12),
    ],
)
def test_a_run_that_goes_on_is_the_undisturbed_run_bit_for_bit(
    tmp_path: Path, strategy: str, make: str, own: bool, at: int
) -> None:
    first, second = launches(tmp_path, strategy)
    folder = str(tmp_path / "run")
    undisturbed = run_team(learn, 2, folder, make, own, launch=under(strategy))
    run_team(learn, 2, folder, make, own, at, launch=first, may_die=range(2))
    version = int(snapshots_in(tmp_path / "run")[0].stem)
    resumed = run_team(learn, 2, folder, make, own, launch=second)
    for rank, ((losses, values, rates), (again, result, rates_again)) in enumerate(
        zip(undisturbed, resumed, strict=True)
    ):
        assert min(again) == version + 1 and max(again) == max(losses)
        assert again == {number: loss for number, loss in losses.items() if number > version}
        assert rates_again == rates[-len(rates_again) :]
        # Each worker has its own running statistics, and the lead's are in the snapshot.
        trained = [0, 1, 2, 3, 7, 8]
        for place in trained if rank else range(len(values)):
            assert torch.equal(values[place], result[place])


def check_every_snapshot(team: Team, folder: str, kind: str) -> int:
    """Trains with a snapshot as often as there can be one; returns how many were checked.

    In each, what is in the model and what is left of the epoch must be all samples.
    """
    torch.manual_seed(3)
    model: Any = Counter()
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), make_loader(kind))
    checked: set[Path] = set()
    for _ in range(2 * EPOCHS):
        for index in loader:
            with team.step():
                model(index).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if writer := team._training.snapshots._writer:
                writer.join()
            if team.is_lead and (found := snapshots_in(Path(folder))) and found[0] not in checked:
                checked.add(found[0])
                check(found[0])
    team.barrier()
    return len(checked)


def check(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    counts = [-round(float(row)) for row in content["model"]["table.weight"].flatten()]
    (known,) = content[SECTION]["loaders"]
    place = LoaderPlace.of(known)
    left = [] if place.left is None else place.left
    keys = [key for batch in left for key in batch] if place.batches else left
    begun = place.left is not None
    assert counts == [place.epoch + (begun and key not in keys) for key in range(SAMPLES)], path
    assert len(keys) == len(set(keys))
    assert path == path_of(path.parent.parent, content["version"])


@pytest.mark.parametrize(
    ("strategy", "workers", "kind", "servers"),
    [
        ("all-reduce", 2, "shuffled", None),
        ("all-reduce", 2, "processes", None),
        ("all-reduce", 2, "elastic", None),
        ("sync", 2, "batches", "lead"),
        ("k-sync:k=2", 3, "shuffled", "2"),
        ("async", 3, "processes", "all"),
        ("k-batch-async:k=2", 2, "shuffled", "1"),
        ("ssp:s=2", 2, "batches", "2"),
    ],
)
def test_every_snapshot_is_of_one_version_and_of_all_samples(
    tmp_path: Path, strategy: str, workers: int, kind: str, servers: str | None
) -> None:
    first, _ = launches(tmp_path, strategy, servers, elastic=kind == "elastic")
    kind = "shuffled" if kind == "elastic" else kind
    results = run_team(check_every_snapshot, workers, str(tmp_path / "run"), kind, launch=first)
    assert results[0] >= 3


def saving(team: Team, path: str, again: str) -> tuple[int, list[float]]:
    model: Any = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    loader: Any = DataLoader(torch.ones(40, 4), 4)
    model, optimizer, loader = team.setup(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
    steps = 0
    for _ in range(4):
        for x in loader:
            with team.step():
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if steps == 2 and team.is_lead:
                assert team.save(path, block=False, note="hello") == Path(path)
    if team.is_lead:
        team.save(again, block=False)  # no update comes after it
    team.barrier()
    version = version_of(team)
    team.close()
    return version, model.weight.detach().flatten().tolist()


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async"])
def test_a_checkpoint_is_written_while_the_training_goes_on(tmp_path: Path, strategy: str) -> None:
    path, again = tmp_path / "first.pt", tmp_path / "second.pt"
    (version, weights), *_ = run_team(saving, 2, str(path), str(again), launch=under(strategy))
    content = torch.load(path, weights_only=True)
    assert content["note"] == "hello" and 2 < content["version"] <= version
    plain: Any = nn.Linear(4, 1, bias=False)
    plain.load_state_dict(content["model"])
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    optimizer.load_state_dict(content["optimizer"])
    (state,) = optimizer.state.values()
    assert int(state["step"]) == content["version"]
    last = torch.load(again, weights_only=True)
    assert last["version"] == version and last["model"]["weight"].flatten().tolist() == weights


def split(team: Team, folder: str, at: int | None = None) -> Result:
    """As `learn`, with layers that can be split over workers."""
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
            losses[version_of(team)] = float(loss.detach())
            if at is not None:
                die(folder, team, at)
    team.barrier()
    team.close()
    return losses, [value.clone() for value in model.state_dict().values()], []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("pipeline:stages=2,microbatches=2", 2), ("pipeline:stages=2,microbatches=2", 2)),
        (("tensor:degree=2", 2), ("all-reduce", 3)),
        (("mesh:data=2,tensor=2", 4), ("pipeline:stages=2,microbatches=4", 2)),
        (("sync", 2), ("tensor:degree=2", 2)),
    ],
)
def test_a_split_model_goes_on_and_so_does_another_split(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    first, _ = launches(tmp_path, before[0])
    _, second = launches(tmp_path, after[0])
    folder = str(tmp_path / "run")
    (losses, values, _), *_ = run_team(split, 1, folder, launch=under("all-reduce"))
    run_team(split, before[1], folder, 8, launch=first, may_die=range(before[1]))
    version = int(snapshots_in(tmp_path / "run")[0].stem)
    for again, result, _ in run_team(split, after[1], folder, launch=second):
        assert min(again) == version + 1 and max(again) == max(losses)
        if after[0] != "all-reduce":  # there each worker has the loss of its part of a batch
            assert all(abs(losses[number] - loss) < 1e-6 * max(1.0, losses[number]) for number, loss in again.items())
        for one, other in zip(values, result, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def two_models(team: Team, folder: str, at: int | None = None) -> Result:
    """Two models with an optimizer each, which make a version each of every batch; one is changed by hand as well."""
    torch.manual_seed(1)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    models: Any = [first, second]
    made = [torch.optim.Adam(first.parameters(), lr=0.05), torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)]
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader(x, BATCH, shuffle=True)
    (first, second), (of_first, of_second), loader = team.setup(models, made, loader)
    losses = {}
    for _ in range(EPOCHS):
        for inputs in loader:
            with team.step():
                for optimizer in (of_first, of_second):
                    loss = second(torch.tanh(first(inputs))).square().mean()
                    loss.backward()
                    optimizer.step()
                    of_first.zero_grad()
                    of_second.zero_grad()
                losses[version_of(team)] = float(loss.detach())
                with torch.no_grad():
                    second.weight.clamp_(-0.3, 0.3)
            if at is not None:
                die(folder, team, at)
    team.barrier()
    team.close()
    return losses, [value.clone() for model in (first, second) for value in model.state_dict().values()], []


def test_two_models_that_are_changed_by_hand_go_on_bit_for_bit(tmp_path: Path) -> None:
    strategy = "all-reduce"
    first, second = launches(tmp_path, strategy)
    folder = str(tmp_path / "run")
    (losses, values, _), *_ = run_team(two_models, 2, folder, launch=under(strategy))
    run_team(two_models, 2, folder, 9, launch=first, may_die=range(2))
    content = torch.load(snapshots_in(tmp_path / "run")[0], weights_only=True)
    assert [len(content["model"]), len(content["optimizer"])] == [2, 2]
    (again, result, _), *_ = run_team(two_models, 2, folder, launch=second)
    assert again == {number: loss for number, loss in losses.items() if number > min(again) - 1}
    assert all(torch.equal(one, other) for one, other in zip(values, result, strict=True))


def test_a_server_with_several_optimizers_says_that_it_has_no_snapshots(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, _ = launches(tmp_path, "sync")
    run_team(two_models, 2, "", launch=first)
    assert capfd.readouterr().err.count("a run with a parameter server and several optimizers has none yet") == 1
    assert not snapshots_in(tmp_path / "run")


def test_a_script_that_loads_a_checkpoint_itself_goes_on_from_that_with_whole_epochs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(team: Team) -> tuple[int, int, bool]:
        model: Any = Counter()
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), make_loader("plain"))
        none = team.checkpoint is None
        team.load(path)
        begun, given = version_of(team), 0
        for index in loader:
            model(index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            given += 1
        return begun, given, none

    first, second = launches(tmp_path, "all-reduce")
    path = str(tmp_path / "own.pt")
    run_team(count, 2, str(tmp_path / "run"), "plain", 9, launch=first, may_die=range(2))
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "version": 5}, path)
    rounds = -(-SAMPLES // BATCH)
    assert run_team(work, 2, launch=second) == [(5, rounds, True)] * 2
    assert "the script loads a checkpoint itself" in capfd.readouterr().err


def test_a_script_without_a_loader_is_told_that_its_loop_begins_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(team: Team, steps: int) -> float:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(steps):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if writer := team._training.snapshots._writer:
                writer.join()
        team.barrier()
        return float(model.weight)

    first, second = launches(tmp_path, "all-reduce")
    run_team(work, 2, 8, launch=first)
    version = int(snapshots_in(tmp_path / "run")[0].stem)
    assert 4 <= version < 8
    each = run_team(work, 2, 8, launch=under("all-reduce"))[0] / 8
    assert run_team(work, 2, 3, launch=second) == [each * (version + 3)] * 2
    assert f"goes on after {version} updates, but the script has given the team no loader" in capfd.readouterr().err


def adapt(team: Team, folder: str, at: int | None = None) -> None:
    """Reports a loss that falls at once, so that `adaptive` uses the gradients of all workers in an update."""
    model: Any = Counter()
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), make_loader("plain"))
    for epoch in range(2 * EPOCHS):
        for step, index in enumerate(loader):
            with team.step():
                model(index).sum().backward()
                team.report(loss=1.0 if at is None or not (epoch or step) else 1e-6)
                optimizer.step()
                optimizer.zero_grad()
            if at is not None:
                die(folder, team, at)
    team.barrier()


def test_a_policy_goes_on_with_its_own_values_and_another_one_begins_anew(tmp_path: Path) -> None:
    policy = "adaptive:of=k-async,start=1"
    first, second = launches(tmp_path, policy)
    folder = tmp_path / "run"
    run_team(adapt, 2, str(folder), 20, launch=first, may_die=range(2))
    known = torch.load(snapshots_in(folder)[0], weights_only=True)[SECTION]["policy"]
    assert known["values"] == {"k": 2, "first": 1.0} and known["loss"] < 1.0
    for resumed, least in ((second, 2), (launches(tmp_path, "async")[1], 1)):
        again = under(resumed.strategy or "", folder=str(tmp_path / f"again{least}"), resume=str(folder))
        run_team(adapt, 2, str(folder), launch=again)
        merge(tmp_path / f"again{least}", 2)
        made = [one for one in read(tmp_path / f"again{least}" / "events.jsonl") if isinstance(one, Update)]
        assert len(made) > 5 and max(one.workers for one in made) == least
