"""Points in the paths of real runs, and faults that happen there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.checker import events_of, violations
from helpers.forks import played
from helpers.support import Outcome, drill

from paceline import failpoints

WORKER = ["push.made", "request.sent", "pull.begin", "pull.done"]
COORDINATOR = ["push.received", "push.held", "update.begin", "update.written", "update.published"]
COORDINATOR += ["answer.begin", "answer.sent"]
SERVER = ["update.chunk", "collect.chunk", "chunk.written"]
TOGETHER = ["reduce.agreed", "update.chunk", "chunk.written", "reduce.written", "reduce.published"]


def run(folder: Path, faults: str, *words: str) -> tuple[Outcome, set[str]]:
    """A run with these faults, and those that have happened."""
    fired = folder / "fired"
    fired.mkdir()
    settings: dict[str, Any] = {failpoints.VARIABLE: faults, failpoints.FIRED: str(fired)}
    script = drill(folder, "def fault(rank): pass")
    outcome = played([script, "--name", "hurt", *words], folder, **settings)
    return outcome, {path.name.replace("@", "/") for path in fired.iterdir()}


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("k-batch-async:k=2", {"worker1": WORKER, "server0": [*COORDINATOR, *SERVER], "server1": SERVER}),
        ("all-reduce", {"worker0": TOGETHER, "worker1": TOGETHER}),
    ],
)
def test_a_run_reaches_every_point_of_its_paths(strategy: str, where: dict[str, list[str]], tmp_path: Path) -> None:
    faults = {f"{process}/{point}:1:delay=0" for process, points in where.items() for point in points}
    words = [] if strategy == "all-reduce" else ["--servers", "2"]
    outcome, fired = run(tmp_path, ",".join(sorted(faults)), "--strategy", strategy, *words)
    assert outcome.code == 0, outcome.err
    assert fired == faults


def test_a_worker_that_joins_a_run_reaches_every_point_of_that(tmp_path: Path) -> None:
    faults = {f"worker1/join.{moment}:1:delay=0" for moment in ("begin", "sent", "done")}
    faults |= {"server0/join.admitted:1:delay=0", "worker1/push.made:2:kill"}
    outcome, fired = run(tmp_path, ",".join(sorted(faults)), "--strategy", "async", "--restarts", "1")
    assert outcome.code == 0, outcome.err
    assert fired == faults
    assert violations(events_of(outcome, "hurt")) == []


@pytest.mark.parametrize("point", WORKER)
def test_a_worker_killed_anywhere_in_its_step_costs_no_sample(point: str, tmp_path: Path) -> None:
    outcome, fired = run(tmp_path, f"worker1/{point}:3:kill", "--strategy", "async")
    assert fired == {f"worker1/{point}:3:kill"}
    assert outcome.code == 0, outcome.err
    assert "rank 1 died" in outcome.err
    assert violations(events_of(outcome, "hurt")) == []


def test_a_fault_that_does_not_exist_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "update.chunks:1:kill")
    assert outcome.code == 2
    assert "PACELINE_FAULTS: 'update.chunks:1:kill' is no fault; it must be [PROCESS/]POINT:NTH:ACTION" in outcome.err
    assert outcome.tracebacks == 0
