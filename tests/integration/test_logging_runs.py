"""Runs that are logged while they go on: by a launcher, by a script of its own, to a gateway, to what is broken."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import tensorboard.summary.writer.event_file_writer  # noqa: F401  # once here, not in every process that logs
from helpers import forks
from helpers.gateway import gateway
from helpers.support import PYTHON, TORCHRUN, wait_until, write_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS = 30
SCRIPT = """
import sys
import paceline, torch
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join({join})
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
inputs = torch.randn(30 * 12, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12)
model, optimizer, loader = team.setup(model, optimizer, loader)
while True:
    for x, y in loader:
        with team.step():
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            team.report(loss=loss)
    if len(sys.argv) == 1:
        break
"""


def script(folder: Path, join: str = "") -> Path:
    return write_script(folder, SCRIPT.replace("{join}", join))


def board(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def wait_for_loss(folder: Path) -> None:
    """Waits until a loss is logged."""
    wait_until(lambda: any((folder / "tensorboard").glob("events*")), 60.0, "the first values")
    wait_until(lambda: "loss" in board(folder).Tags()["scalars"], 60.0, "the first loss")


def check_board(folder: Path, workers: int) -> None:
    """It has every loss that the lead reported, once, and the run's own values up to its end."""
    found = board(folder)
    assert [one.step for one in found.Scalars("loss")] == list(range(1, STEPS + 1))
    updates = found.Scalars("paceline/updates")
    assert (updates[-1].step, updates[-1].value) == (STEPS, STEPS)
    assert found.Scalars("paceline/samples_per_second")[-1].value > 0
    assert 0 <= found.Scalars("paceline/waiting")[-1].value <= 1
    (config,) = found.Tensors("paceline/config")[0].tensor_proto.string_val
    for row in (f"world_size | {workers}", "strategy | all-reduce", "optimizer | SGD", "optimizer.momentum | 0.9"):
        assert f"| {row} |" in config.decode()


def test_a_launched_run_is_logged_to_its_end(tmp_path: Path) -> None:
    script(tmp_path)
    with forks.playing(["train.py", "--workers", "2", "--name", "first", "--log", "tensorboard"], tmp_path) as run:
        outcome = run.finish()
        assert outcome.code == 0, outcome.err
        assert run.processes() == []
    check_board(tmp_path / "runs" / "first", 2)


def test_a_launcher_logs_what_the_script_asks_for_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    script(tmp_path, "loggers=['tensorboard']")
    outcome = forks.played(["train.py", "--workers", "2", "--name", "first"], tmp_path)
    assert outcome.code == 0, outcome.err
    check_board(tmp_path / "runs" / "first", 2)
    outcome = forks.played(["train.py", "--workers", "1", "--name", "none", "--no-record"], tmp_path)
    assert outcome.code == 0, outcome.err
    assert not (tmp_path / "runs" / "none" / "tensorboard").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_without_a_launcher_the_lead_starts_its_loggers(workers: int, tmp_path: Path) -> None:
    path = script(tmp_path, "name='first', loggers='tensorboard'")
    command: list[str | Path] = [PYTHON, path]
    if workers > 1:
        command = [TORCHRUN, "--standalone", "--nproc-per-node", str(workers), path]
    with forks.starting(command, tmp_path) as run:
        outcome = run.finish()
        assert outcome.code == 0, outcome.err
        assert run.processes() == []
    check_board(tmp_path / "runs" / "first", workers)


def test_a_script_that_asks_for_loggers_and_records_nothing_is_told_to_name_its_run(tmp_path: Path) -> None:
    outcome = forks.done([PYTHON, script(tmp_path, "loggers='tensorboard'")], tmp_path)
    assert outcome.code == 1
    assert "loggers read the records of a run, and this one has none; name it" in outcome.err.splitlines()[-1]


def test_a_logger_that_is_broken_does_not_hurt_the_training(tmp_path: Path) -> None:
    script(tmp_path)
    broken = {"MLFLOW_TRACKING_URI": "nowhere://at/all"}
    words = ["train.py", "--workers", "2", "--name", "first", "--log", "mlflow,tensorboard"]
    outcome = forks.played(words, tmp_path, **broken)
    assert outcome.code == 0, outcome.err
    said = [line for line in outcome.err.splitlines() if line.startswith("paceline: logging to")]
    assert len(said) == 1 and said[0].startswith("paceline: logging to mlflow stops: ")
    check_board(tmp_path / "runs" / "first", 2)


def test_the_loggers_of_a_killed_launcher_end_with_it(tmp_path: Path) -> None:
    script(tmp_path)
    words = ["train.py", "--workers", "2", "--name", "first", "--log", "tensorboard", "--", "for ever"]
    with forks.playing(words, tmp_path) as run:
        wait_for_loss(tmp_path / "runs" / "first")
        run.process.send_signal(signal.SIGKILL)
        wait_until(lambda: run.processes() == [], 30.0, "the end of all processes")
    assert board(tmp_path / "runs" / "first").Scalars("loss")


def test_an_interrupted_run_is_logged_as_far_as_it_went(tmp_path: Path) -> None:
    script(tmp_path)
    words = ["train.py", "--workers", "2", "--name", "first", "--log", "tensorboard", "--", "for ever"]
    with forks.playing(words, tmp_path) as run:
        wait_for_loss(tmp_path / "runs" / "first")
        run.process.send_signal(signal.SIGINT)
        assert run.finish().code == 130
        assert run.processes() == []
        metrics = [event for event in run.events("first") if event["event"] == "metric"]
    assert [one.step for one in board(tmp_path / "runs" / "first").Scalars("loss")] == [
        metric["version"] for metric in metrics if metric["rank"] == 0
    ]


def test_a_run_that_is_over_can_be_logged_again(tmp_path: Path) -> None:
    script(tmp_path)
    assert forks.played(["train.py", "--workers", "2", "--name", "first"], tmp_path).code == 0
    folder = tmp_path / "runs" / "first"
    assert not (folder / "tensorboard").exists()
    outcome = forks.done([PYTHON, "-m", "paceline", "log", folder, "--to", "tensorboard"], tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    check_board(folder, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--log", "tensorbord"], "--log is 'tensorbord'; it must be one of 'tensorboard', 'wandb', 'mlflow'"),
        (["--push-metrics", "gateway:9091"], "--push-metrics is 'gateway:9091'; it must be a Pushgateway's address"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_started(words: list[str], sentence: str, tmp_path: Path) -> None:
    script(tmp_path)
    outcome = forks.played(["train.py", *words], tmp_path)
    assert outcome.code == 2
    assert outcome.err.startswith(f"paceline: {sentence}")
    assert not (tmp_path / "runs").exists()


def test_the_metrics_of_a_run_are_pushed_until_it_is_over(tmp_path: Path) -> None:
    script(tmp_path)
    with gateway() as (url, pushed):
        outcome = forks.played(["train.py", "--workers", "2", "--name", "first", "--push-metrics", url], tmp_path)
    assert outcome.code == 0, outcome.err
    assert pushed[-1].path == "/metrics/job/paceline/run/first"
    assert "paceline_up 0.0" in pushed[-1].body and f"paceline_updates_total {STEPS}.0" in pushed[-1].body
    assert 'paceline_metric{name="loss"}' in pushed[-1].body
