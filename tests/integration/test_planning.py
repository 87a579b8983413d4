"""Choosing a strategy with real runs: profiles, `auto`, and timelines that are marked as predicted."""

import json
from pathlib import Path

import pytest
from helpers.forks import done
from helpers.load import above_noise
from helpers.support import PACELINE, Outcome, write_script
from helpers.teams import run_command, run_script

from paceline.config import Launch, parse_slowness
from paceline.events import Compute, Event, LeaseGiven, Push, Return, Switch, Update, read
from paceline.events.summary import Summary, merge

SCRIPT = """
import sys

import paceline
import torch
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
torch.manual_seed(0)
x = torch.randn(int(sys.argv[1]), 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4 * team.world_size, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
for _ in range(int(sys.argv[2])):
    for inputs, targets in loader:
        with team.step():
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            team.report(loss=loss.item())
"""


def events_of(run: Path) -> list[Event]:
    return list(read(run / "events.jsonl"))


def paceline(folder: Path, *words: str) -> Outcome:
    return done([PACELINE, *words], folder, 110)


def train(folder: Path, name: str, strategy: str, slow: str, *arguments: str) -> Summary:
    """Run the script on three workers; what the run came to."""
    run = folder / "runs" / name
    run.mkdir(parents=True)
    launch = Launch(strategy=strategy, servers="lead", slow=parse_slowness([slow], 3), folder=str(run))
    assert run_script(write_script(folder, SCRIPT), 3, *arguments, launch=launch, timeout=90) == [("", "")] * 3
    return merge(run, 3)


def test_a_plan_profiles_the_script_and_knows_its_straggler(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)

    def check(factor: float) -> None:
        words = ["plan", "train.py", "--workers", "3", "--seconds", f"{8 * factor:g}", "--json"]
        words += ["--slow", f"all:{0.05 * factor}+exp({0.01 * factor})"]
        words += ["--slow", f"1:{0.3 * factor}+exp({0.05 * factor})"]
        outcome = paceline(tmp_path, *words, "--", "4000", "100")
        assert outcome.code == 0, outcome.err
        assert "paceline: profiling under " in outcome.err and "paceline: simulating" in outcome.err
        told = json.loads(outcome.out)
        assert told["learned"]["workers"] == 3
        assert told["learned"]["uneven"]["1"] == pytest.approx(350 / 60, rel=0.2)
        by = {(one["strategy"], one["balance"]): one for one in told["choices"]}
        assert by["sync", False]["seconds_per_update"] == pytest.approx(0.35 * factor, rel=0.15)
        assert by["k-sync:k=2", False]["seconds_per_update"] < 0.15 * factor
        assert told["strategy"] not in ("sync", "all-reduce")
        assert told["run"].endswith("-- 4000 100")
        assert not (tmp_path / "runs").exists()

    above_noise(check, (1.0, 4.0))


def test_a_script_that_fails_under_the_profile_is_said_to(tmp_path: Path) -> None:
    write_script(tmp_path, "import paceline\nteam = paceline.join()\nraise ValueError('no data')\n")
    outcome = paceline(tmp_path, "plan", "train.py", "--workers", "2", "--seconds", "3")
    assert outcome.code == 2
    assert "could not be profiled under async" in outcome.err
    assert "no data" in outcome.err


def test_auto_watches_and_then_goes_on_as_another_policy(tmp_path: Path) -> None:
    summary = train(tmp_path, "auto", "auto:steps=6", "all:0.01+exp(0.002)", "1200", "2")
    events = events_of(tmp_path / "runs" / "auto")
    switches = [event for event in events if isinstance(event, Switch)]
    assert [switch.strategy == "auto" for switch in switches] == [False]
    assert switches[0].reason
    pushes = [event for event in events if isinstance(event, Push)]
    before = [push for push in pushes if push.start < switches[0].start]
    assert all(push.outcome == "used" for push in before)
    assert {rank: sum(push.rank == rank for push in before) >= 7 for rank in range(3)} == dict.fromkeys(range(3), True)
    # Every sample of both epochs is trained on once, before and after the switch.
    given = {event.number: event for event in events if isinstance(event, LeaseGiven)}
    back = {number for event in events if isinstance(event, Return) for number in event.leases}
    used = {ticket for event in events if isinstance(event, Update) for ticket in event.pushes}
    trained = [number for push in pushes if push.ticket in used for number in push.leases]
    assert len(trained) == len(set(trained))
    assert not set(trained) & back
    for epoch in range(2):
        places = sorted((given[n].first, given[n].samples) for n in trained if given[n].epoch == epoch)
        assert [place for place, _ in places] == list(range(0, 1200, 4))
    assert summary.strategy == "auto:steps=6"


def test_auto_survives_the_death_of_a_worker_while_it_watches(tmp_path: Path) -> None:
    dies = "            if team.rank == 2 and next(count) == 5:\n                os.kill(os.getpid(), 9)\n"
    begin = "import itertools, os\ncount = itertools.count()\n"
    script = begin + SCRIPT.replace("            team.report", dies + "            team.report")
    write_script(tmp_path, script)
    words = ["run", "train.py", "--workers", "3", "--strategy", "auto:steps=8", "--name", "auto"]
    outcome = paceline(tmp_path, *words, "--slow", "all:0.01+exp(0.005)", "--", "1200", "1")
    assert outcome.code == 0, outcome.err
    assert "rank 2" in outcome.err
    assert "auto goes on as" in outcome.err


def test_a_real_run_is_learned_from_and_predicted(tmp_path: Path) -> None:
    def check(factor: float) -> None:
        slow = f"all:{0.1 * factor}+exp({0.03 * factor})"
        names = f"learned-{factor:g}", f"asked-{factor:g}"
        train(tmp_path, names[0], "async", slow, "600", "1")
        measured = train(tmp_path, names[1], "k-sync:k=2", slow, "600", "1").seconds_per_update
        words = ["simulate", "--from", f"runs/{names[0]}", "-s", "k-sync:k=2", "--updates", "4000", "--json"]
        predicted = json.loads(run_command(words, tmp_path).stdout)["seconds_per_update"]
        # A hundred and fifty draws of the one, half as many updates of the other.
        assert predicted == pytest.approx(measured, rel=0.15)

    above_noise(check, (1.0, 3.0))


def test_a_predicted_timeline_is_a_run_s_and_marked(tmp_path: Path) -> None:
    specs = ["k-sync:k=2", "pipeline:stages=3,microbatches=6", "all-reduce"]
    words = [word for spec in specs for word in ("-s", spec)]
    words += ["-w", "3", "--size", "1MB", "--bandwidth", "1GB/s", "--out", "told"]
    predicted = run_command(["simulate", *words], tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    page = (tmp_path / "told" / "report.html").read_text()
    assert "Predicted by simulation" in page
    folder = tmp_path / "told" / "k-sync-k-2"
    assert json.loads((folder / "config.json").read_text())["predicted"] is True
    events = events_of(folder)
    assert sum(isinstance(event, Update) for event in events) == 200
    assert any(isinstance(event, Compute) for event in events)
    text = run_command(["report", folder, "--text"], tmp_path)
    assert text.returncode == 0
    assert "worker 2" in text.stdout
