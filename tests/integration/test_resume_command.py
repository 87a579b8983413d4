"""`paceline run --resume` goes on with the same script where everything was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers.forks import QuickRun, played, playing
from helpers.load import allowed

from paceline.team.snapshot_files import snapshots_in

SCRIPT = """
import sys, time
import torch, paceline

epochs, stop = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
team = paceline.join()
model = torch.nn.Embedding(48, 1)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(range(48), 4, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
steps = 0
for epoch in range(epochs):
    for index in loader:
        with team.step():
            model(index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        if writer := team._training.snapshots._writer:
            writer.join()  # so that every second version has a snapshot
        while steps == stop and team.is_lead:
            time.sleep(0.1)  # until it is killed; the others wait for it
team.barrier()
team.close()
print("counts", sorted({-int(row) for row in model.weight.detach().flatten()}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "count.py"
    path.write_text(SCRIPT)
    return path


def kill_everything(run: QuickRun, folder: Path, version: int) -> None:
    """Kill -9 of the launcher, all workers and servers, once there is a snapshot of this version."""
    until = time.monotonic() + allowed(30.0)
    while not any(int(path.stem) >= version for path in snapshots_in(folder)):
        assert time.monotonic() < until, (run.notes / "stderr").read_text()
        assert run.process.poll() is None, (run.notes / "stderr").read_text()
        time.sleep(0.02)
    for process in run.processes():
        with contextlib.suppress(ProcessLookupError):  # it has ended with its launcher
            os.kill(process, signal.SIGKILL)
    run.process.wait()


def test_a_killed_run_goes_on_and_every_sample_counts_once_an_epoch(tmp_path: Path, script: Path) -> None:
    first = [script.name, "--workers", "2", "--name", "first", "--snapshot", "0s", "--", "3", "17"]
    with playing(first, tmp_path) as run:
        kill_everything(run, tmp_path / "runs" / "first", 12)
    done = played(["--resume", "first", "--", "3", "0"], tmp_path)
    assert done.code == 0, done.err
    assert "counts [3]" in done.out
    assert "the earlier runs/first is now runs/first~1" in done.err
    assert "1 epoch is over in the run before" in done.err
    config = json.loads((tmp_path / "runs" / "first" / "config.json").read_text())
    assert (config["resume"], config["workers"], config["arguments"]) == ("first", 2, ["3", "0"])


def test_a_run_that_went_on_and_was_killed_goes_on_with_other_workers_and_another_policy(
    tmp_path: Path, script: Path
) -> None:
    first = [script.name, "--workers", "3", "--strategy", "async", "--name", "first", "--snapshot", "0s", "--", "4"]
    with playing([*first, "8"], tmp_path) as run:
        kill_everything(run, tmp_path / "runs" / "first", 6)
    newest = snapshots_in(tmp_path / "runs" / "first")[0].name
    second = ["--resume", "first", "--workers", "2", "--strategy", "all-reduce", "--snapshot", "0s", "--", "4", "9"]
    with playing(second, tmp_path) as run:
        kill_everything(run, tmp_path / "runs" / "first", int(newest[:8]) + 6)
    third = ["--resume", "first", "--strategy", "k-sync:k=1", "--", "4", "0"]
    done = played(third, tmp_path)
    assert done.code == 0, done.err
    assert "counts [4]" in done.out


def test_a_damaged_snapshot_is_said_and_the_one_before_is_taken(tmp_path: Path, script: Path) -> None:
    first = [script.name, "--name", "first", "--snapshot", "0s", "--", "2", "9"]
    with playing(first, tmp_path) as run:
        kill_everything(run, tmp_path / "runs" / "first", 7)
    newest, before = snapshots_in(tmp_path / "runs" / "first")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    newest.write_bytes(content)
    done = played(["--resume", "first", "--", "2", "0"], tmp_path)
    assert done.code == 0, done.err
    assert "counts [2]" in done.out
    assert f"{newest.name} is damaged" in done.err.replace(" cannot be read", " is damaged")
    assert f"goes on from {before.name}, the snapshot before" in done.err


def test_a_run_without_snapshots_or_that_goes_on_is_refused(tmp_path: Path, script: Path) -> None:
    assert "there is no run 'first'" in played(["--resume", "first"], tmp_path).err
    assert played([script.name, "--name", "first", "--snapshot", "off", "--", "1", "0"], tmp_path).code == 0
    refused = played(["--resume", "first"], tmp_path)
    assert refused.code == 2 and "has no snapshot to go on from" in refused.err
    with playing([script.name, "--name", "second", "--snapshot", "0s", "--", "2", "9"], tmp_path) as run:
        folder = tmp_path / "runs" / "second"
        until = time.monotonic() + allowed(30.0)
        while not snapshots_in(folder) and time.monotonic() < until:
            time.sleep(0.02)
        assert "goes on; stop it" in played(["--resume", "second"], tmp_path).err
        kill_everything(run, folder, 1)


@pytest.mark.parametrize("text", ["30", "5 s", "-1s", "often"])
def test_a_time_without_a_unit_is_refused(tmp_path: Path, script: Path, text: str) -> None:
    refused = played([script.name, "--snapshot", text], tmp_path)
    assert refused.code == 2 and "it must be a time, as 30s, 5min or 1h, or off" in refused.err
