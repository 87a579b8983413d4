"""Workers that come and go while a run goes on: under every policy, by request, by death, at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.checker import events_of, violations
from helpers.forks import QuickRun, playing
from helpers.support import PREAMBLE, Outcome, state_of, wait_until, write_script

from paceline.cluster.control import ask
from paceline.errors import UsageError
from paceline.events import Compute, Event, Join, Leave, Lost, Push, Roster, Update

SCRIPT = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

options = {"samples": 960, "epochs": 1, "leave": None, "load": None, "save": None, "loaders": 0, "awaits": True}
options |= json.loads(sys.argv[1])
may_end = pathlib.Path(os.environ["RUN_NOTES"]) / "may-end.json"
team = paceline.join()
torch.manual_seed(3)
inputs = torch.randn(options["samples"], 6)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
layers = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
loader = DataLoader(data, batch_size=8 * team.world_size, shuffle=True, num_workers=options["loaders"])
model, optimizer, loader = team.setup(model, optimizer, loader)
if options["load"]:
    team.load(options["load"])
note(f"here-{team.rank}", tracked=int(model[1].num_batches_tracked), version=team._trainer.version)
number, told = 0, False
for epoch in range(options["epochs"]):
    for x, y in loader:
        with team.step():
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
        if number == 4 and not told:  # a step that is cancelled does not count
            told = True
            note(f"training-{team.rank}", size=team.world_size)
        if options["awaits"] and not may_end.exists():
            time.sleep(0.01 * number)
        if [team.rank, number] == options["leave"]:
            note("left")
            team.close()
            sys.exit(0)
    team.barrier()
    seen = team.per_replica(team.rank).values
    note(f"epoch-{epoch}-{team.rank}", size=team.world_size, seen=[one for one in seen if one is not None])
note(f"end-{team.rank}", size=team.world_size, version=team._trainer.version)
if options["save"]:
    team.save(options["save"])
"""
)
"""Where it awaits its test, each step is slower than the one before: quick at first, and never over too soon."""
POLICIES = [
    "sync",
    "async",
    "k-sync:k=2",
    "k-batch-sync:k=2",
    "k-async:k=2",
    "k-batch-async:k=2",
    "ssp:s=1",
    "groups:size=1",
    "adaptive:of=k-async,start=1",
]


def command(folder: Path, strategy: str, *words: str, workers: int = 2, **options: Any) -> list[str]:
    script = write_script(folder, SCRIPT)
    fixed = [str(script), "--workers", str(workers), "--strategy", strategy, "--name", "run", "--timeout", "30"]
    return [*fixed, "--slow", "all:0.001+exp(0.004)", *words, "--", json.dumps(options)]


def may_end(run: QuickRun) -> None:
    """What the run was to see has happened."""
    (run.notes / "may-end.json").write_text("{}")


def scale(run: QuickRun, workers: int) -> str:
    return ask(run.cwd / "runs" / "run", workers)


def well(outcome: Outcome) -> list[Event]:
    """The run ended well and left nothing, and its events break no promise."""
    assert outcome.code == 0, outcome.err
    assert outcome.tracebacks == 0, outcome.err
    assert outcome.run.processes() == []
    assert not (outcome.run.cwd / "runs" / "run" / "launcher").exists()
    events = events_of(outcome, "run")
    assert violations(events) == []
    return events


def rosters(events: Iterable[Event]) -> list[list[int]]:
    return [event.workers for event in events if isinstance(event, Roster)]


def pushes(events: Iterable[Event]) -> Counter[int]:
    return Counter(event.rank for event in events if isinstance(event, Push))


@pytest.mark.parametrize("strategy", POLICIES)
def test_workers_join_and_leave_under_every_policy(strategy: str, tmp_path: Path) -> None:
    with playing(command(tmp_path, strategy), tmp_path) as run:
        run.note("training-1")
        assert scale(run, 3) == "from 2 to 3 workers: rank 2 will join"
        third = run.note("training-2")
        assert scale(run, 2) == "from 3 to 2 workers: rank 2 will leave"
        wait_until(lambda: not alive(third["pid"]), 30, "rank 2 to have left")
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert third["size"] == 3
    assert rosters(events)[:3] == [[0, 1], [0, 1, 2], [0, 1]]
    assert pushes(events)[2] >= 4
    assert not outcome.run.noted("end-2")  # it left in the middle
    assert all(outcome.run.noted(f"end-{rank}") for rank in (0, 1))


@pytest.mark.parametrize(
    ("strategy", "words", "options"),
    [
        ("async", ["--servers", "lead"], {}),
        ("k-async:k=2", ["--servers", "all"], {}),
        ("k-batch-sync:k=2", ["--servers", "2"], {}),
        ("k-sync:k=1", ["--compress", "topk:0.1"], {}),
        ("async", ["--correct", "dc-asgd"], {"loaders": 1}),
    ],
)
def test_one_joins_wherever_the_server_is_and_whatever_is_pushed(
    strategy: str, words: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    with playing(command(tmp_path, strategy, *words, **options), tmp_path) as run:
        run.note("training-1")
        scale(run, 3)
        third = run.note("training-2")["pid"]
        scale(run, 2)
        wait_until(lambda: not alive(third), 30, "rank 2 to have left")
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert [0, 1, 2] in rosters(events)
    assert pushes(events)[2] >= 4


def test_one_worker_becomes_two(tmp_path: Path) -> None:
    with playing(command(tmp_path, "sync", "--elastic", workers=1), tmp_path) as run:
        run.note("training-0")
        scale(run, 2)
        run.note("training-1")
        may_end(run)
        outcome = run.finish(90)
    assert rosters(well(outcome))[:2] == [[0], [0, 1]]


def test_groups_take_in_who_joins(tmp_path: Path) -> None:
    with playing(command(tmp_path, "groups:size=2", workers=4, samples=1600), tmp_path) as run:
        run.note("training-3")
        scale(run, 5)
        run.note("training-4")
        scale(run, 3)
        may_end(run)
        outcome = run.finish(90)
    assert [0, 1, 2, 3, 4] in rosters(well(outcome))


def test_two_become_four_and_four_become_two(tmp_path: Path) -> None:
    with playing(command(tmp_path, "k-async:k=2", epochs=2), tmp_path) as run:
        run.note("training-1")
        scale(run, 4)
        run.note("training-2"), run.note("training-3")
        scale(run, 2)
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert [0, 1, 2, 3] in rosters(events)
    assert {event.rank for event in events if isinstance(event, Leave)} == {0, 1, 2, 3}
    assert {event.rank for event in events if isinstance(event, Join)} == {0, 1, 2, 3}


def test_one_who_joins_gets_the_newest_version_and_the_statistics_of_another(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async"), tmp_path) as run:
        run.note("training-1")
        scale(run, 3)
        here = run.note("here-2")
        may_end(run)
        outcome = run.finish(90)
    well(outcome)
    assert run.note("here-0")["tracked"] == 0
    assert here["tracked"] >= 4  # of a worker that had trained on as many
    assert here["version"] >= 4


def test_one_who_joins_does_not_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved.pt")
    with playing(command(tmp_path, "async", samples=160, awaits=False, save=saved), tmp_path) as run:
        well(run.finish(90))
    version = run.note("end-0")["version"]
    with playing(command(tmp_path, "async", load=saved), tmp_path) as run:
        run.note("training-1")
        scale(run, 3)
        assert run.note("here-2")["version"] >= version + 4
        run.note("training-2")
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    updates = max(event.version for event in events if isinstance(event, Update))
    assert {run.note(f"end-{rank}")["version"] for rank in (0, 1, 2)} == {version + updates}


@pytest.mark.parametrize("strategy", ["sync", "k-sync:k=2", "ssp:s=1"])
def test_a_worker_may_leave_early_under_any_policy(strategy: str, tmp_path: Path) -> None:
    words = command(tmp_path, strategy, workers=3, samples=480, epochs=2, leave=[1, 6], awaits=False)
    with playing(words, tmp_path) as run:
        outcome = run.finish(90)
    events = well(outcome)
    assert outcome.run.noted("left")
    assert [0, 2] in rosters(events)
    assert run.note("epoch-1-0")["seen"] == [0, 2]
    assert run.note("end-0")["size"] <= 2


@pytest.mark.parametrize(
    ("strategy", "victim"), [("sync", 0), ("sync", 1), ("async", 0), ("k-sync:k=1", 1), ("k-batch-async:k=2", 0)]
)
def test_a_killed_worker_is_started_again_and_joins(strategy: str, victim: int, tmp_path: Path) -> None:
    with playing(command(tmp_path, strategy, "--restarts", "1"), tmp_path) as run:
        pid = run.note(f"training-{victim}")["pid"]
        (run.notes / f"training-{victim}.json").unlink()
        os.kill(pid, signal.SIGKILL)
        again = run.note(f"training-{victim}")["pid"]
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert again != pid
    assert [event.rank for event in events if isinstance(event, Lost)] == [victim]
    assert rosters(events)[:3] == [[0, 1], [1 - victim], [0, 1]]
    assert f"rank {victim} was killed by signal 9 (SIGKILL); it is started again (0 restarts left)" in outcome.err
    assert "went on without it" not in outcome.err


@pytest.mark.parametrize(
    ("strategy", "words", "victim"),
    [
        ("sync", ["--elastic"], 1),
        ("sync", ["--restarts", "1"], 0),
        ("async", [], 1),
        ("k-sync:k=2", ["--restarts", "1", "--servers", "2"], 1),
        ("groups:size=2,between=sync", ["--elastic"], 1),
    ],
)
def test_a_stopped_worker_is_evicted_and_replaced_where_restarts_are_left(
    strategy: str, words: list[str], victim: int, tmp_path: Path
) -> None:
    with playing(command(tmp_path, strategy, *words, "--timeout", "4"), tmp_path) as run:
        pid = run.note(f"training-{victim}")["pid"]
        (run.notes / f"training-{victim}.json").unlink()
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", 20, "it to be stopped")
        if "--restarts" not in words:
            may_end(run)  # else the others wait for it no sooner than at the end of the epoch
        wait_until(lambda: not alive(pid), 60, "it to be evicted")
        if "--restarts" in words:
            assert run.note(f"training-{victim}")["pid"] != pid
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert [event.rank for event in events if isinstance(event, Lost)] == [victim]
    said = f"rank {victim} did nothing for 4 s while others waited and had to be evicted"
    assert outcome.err.count(said) == 1, outcome.err
    assert outcome.run.noted(f"end-{1 - victim}")


def test_all_are_killed_and_all_come_back(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async", "--restarts", "2"), tmp_path) as run:
        pids = [run.note(f"training-{rank}")["pid"] for rank in (0, 1)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert {event.rank for event in events if isinstance(event, Lost)} == {0, 1}
    assert all(outcome.run.noted(f"end-{rank}") for rank in (0, 1))


def test_restarts_run_out(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async", "--restarts", "1"), tmp_path) as run:
        for _ in range(2):
            pid = run.note("training-1")["pid"]
            (run.notes / "training-1.json").unlink()
            os.kill(pid, signal.SIGKILL)
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert [event.rank for event in events if isinstance(event, Lost)] == [1, 1]
    gone = "paceline: warning: rank 1 was killed by signal 9 (SIGKILL); the others went on without it"
    assert gone in outcome.err.splitlines()


def test_what_is_asked_for_in_vain_is_said_in_one_sentence(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async"), tmp_path) as run:
        run.note("training-1")
        with pytest.raises(UsageError, match="9 workers are asked for; this run has room for 1 to 6"):
            scale(run, 9)
        may_end(run)
        outcome = run.finish(90)
    well(outcome)
    with pytest.raises(UsageError, match="is not a run that goes on"):
        scale(run, 3)
    with pytest.raises(UsageError, match="there is no run at"):
        ask(tmp_path / "runs" / "other", 3)


def test_a_summary_counts_those_who_came_later(tmp_path: Path) -> None:
    with playing(command(tmp_path, "async"), tmp_path) as run:
        run.note("training-1")
        scale(run, 3)
        run.note("training-2")
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    summary = outcome.run.summary("run")
    assert summary["world_size"] == 2
    assert set(summary["workers"]) == {"0", "1", "2"}
    steps = Counter(event.rank for event in events if isinstance(event, Compute))
    assert summary["workers"]["2"]["minibatches"] == steps[2] > 0
    wait_until(lambda: outcome.run.processes() == [], 30, "all to be gone")


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_are_killed_at_any_moment_and_come_back(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    strategy = chance.choice(["sync", "k-sync:k=2", "groups:size=2", "k-batch-sync:k=3"])
    words = ["--restarts", "4"]
    with playing(command(tmp_path, strategy, *words, workers=4, samples=1600, epochs=2), tmp_path) as run:
        for _ in range(4):
            victim = chance.randrange(4)
            pid = run.note(f"here-{victim}")["pid"]
            run.note("training-0"), time.sleep(chance.random() * 0.5)
            if run.ended or not alive(pid):
                continue
            (run.notes / f"here-{victim}.json").unlink()
            os.kill(pid, signal.SIGKILL)
        may_end(run)
        outcome = run.finish(90)
    events = well(outcome)
    assert [event for event in events if isinstance(event, Lost)]


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")
