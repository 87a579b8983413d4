"""A run that was killed in the middle of a stream goes on there, and with no other stream."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline import Team
from paceline.team.snapshot_files import SECTION, snapshots_in

pytestmark = pytest.mark.usefixtures("warm")

SAMPLES, BATCH, EPOCHS = 61, 8, 3


class Numbers(IterableDataset[int]):
    """Every sample is its own index; divided among the processes of a loader."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        process = get_worker_info()
        own, step = (0, 1) if process is None else (process.id, process.num_workers)
        for number in range(own, SAMPLES, step):
            yield (self.first + number) % SAMPLES


def count(
    team: Team, folder: str, options: dict[str, Any], steps: int | None, at: int | None = None, first: int = 0
) -> list[float]:
    """How often each sample was trained on in the history that survives."""
    model: Any = nn.Embedding(SAMPLES, 1)
    nn.init.zeros_(model.weight)
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(Numbers(first), BATCH, **options)
    model, optimizer, loader = team.setup(model, made, loader, steps_per_epoch=steps)
    for _ in range(EPOCHS if steps is None else 6):
        for index in loader:
            model(index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if writer := team._training.snapshots._writer:
                writer.join()
            found = [int(path.stem) for path in snapshots_in(Path(folder))]
            if at is not None and found and found[0] >= at:
                os.kill(os.getpid(), signal.SIGKILL)
    team.barrier()
    team.close()
    return [-float(row) for row in model.weight.detach().flatten()]


@pytest.mark.parametrize(
    ("workers", "then", "options", "steps", "at"),
    [(2, 2, {}, None, 11), (2, 3, {"num_workers": 2}, None, 3), (1, 2, {}, 4, 9)],
)
def test_every_sample_of_a_stream_counts_once_over_both_runs(
    tmp_path: Path, workers: int, then: int, options: dict[str, Any], steps: int | None, at: int
) -> None:
    folder = str(tmp_path / "run")
    first = under("all-reduce", folder=folder, snapshot=0.0)
    run_team(count, workers, folder, options, steps, at, launch=first, may_die=range(workers))
    newest = snapshots_in(tmp_path / "run")[0]
    assert int(newest.stem) >= at
    assert torch.load(newest, weights_only=True)[SECTION]["loaders"][0]["stream"][0] > 0
    second = under("all-reduce", folder=folder, resume=folder)
    expected = run_team(count, 1, "", options, steps)[0]
    assert min(expected) >= 2
    for counts in run_team(count, then, folder, options, steps, launch=second):
        assert counts == expected


def test_another_stream_and_other_batches_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_team(count, 2, folder, {}, None, 5, launch=under("all-reduce", folder=folder, snapshot=0.0), may_die=range(2))
    second = under("all-reduce", folder=folder, resume=folder)
    with pytest.raises(AssertionError, match="the stream is not the one that the snapshot is of"):
        run_team(count, 2, folder, {}, None, None, 7, launch=second)
    with pytest.raises(AssertionError, match="go on with the same batch_size and num_workers"):
        run_team(count, 2, folder, {"num_workers": 2}, None, launch=second)
    with pytest.raises(AssertionError, match="under a strategy without a server"):
        run_team(count, 2, folder, {}, None, launch=under("async", folder=folder, resume=folder))
