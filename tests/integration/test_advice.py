"""Advice of a report names what would be quicker, and by how much; whoever follows it gets what was promised."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forks import done, played
from helpers.load import above_noise
from helpers.support import PACELINE, write_script

from paceline.report.advice import Adviser
from paceline.report.slowness import PARTS, WorkerSteps, find_slowness
from paceline.report.source import open_run

TRAIN = """
import time
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(20 * 12, 4)), batch_size=12)
model, optimizer, loader = team.setup(model, optimizer, loader)
for (x,) in loader:
    with team.step():
        loss = model(x).mean()
        time.sleep(FACTOR * (0.32 if team.rank == 3 else 0.08))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def _played(cwd: Path, words: list[str], factor: float, *, slow: bool = True) -> None:
    """Runs the script, in which worker 3 takes four times as long as the others if it is slow."""
    text = TRAIN.replace("FACTOR", f"{factor:g}")
    script = write_script(cwd, text if slow else text.replace("team.rank == 3", "False"))
    outcome = played([*(words or [script, "--workers", "4", "--name", "first"]), "--quiet"], cwd, 120)
    assert outcome.code == 0, outcome.err


def _facts(cwd: Path, name: str) -> dict[str, Any]:
    return open_run(cwd / "runs" / name).facts()


def test_the_advised_lines_bring_what_was_promised(tmp_path: Path) -> None:
    def check(factor: float) -> None:
        _played(tmp_path, [], factor)
        facts = _facts(tmp_path, "first")
        advice, now = {one["change"]: one for one in facts["advice"]}, facts["seconds_per_update"]
        for chosen, name in (("without worker 3", "second"), ("--strategy k-sync:k=3", "third")):
            assert chosen in advice, list(advice)
            promised = advice[chosen]["seconds_per_update"]
            assert promised < 0.5 * now
            program, verb, *words = shlex.split(advice[chosen]["command"])
            assert (program, verb) == ("paceline", "run")
            # Without worker 3, the machine that is slow is not used any more.
            _played(tmp_path, [*words, "--name", name], factor, slow="without" not in chosen)
            reached = _facts(tmp_path, name)["seconds_per_update"]
            assert now - reached >= 0.9 * (now - promised)
        _check_text(tmp_path)

    above_noise(check, (1.0, 4.0))


def _check_text(cwd: Path) -> None:
    """Advice is in the terminal, too."""
    outcome = done([PACELINE, "report", "runs/first", "--text"], cwd)
    assert outcome.code == 0, outcome.err
    words = " ".join(outcome.out.split())
    assert "What would be quicker, by simulation of this run:" in words
    assert "· without worker 3: " in words and "--workers 3 --strategy all-reduce" in words


def _adviser(lengths: list[list[float]], part: str, measured: float, strategy: str = "all-reduce") -> Adviser:
    """Of workers whose steps take so long in one part, and 1 s in another."""
    steps = {}
    for rank, own in enumerate(lengths):
        parts = np.zeros((len(own), len(PARTS)))
        parts[:, PARTS.index("backward")] = 1.0
        parts[:, PARTS.index(part)] += own
        steps[rank] = WorkerSteps(np.arange(float(len(own))), parts, 0)
    config = {"script": "train.py", "arguments": ["-n", "3"], "slow": ["1:2@link"]}
    return Adviser(steps, find_slowness(steps), strategy, measured, config)


def test_a_slow_loader_is_told_to_use_more_processes_and_what_that_brings() -> None:
    advice = _adviser([[0.1] * 20, [0.1] * 20, [3.0] * 20], "loading", 4.0).advise()
    loader = next(one for one in advice if one.change.startswith("more loader processes (num_workers)"))
    assert loader.seconds_per_update == pytest.approx(1.1) and loader.samples == pytest.approx(4 / 1.1)
    assert "worker 2" in loader.change and loader.command is None
    assert not any("balance" in one.change for one in advice), "batches are balanced by the pace of computing"
    policy = next(one for one in advice if "k-sync:k=2" in one.change)
    assert policy.command == "paceline run train.py --workers 3 --strategy k-sync:k=2 --slow 1:2@link -- -n 3"
    assert [one.staleness > 0.05 for one in advice] == sorted(one.staleness > 0.05 for one in advice)


def test_a_slow_forward_pass_is_balanced() -> None:
    advice = _adviser([[0.1] * 20, [0.1] * 20, [3.0] * 20], "forward", 4.0).advise()
    balanced = next(one for one in advice if one.change.startswith("balance=True"))
    assert balanced.seconds_per_update == pytest.approx(3 / (2 / 1.1 + 1 / 4.0))


def test_no_policy_is_promised_to_leave_a_stall_early() -> None:
    """Each of four workers has a stall of 4 s in one of its five steps, which other ones do not share."""
    lengths = [[4.0 if step % 5 == rank else 0.1 for step in range(40)] for rank in range(4)]
    adviser = _adviser(lengths, "forward", 4.0)
    advice = {one.change: one for one in adviser.advise()}
    stalled = advice["--strategy k-sync:k=3"]
    # A step takes 1.9 s in the mean, and no worker begins one before its last one is over.
    assert stalled.samples < 4 * 4.0 / (1.9 * 3) and stalled.seconds_per_update > 1.4


@pytest.mark.parametrize(
    ("lengths", "measured", "strategy"),
    [
        ([[0.1] * 20] * 3, 1.1, "all-reduce"),  # nobody is slow
        ([[0.1] * 5, [3.0] * 5], 4.0, "all-reduce"),  # too few steps
        ([[0.1] * 20, [3.0] * 20], 8.0, "all-reduce"),  # half of the time is something that the steps do not have
        ([[0.1] * 20, [3.0] * 20], 4.0, "pipeline:stages=2,microbatches=2"),
    ],
)
def test_nothing_is_promised_that_is_not_known(lengths: list[list[float]], measured: float, strategy: str) -> None:
    assert _adviser(lengths, "loading", measured, strategy).advise() == []
