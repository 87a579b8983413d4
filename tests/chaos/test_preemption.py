"""SIGTERM to a worker, or to the whole run: each leaves in order, within the grace time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.checker import events_of, violations
from helpers.forks import QuickRun, playing
from helpers.support import PREAMBLE, wait_until, write_script

from paceline.events import Leave, Lost

SCRIPT = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

options = {"epochs": 2, "handler": False, "hangs": None, "loaders": 0} | json.loads(sys.argv[1])
notes = pathlib.Path(os.environ["RUN_NOTES"])
team = paceline.join()
torch.manual_seed(3)
inputs = torch.randn(240, 6)
model = torch.nn.Linear(6, 1)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12, num_workers=options["loaders"])
model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)

def take_long(number, frame):
    note(f"told-{team.rank}")
    time.sleep(3)  # twice what a process had before it was killed
    note(f"handled-{team.rank}")
    sys.exit(7)

if options["handler"]:
    signal.signal(signal.SIGTERM, take_long)
number = 0
try:
    for epoch in range(options["epochs"]):
        for x, y in loader:
            with team.step():
                mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            number += 1
            if number == 3:
                note(f"training-{team.rank}", pid=os.getpid())
                if options["hangs"] == team.rank:
                    time.sleep(1e6)
            if number > 3 and not (notes / "go-on.json").exists():  # slower and slower, so as not to end too soon
                time.sleep(0.01 * number)
finally:
    note(f"finally-{team.rank}", version=team._trainer.version)
note(f"end-{team.rank}")
"""
)


def command(folder: Path, strategy: str, *words: str, workers: int = 3, **options: Any) -> list[str]:
    fixed = [str(write_script(folder, SCRIPT)), "--workers", str(workers), "--strategy", strategy, "--name", "run"]
    return [*fixed, "--timeout", "40", *words, "--", json.dumps(options)]


def tell(run: QuickRun, rank: int, workers: int = 3) -> None:
    """SIGTERM to one worker, once all are training."""
    for one in range(workers):
        run.note(f"training-{one}")
    os.kill(run.note(f"training-{rank}")["pid"], signal.SIGTERM)


@pytest.mark.parametrize(("strategy", "victim"), [("sync", 1), ("k-batch-async:k=2", 0), ("k-sync:k=2", 2)])
def test_under_a_server_the_others_go_on_and_every_sample_counts_once(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    with playing(command(tmp_path, strategy, "--restarts", "2", epochs=3, loaders=1), tmp_path) as run:
        tell(run, victim)
        left = run.note(f"finally-{victim}")
        (run.notes / "go-on.json").write_text("{}")
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    assert outcome.tracebacks == 0, outcome.err
    assert run.processes() == []
    events = events_of(outcome, "run")
    assert violations(events) == []
    assert not any(isinstance(event, Lost) for event in events)
    assert {event.rank for event in events if isinstance(event, Leave)} == {0, 1, 2}
    assert not run.noted(f"end-{victim}"), "it is not started again"
    others = [rank for rank in range(3) if rank != victim]
    assert all(run.note(f"finally-{rank}")["version"] > left["version"] for rank in others)
    assert outcome.err.count(f"paceline: rank {victim} was preempted (SIGTERM) and has left\n") == 1, outcome.err


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_all_leave_when_the_launcher_is_told(strategy: str, tmp_path: Path) -> None:
    with playing(command(tmp_path, strategy, "--grace", "40s", epochs=1000, loaders=1), tmp_path) as run:
        for rank in range(3):
            run.note(f"training-{rank}")
        (run.notes / "go-on.json").write_text("{}")
        run.process.send_signal(signal.SIGTERM)
        outcome = run.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert "paceline: stopped by SIGTERM; all workers have ended" in outcome.err
    assert outcome.tracebacks == 0, outcome.err
    assert all(run.noted(f"finally-{rank}") for rank in range(3))
    assert run.processes() == []
    assert {event.rank for event in events_of(outcome, "run") if isinstance(event, Leave)} == {0, 1, 2}


def test_a_run_that_needs_all_its_workers_says_so(tmp_path: Path) -> None:
    with playing(command(tmp_path, "all-reduce", epochs=3), tmp_path) as run:
        tell(run, 1)
        (run.notes / "go-on.json").write_text("{}")
        outcome = run.finish()
    assert outcome.code == 128 + signal.SIGTERM
    said = (
        "paceline: rank 1 was preempted (SIGTERM) and has left, and this run cannot go on without it; under all-reduce"
    )
    assert said in outcome.err, outcome.err
    assert run.noted("finally-1")
    assert run.processes() == []


def test_a_worker_that_holds_parameters_says_that_the_run_ends_with_it(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async", "--servers", "lead", "--grace", "1s", epochs=1000), tmp_path) as run:
        tell(run, 0)
        outcome = run.finish()
    assert outcome.code == 1, outcome.err
    assert "paceline: rank 0 was told to leave (SIGTERM), but holds parameters of the run" in outcome.err
    assert run.processes() == []


def test_a_step_that_is_longer_than_the_grace_time_is_cancelled(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async", "--grace", "0.5s", epochs=3, hangs=1), tmp_path) as run:
        tell(run, 1)
        (run.notes / "go-on.json").write_text("{}")
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    assert violations(events_of(outcome, "run")) == []
    assert "paceline: rank 1 was told to leave (SIGTERM) and has not left within 0.5 s" in outcome.err
    assert not run.noted("finally-1")


def test_a_handler_of_the_script_has_the_grace_time(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async", "--grace", "40s", epochs=1000, handler=True), tmp_path) as run:
        for rank in range(3):
            run.note(f"training-{rank}")
        run.process.send_signal(signal.SIGTERM)
        for rank in range(3):
            run.note(f"told-{rank}")
        outcome = run.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert all(run.noted(f"handled-{rank}") for rank in range(3))


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async", "--grace", "10min", epochs=1000, hangs=1), tmp_path) as run:
        for rank in range(3):
            run.note(f"training-{rank}")
        (run.notes / "go-on.json").write_text("{}")
        run.process.send_signal(signal.SIGTERM)
        wait_until(lambda: run.noted("finally-0") and run.noted("finally-2"), 30, "the workers that can leave")
        run.process.send_signal(signal.SIGTERM)
        outcome = run.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert run.processes() == []
