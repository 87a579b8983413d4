"""Bad input is refused with one sentence that says what is allowed, and exit code 2; never with a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.forks import starting
from helpers.support import PACELINE, write_script
from helpers.teams import run_script

from paceline.config import Launch

FINE = "print('this script should not have run')\n"


def refused(command: list[str | Path], folder: Path, *words: str) -> None:
    """Run a command that must be refused with these words."""
    with starting(command, folder) as run:
        outcome = run.finish()
    assert outcome.code == 2, outcome.err
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("paceline: ")
    assert outcome.tracebacks == 0
    for word in words:
        assert word in lines[0]
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "gossip"], ["unknown strategy 'gossip'", "'all-reduce'"]),
        (["--strategy", "all-reduce:shape=ring"], ["'all-reduce'", "no option 'shape'"]),
        (["--workers", "0"], ["--workers", "0", "at least 1"]),
        (["--slow", "2:3"], ["--slow is '2:3'", "rank from 0 to 1", "'all'"]),
        (["--slow", "1:often"], ["--slow is '1:often'", "factor of at least 1", "exp(MEAN)", "pareto"]),
        (["--name", "../elsewhere"], ["--name", "'../elsewhere'", "letters, digits"]),
        (["--timeout", "0"], ["--timeout", "above 0"]),
        (["--timeout", "inf"], ["--timeout is inf", "at most 1,000,000 seconds"]),
        (["--name", "x" * 300], ["--name has 300 bytes", "200"]),
        (["--strategy", "k-sync:k=2,k=1"], ["option 'k' of strategy 'k-sync' is given twice"]),
        (["--strategy", "groups:size=1,between=k-sync:k=2,k=1"], ["option 'k' of strategy 'k-sync' is given twice"]),
        (["--strategy", "sync", "--servers", "1000"], ["servers is 1000", "at most 64"]),
        (["--speed", "3"], ["--speed"]),
    ],
    ids=[
        "strategy",
        "option",
        "workers",
        "rank",
        "slowness",
        "name",
        "timeout",
        "endless",
        "long",
        "twice",
        "nested",
        "servers",
        "unknown",
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(options: list[str], words: list[str], tmp_path: Path) -> None:
    script = write_script(tmp_path, FINE)
    refused([PACELINE, "run", script, *options], tmp_path, *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "value", "word", "more"),
    [
        ("--bandwidth", "fast", "a rate, as 1Gbit/s", []),
        ("--bandwidth", "fast", "a rate, as 1Gbit/s", ["--partition"]),
        ("--latency", "-1us", "a time, as 2ms", []),
        ("--latency", "-1us", "a time, as 2ms", ["--partition"]),
        ("--activations", "many", "a size, as 25MB", []),
    ],
)
def test_a_plan_refuses_what_it_cannot_read_before_it_profiles(
    option: str, value: str, word: str, more: list[str], tmp_path: Path
) -> None:
    refused([PACELINE, "plan", write_script(tmp_path, FINE), option, value, *more], tmp_path, option, value, word)


def test_a_page_into_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused([PACELINE, "report", "a", "-o", "absent/page.html"], tmp_path, "absent/page.html", "no folder absent")
    assert not (tmp_path / "absent").exists()


def test_another_users_run_is_not_scaled(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    os.chown(tmp_path / "runs" / "x", 12345, -1)
    refused([PACELINE, "scale", "x", "3"], tmp_path, "runs/x belongs to the user with the number 12345")


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused([PACELINE, "run", "absent.py"], tmp_path, "no script", "absent.py")
    assert not (tmp_path / "runs").exists()


MISTAKES = """
import sys
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

mistake = sys.argv[1]
models = {"no parameters": torch.nn.Flatten, "no shape": lambda: torch.nn.LazyLinear(1)}
model = models.get(mistake, lambda: torch.nn.Linear(2, 1))()
source = model if mistake not in ("no parameters", "another model") else torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
loader = DataLoader(data, batch_size=2)
options = {
    "small batch": {"global_batch": 1},
    "gradients": {"gradients": "exact"},
    "steps": {"steps_per_epoch": 3},
    "no steps": {"steps_per_epoch": 0},
}.get(mistake, {})
team = paceline.join()
team.setup(model, optimizer, loader, **options)
print("this setup should have been refused")
"""


def test_a_wrong_setup_is_refused_in_one_sentence_for_all_workers(tmp_path: Path) -> None:
    script = write_script(tmp_path, MISTAKES)
    refused([PACELINE, "run", script, "--", "no parameters"], tmp_path, "model has no parameters")


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("no parameters", ["model has no parameters"]),
        ("no shape", ["lazy parameters", "call it once before setup"]),
        ("steps", ["steps_per_epoch is for a loader without a length", "IterableDataset"]),
        ("no steps", ["steps_per_epoch is 0", "at least 1"]),
        ("another model", ["optimizer holds 2 parameters that the model does not have"]),
        ("small batch", ["global_batch is 1", "at least the number of workers, 2"]),
        ("gradients", ["gradients is 'exact'", "'local'", "'visible'"]),
    ],
    ids=["no-parameters", "no-shape", "steps", "no-steps", "another-model", "small-batch", "gradients"],
)
def test_every_worker_is_told_what_is_wrong_with_its_setup(mistake: str, words: list[str], tmp_path: Path) -> None:
    for kind, message in run_script(write_script(tmp_path, MISTAKES), 2, mistake):
        assert kind == "UsageError"
        assert "\n" not in message
        for word in words:
            assert word in message


SERVED = "import paceline\npaceline.join()\n" + FINE


def test_what_is_for_a_server_is_refused_where_there_is_none(tmp_path: Path) -> None:
    script = write_script(tmp_path, SERVED)
    refused([PACELINE, "run", script, "--servers", "2"], tmp_path, "--servers", "parameter server", "'all-reduce'")


@pytest.mark.parametrize(
    "launch", [Launch(corrections=["dc-asgd"]), Launch(compress="int8")], ids=["correct", "compress"]
)
def test_so_is_what_is_done_to_what_is_pushed(launch: Launch, tmp_path: Path) -> None:
    for kind, message in run_script(write_script(tmp_path, SERVED), 2, launch=launch):
        assert (kind, message.count("\n")) == ("UsageError", 0)
        assert "--correct and --compress are for a parameter server, which 'all-reduce' does not have" in message
