"""All-reduce that takes workers in again: every sample counts once an epoch, and all have the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.checker import events_of
from helpers.forks import QuickRun, playing
from helpers.support import PREAMBLE, Outcome, wait_until, write_script

from paceline import failpoints
from paceline.cluster.control import ask
from paceline.errors import UsageError
from paceline.events import Lost, Roster

EPOCHS, WORKERS = 3, 3
SCRIPT = (
    PREAMBLE
    + """
import torch, paceline
from helpers.counting import Counting
from torch.utils.data import DataLoader, TensorDataset

options = {"loaders": 0, "ahead": None, "balance": False, "batch": 6} | json.loads(sys.argv[1])
notes = pathlib.Path(os.environ["RUN_NOTES"])
team = paceline.join()
torch.manual_seed(5)
model = torch.nn.Sequential(Counting(300))
model.register_buffer("updates", torch.zeros((), dtype=torch.int64))
# Every sample adds 1 to its count, however many are in an update. The momentum of `drift` is state to catch up with.
model.register_parameter("drift", torch.nn.Parameter(torch.zeros(9)))
groups = [{"params": [model[0].counts, model[0].ballast]}, {"params": [model.drift], "momentum": 0.5}]
optimizer = torch.optim.SGD(groups, lr=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.99**step])
data = TensorDataset(torch.arange(300))
processes = {"num_workers": options["loaders"], "prefetch_factor": options["ahead"]}
loader = DataLoader(data, options["batch"], shuffle=True, **processes)
model, optimizer, loader = team.setup(model, optimizer, loader, balance=options["balance"])
number = 0
for epoch in range(3):
    for (numbers,) in loader:
        (model(numbers) - model.drift.sum()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        model.updates += 1
        number += 1
        if team.world_size == 3 and team.lead > 1:
            note("alone")
        if number == 3:
            note(f"training-{team.rank}-{os.getpid()}", pid=os.getpid(), size=team.world_size)
        if not (notes / "go-on.json").exists():  # slower and slower, so as not to end too soon
            time.sleep(0.004 * min(number, 150))
    note(f"epoch-{epoch}-{team.rank}", total=team.sum(1.0))
note(f"end-{team.rank}", counts=model[0].counts.tolist(), drift=model.drift.tolist(), size=team.world_size,
     rates=[group["lr"] for group in optimizer.param_groups], updates=int(model.updates), lead=team.lead,
     version=team._trainer.version)
"""
)


def command(folder: Path, *words: str, workers: int = WORKERS, **options: Any) -> list[str]:
    fixed = [str(write_script(folder, SCRIPT)), "--workers", str(workers), "--strategy", "all-reduce", "--name", "run"]
    return [*fixed, "--timeout", "60", *words, "--", json.dumps(options)]


def training(run: QuickRun, rank: int, but: int = -1) -> int:
    """Waits until a worker of this rank has made some updates; returns its process, which is not `but`."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [int(path.stem.split("-")[2]) for path in run.notes.glob(f"training-{rank}-*.json")]
        return any(pid != but for pid in found)

    wait_until(look, 60, f"rank {rank} to train")
    return next(pid for pid in found if pid != but)


def go_on(run: QuickRun) -> None:
    (run.notes / "go-on.json").write_text("{}")


def well(outcome: Outcome, ranks: Sequence[int] = range(WORKERS)) -> list[dict[str, Any]]:
    """Every sample counts once an epoch, and all workers have the same bits."""
    assert outcome.code == 0, outcome.err
    assert outcome.tracebacks == 0, outcome.err
    assert outcome.run.processes() == []
    ends = [outcome.run.note(f"end-{rank}") for rank in ranks]
    assert set(ends[0]["counts"]) == {float(EPOCHS)}, outcome.err
    for key in ("counts", "drift", "version", "lead"):
        assert all(end[key] == ends[0][key] for end in ends), key
    for end in ends:  # of batches with a part for it: the last one of an epoch may be too small for all
        assert end["version"] - EPOCHS <= end["updates"] <= end["version"]
        assert end["rates"] == [1.0, pytest.approx(0.99 ** end["updates"])]
    assert {end["size"] for end in ends} == {len(ranks)}
    return ends


# Of 40 rounds that are fetched ahead, the worker that joins finds parts which the dead one had, and others train on.
@pytest.mark.parametrize(("victim", "options"), [(0, {}), (2, {"loaders": 1, "ahead": 40})])
def test_a_killed_worker_is_started_again_and_catches_up(victim: int, options: dict[str, Any], tmp_path: Path) -> None:
    with playing(command(tmp_path, "--restarts", "2", **options), tmp_path) as run:
        first = [training(run, rank) for rank in range(WORKERS)]
        os.kill(first[victim], signal.SIGKILL)
        assert training(run, victim, but=first[victim]) != first[victim]
        go_on(run)
        outcome = run.finish()
    ends = well(outcome)
    assert "averaged by numbers of samples" not in outcome.err, "the loss is a sum, also that of a copy"
    assert ends[0]["lead"] == (1 if victim == 0 else 0), "who was there longest leads"
    events = events_of(outcome, "run")
    assert [event.rank for event in events if isinstance(event, Lost)] == [victim]
    rosters = [event.workers for event in events if isinstance(event, Roster)]
    assert rosters == [[rank for rank in range(WORKERS) if rank != victim], [0, 1, 2]]
    assert outcome.err.count(f"paceline: rank {victim} has joined; 3 go on from version ") == 1, outcome.err


def test_an_all_reduce_is_scaled_down_and_up(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    with playing(command(tmp_path, "--elastic"), tmp_path) as run:
        first = [training(run, rank) for rank in range(WORKERS)]
        with pytest.raises(UsageError, match="8 workers are asked for; this run has room for 1 to 7"):
            ask(folder, 8)
        assert ask(folder, 1) == "from 3 to 1 workers: ranks 1 and 2 will leave"
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first[1:]), 60, "two workers to leave")
        assert ask(folder, 3) == "from 1 to 3 workers: ranks 1 and 2 will join"
        for rank in (1, 2):
            training(run, rank, but=first[rank])
        go_on(run)
        outcome = run.finish()
    well(outcome)
    assert not any(isinstance(event, Lost) for event in events_of(outcome, "run"))


# A batch of 3 has no part for two of five workers.
@pytest.mark.parametrize("batch", [6, 3])
def test_an_all_reduce_grows_beyond_its_first_size(batch: int, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    with playing(command(tmp_path, "--elastic", workers=2, batch=batch), tmp_path) as run:
        first = [training(run, rank) for rank in (0, 1)]
        assert ask(folder, 5) == "from 2 to 5 workers: ranks 2, 3 and 4 will join"
        for rank in (2, 3, 4):
            training(run, rank)
        if batch == 6:  # the lead is one that has joined
            for pid in first:
                os.kill(pid, signal.SIGKILL)
            wait_until((run.notes / "alone.json").exists, 60, "the workers that have joined to be alone")
        go_on(run)
        outcome = run.finish()
    ends = well(outcome, (2, 3, 4) if batch == 6 else range(5))
    assert ends[0]["lead"] in ((2, 3, 4) if batch == 6 else (0,))
    events = events_of(outcome, "run")
    rosters = [event.workers for event in events if isinstance(event, Roster)]
    assert rosters[-1] == ([2, 3, 4] if batch == 6 else [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    "fault",
    [
        *("worker1/join.begin:1:kill", "worker1/join.sent:1:kill", "worker1/join.done:1:kill"),
        *("worker1/join.member:1:kill", "worker0/join.counted:1:kill", "worker0/join.told:1:kill"),
    ],
)
def test_a_process_is_killed_while_a_worker_joins(fault: str, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    settings = {failpoints.VARIABLE: fault, failpoints.FIRED: str(fired)}
    with playing(command(tmp_path, "--restarts", "4"), tmp_path, **settings) as run:
        first = [training(run, rank) for rank in range(WORKERS)]
        os.kill(first[1], signal.SIGKILL)
        training(run, 1, but=first[1])
        if fault.startswith("worker0"):
            training(run, 0, but=first[0])
        go_on(run)
        outcome = run.finish()
    assert [path.name.replace("@", "/") for path in fired.iterdir()] == [fault]
    if "join.counted" in fault:
        assert outcome.err.count("it is started again") == 2, "the worker that joins asks the next lead"
    well(outcome)
