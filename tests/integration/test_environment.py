"""A training goes on whatever happens to its records: full disks, other runs of its name, few descriptors."""

from __future__ import annotations

import contextlib
import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.forks import played, playing
from helpers.support import PACELINE, PREAMBLE, finished, write_script

TRAIN = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

rounds, wait = int(sys.argv[1]), sys.argv[2:]
team = paceline.join()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(rounds * 8, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = team.setup(model, optimizer, loader, global_batch=8)
note(f"begun-{team.rank}")
while wait and not pathlib.Path(wait[0]).exists():
    time.sleep(0.01)
for x, y in loader:
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("a line of the script " * 10)
    team.report(loss=loss)
if rounds == 11:
    team.save()
note(f"done-{team.rank}", loss=float(loss.detach()))
"""
)


def updates(folder: Path) -> int:
    found: int = json.loads((folder / "summary.json").read_text())["updates"]
    return found


# -- runs of one name ------------------------------------------------------------------------------------------------


def test_two_runs_of_one_name_at_a_time_keep_both_records(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    with playing([script, "--name", "z", "--", "30", "go"], tmp_path) as first:
        first.note("begun-0")
        with playing([script, "--name", "z", "--", "20", "go"], tmp_path) as second:
            second.note("begun-0")
            (tmp_path / "go").touch()
            outcomes = [run.finish() for run in (first, second)]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["z", "z-2"]
    assert updates(tmp_path / "runs" / "z") == 30
    assert updates(tmp_path / "runs" / "z-2") == 20
    assert "runs/z is of a run that goes on; this one is runs/z-2" in outcomes[1].err
    for name in ("z", "z-2"):
        assert not (tmp_path / "runs" / name / "streams").exists()
        assert "a line of the script" in (tmp_path / "runs" / name / "output" / "0.log").read_text()
    # Once both are over the name is free again.
    assert played([script, "--name", "z", "--", "10"], tmp_path).code == 0
    assert updates(tmp_path / "runs" / "z") == 10
    assert updates(tmp_path / "runs" / "z~1") == 30


def test_runs_without_a_name_that_start_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(playing([script, "--", str(10 + number)], tmp_path)) for number in range(3)]
        assert [run.finish().code for run in runs] == [0, 0, 0]
    assert sorted(updates(path) for path in (tmp_path / "runs").iterdir()) == [10, 11, 12]


def test_only_the_user_can_read_a_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    assert played([script, "--name", "z", "--strategy", "async", "--", "11"], tmp_path).code == 0
    assert list((tmp_path / "runs" / "z" / "checkpoints").glob("*.pt"))
    for path in [tmp_path / "runs" / "z", *(tmp_path / "runs" / "z").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# -- no room, no rights ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("only root can make a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
@pytest.mark.parametrize("size", ["4k", "16k", "64k"])
def test_a_full_disk_ends_the_recording_and_not_the_training(strategy: str, size: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    with mounted(tmp_path / "runs", f"size={size}"):
        outcome = played([script, "--name", "z", "--strategy", strategy, "--", "600"], tmp_path)
        assert not list((tmp_path / "runs" / "z").glob(".*")), "no part of a file"
    assert outcome.code == 0, outcome.err
    assert outcome.tracebacks == 0
    said = [line for line in outcome.err.splitlines() if line.startswith("paceline: ")]
    assert said == [
        "paceline: recording of z stops: No space left on device; the training goes on without it",
        "paceline: done; how it went is not recorded",
    ]
    assert outcome.run.note("done-0")["loss"] < 1.0


def test_a_folder_that_cannot_be_written_is_said_and_the_training_goes_on(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    with mounted(tmp_path / "runs", "size=64k,ro"):
        outcome = played([script, "--live", "--", "10"], tmp_path)
    assert outcome.code == 0, outcome.err
    assert [line for line in outcome.err.splitlines() if line.startswith("paceline: ")] == [
        "paceline: runs/ cannot be written: Read-only file system; the run is not recorded",
        "paceline: --live shows nothing, as the run is not recorded",
        "paceline: done; how it went is not recorded",
    ]
    assert outcome.run.note("done-0")


def test_an_error_of_the_script_is_told_where_nothing_can_be_written(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import paceline\npaceline.join()\nraise ValueError('no such data')\n")
    with mounted(tmp_path / "runs", "size=64k,ro"):
        outcome = played([script], tmp_path)
    assert outcome.code == 1
    assert "failed: ValueError: no such data" in outcome.err


@pytest.mark.parametrize(("strategy", "files"), [("all-reduce", 24), ("async", 26)])
def test_a_run_needs_few_descriptors(strategy: str, files: int, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    command = f"ulimit -n {files}; exec {PACELINE} run {script} --name z --strategy {strategy} -- 10"
    outcome = finished(["bash", "-c", command], tmp_path)
    assert (outcome.code, outcome.tracebacks) == (0, 0), outcome.err


@pytest.mark.parametrize(("limit", "word"), [("-n 12", "raise it with ulimit -n"), ("-f 64", "(ulimit -f); raise it")])
def test_a_limit_that_no_training_can_do_with_is_one_sentence(limit: str, word: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    outcome = finished(["bash", "-c", f"ulimit {limit}; exec {PACELINE} run {script} --name z -- 10"], tmp_path)
    assert outcome.code in (1, 2)
    assert [word in line for line in outcome.err.splitlines()] == [True]


def test_too_few_descriptors_for_a_server_are_one_sentence_too(tmp_path: Path) -> None:
    command = f"ulimit -n 23; exec {PACELINE} run {write_script(tmp_path, TRAIN)} --name z --strategy async -- 10"
    outcome = finished(["bash", "-c", command], tmp_path)
    assert (outcome.code, outcome.tracebacks) == (1, 0), outcome.err
    assert "23 open files, which is the limit here, are too few; raise it with ulimit -n" in outcome.err


def test_a_page_of_a_run_without_records_is_said_to_show_nothing(tmp_path: Path) -> None:
    outcome = played([write_script(tmp_path, TRAIN), "--live", "--no-record", "--", "10"], tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("--live shows nothing, as the run is not recorded") == 1


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_restarts_are_no_word_worth_where_nobody_is_lost(strategy: str, tmp_path: Path) -> None:
    outcome = played([write_script(tmp_path, TRAIN), "--restarts", "2", "--strategy", strategy, "--", "10"], tmp_path)
    assert (outcome.code, "--restarts" in outcome.err) == (0, False)
