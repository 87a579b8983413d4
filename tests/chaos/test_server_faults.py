"""Faults struck on purpose in runs with a parameter server: who goes on, who is told what, and that nothing is left."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.checker import events_of, violations
from helpers.forks import QuickRun, done, played, playing, starting
from helpers.load import allowed
from helpers.support import (
    PACELINE,
    PREAMBLE,
    PYTHON,
    TORCHRUN,
    Outcome,
    Run,
    free_port,
    left_behind,
    started,
    state_of,
    wait_until,
    write_script,
)

from paceline.events import Event, Join, Push, Recovery, Return, Update

SCRIPT = (
    PREAMBLE
    + """
import threading
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

options = {"samples": 317, "epochs": 2, "victims": [], "how": "kill", "loaders": 0}
options |= {"strategy": None, "name": None, "lingers": None, "within": 0.0, **json.loads(sys.argv[1])}
team = paceline.join(options["strategy"], name=options["name"])
note(f"worker-{team.rank}")
torch.manual_seed(3)
inputs = torch.randn(options["samples"], 6)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
loader = DataLoader(data, batch_size=8 * team.world_size, shuffle=True, num_workers=options["loaders"])
model, optimizer, loader = team.setup(model, optimizer, loader)

def strike(number):
    if team.rank in options["victims"] and number == 4:
        note(f"struck-{team.rank}")
        if options["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if options["how"] == "raise":
            raise ValueError("planted fault")
        if options["how"] == "any":
            threading.Timer(options["within"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    if number == 4:
        note(f"training-{team.rank}")

number = 0
came = time.monotonic()
try:
    for epoch in range(options["epochs"]):
        for x, y in loader:
            with team.step():
                mse_loss(model(x), y).backward()
                number += 1
                strike(number)
                came = time.monotonic()
                optimizer.step()
                optimizer.zero_grad()
    if options["how"] == "any" and team.rank in options["victims"]:
        time.sleep(60)  # its moment is still to come
    note(f"end-{team.rank}")
    if team.rank == options["lingers"]:
        time.sleep(1.0)
        note("late", momenta=len(optimizer.state_dict()["state"]))
except paceline.TeamError as error:
    waited = time.monotonic() - came
    facts = {"kind": type(error).__name__, "message": str(error), "ranks": error.ranks, "waited": waited}
    note(f"caught-{team.rank}", **facts)
    raise
"""
)
SOON = 10.0
"""Seconds in which a death must be known, on a busy machine; the timeout is far longer."""
SPARING = ["async", "k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2", "ssp:s=1", "groups:size=2"]
"""Policies that can do without one of four workers."""


def command(folder: Path, strategy: str, *words: str, workers: int = 4, **options: Any) -> list[str]:
    script = write_script(folder, SCRIPT)
    fixed = [str(script), "--workers", str(workers), "--strategy", strategy, "--name", "hurt"]
    return [*fixed, "--slow", "all:0.001+exp(0.004)", *words, "--", json.dumps(options)]


def lost_leases(events: list[Event], victim: int) -> list[int]:
    backs = [event for event in events if isinstance(event, Return) and event.why == "lost"]
    assert all(event.rank == victim for event in backs)
    return [number for event in backs for number in event.leases]


# -- a worker dies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "victim"), [*zip(SPARING, itertools.cycle([2, 0])), ("async", 0), ("groups:size=2", 0)]
)
def test_the_others_go_on_without_a_killed_worker_and_train_on_its_samples(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    outcome = played(command(tmp_path, strategy, victims=[victim]), tmp_path)
    assert outcome.run.noted(f"struck-{victim}")
    assert outcome.code == 0, outcome.err
    said = outcome.err.splitlines()
    assert any(line.startswith(f"paceline: rank {victim} died") for line in said), outcome.err
    gone = f"paceline: warning: rank {victim} was killed by signal 9 (SIGKILL); the others went on without it"
    assert gone in said
    assert outcome.tracebacks == 0
    assert all(outcome.run.noted(f"end-{rank}") == (rank != victim) for rank in range(4))
    events = events_of(outcome, "hurt")
    assert len(lost_leases(events, victim)) == 1
    assert violations(events) == []
    assert outcome.run.processes() == []


@pytest.mark.parametrize("words", [["--restarts", "1"], []])
def test_a_lead_that_holds_the_parameters_goes_on_without_a_killed_worker(words: list[str], tmp_path: Path) -> None:
    outcome = played(command(tmp_path, "async", "--servers", "lead", *words, victims=[2]), tmp_path)
    assert outcome.run.noted("struck-2")
    assert outcome.code == 0, outcome.err
    assert any(line.startswith("paceline: rank 2 died") for line in outcome.err.splitlines()), outcome.err
    assert ("it is started again" in outcome.err) == bool(words)
    assert all(outcome.run.noted(f"end-{rank}") for rank in (0, 1, 3))
    assert violations(events_of(outcome, "hurt")) == []
    assert outcome.run.processes() == []


def test_without_a_lead_that_holds_the_parameters_nobody_goes_on(tmp_path: Path) -> None:
    outcome = played(command(tmp_path, "async", "--servers", "lead", victims=[0]), tmp_path)
    assert outcome.run.noted("struck-0")
    assert outcome.code == 1
    assert "rank 0 was killed by signal 9 (SIGKILL)" in outcome.err
    assert all(outcome.run.note(f"caught-{rank}")["kind"] == "ServerLost" for rank in (1, 2, 3))
    assert outcome.run.processes() == []


@pytest.mark.parametrize("strategy", ["async", "k-sync:k=2"])
def test_what_a_killed_worker_had_fetched_ahead_is_trained_on_too(strategy: str, tmp_path: Path) -> None:
    # So many samples that the epoch is far from over when it is killed, however late its loaders begin.
    outcome = played(command(tmp_path, strategy, victims=[1], loaders=2, samples=1600, epochs=1), tmp_path)
    assert outcome.run.noted("struck-1")
    assert outcome.code == 0, outcome.err
    events = events_of(outcome, "hurt")
    assert len(lost_leases(events, 1)) > 1
    assert violations(events) == []


@pytest.mark.parametrize("strategy", ["k-sync:k=1", "k-batch-async:k=4"])
def test_the_last_worker_trains_on_alone(strategy: str, tmp_path: Path) -> None:
    outcome = played(command(tmp_path, strategy, victims=[0, 2, 3]), tmp_path)
    assert all(outcome.run.noted(f"struck-{rank}") for rank in (0, 2, 3))
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("the others went on without it") == 3
    assert outcome.run.noted("end-1")
    assert violations(events_of(outcome, "hurt")) == []


def test_a_run_of_which_all_workers_are_killed_has_failed(tmp_path: Path) -> None:
    outcome = played(command(tmp_path, "async", victims=[0, 1, 2, 3]), tmp_path)
    assert all(outcome.run.noted(f"struck-{rank}") for rank in range(4))
    assert outcome.code == 1
    assert "was killed by signal 9 (SIGKILL)" in outcome.err
    assert outcome.run.processes() == []


@pytest.mark.parametrize("seed", range(7))
def test_a_worker_may_be_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    strategy = SPARING[seed % len(SPARING)]
    victim = source.randrange(4)
    moment = {"victims": [victim], "how": "any", "within": source.uniform(0.0, 0.15)}
    outcome = played(command(tmp_path, strategy, **moment), tmp_path)
    assert outcome.run.noted(f"struck-{victim}")
    assert not outcome.run.noted(f"end-{victim}")
    assert outcome.code == 0, (strategy, victim, outcome.err)
    assert f"rank {victim} was killed by signal 9" in outcome.err
    assert violations(events_of(outcome, "hurt")) == []


@pytest.mark.parametrize("strategy", ["sync", "k-sync:k=4", "k-async:k=4", "groups:size=2,between=sync"])
def test_where_every_worker_counts_all_learn_who_died(strategy: str, tmp_path: Path) -> None:
    outcome = played(command(tmp_path, strategy, victims=[2]), tmp_path)
    struck = outcome.run.note("struck-2")["at"]
    for rank in (0, 1, 3):
        caught = outcome.run.note(f"caught-{rank}")
        assert (caught["kind"], caught["ranks"]) == ("WorkerLost", [2])
        assert "rank 2 died" in caught["message"]
        assert caught["at"] - struck < allowed(SOON)
    assert outcome.code == 1
    assert outcome.ended - struck < allowed(2 * SOON)
    assert "paceline: rank 2 was killed by signal 9 (SIGKILL)" in outcome.err
    assert outcome.tracebacks == 0
    assert outcome.run.processes() == []


IN_ITS_GROUP = """
    if number == 4 and team.rank == 2:
        note("pushing")
    if number == 4 and team.rank == 3:
        while not (pathlib.Path(os.environ["RUN_NOTES"]) / "halted.json").exists():
            time.sleep(0.01)
        note("joining")

number = 0
"""
"""Rank 2 pushes, and waits for rank 3, which comes only once rank 2 is halted."""


def test_a_member_may_be_killed_while_its_group_sums(tmp_path: Path) -> None:
    words = command(tmp_path, "groups:size=2")
    write_script(tmp_path, SCRIPT.replace("\nnumber = 0\n", IN_ITS_GROUP))
    with playing(words, tmp_path) as run:
        pid = run.note("pushing")["pid"]
        time.sleep(0.2)  # it has pushed by now, and waits
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", 20, "rank 2 to be halted")
        (run.notes / "halted.json").write_text("{}")
        run.note("joining")
        time.sleep(0.3)  # the server has asked both for their parts
        os.kill(pid, signal.SIGKILL)
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    assert "paceline: warning: rank 2 was killed by signal 9 (SIGKILL)" in outcome.err
    events = events_of(outcome, "hurt")
    assert violations(events) == []
    mine = [event for event in events if isinstance(event, Push) and event.rank == 2]
    tickets = {ticket for event in events if isinstance(event, Update) for ticket in event.pushes}
    assert mine[-1].ticket in tickets, "what it had pushed still counts"


def test_a_member_may_be_killed_before_its_group_is_complete(tmp_path: Path) -> None:
    words = command(tmp_path, "groups:size=2")
    write_script(tmp_path, SCRIPT.replace("\nnumber = 0\n", IN_ITS_GROUP))
    with playing(words, tmp_path) as run:
        pid = run.note("pushing")["pid"]
        time.sleep(0.2)  # it has pushed by now, and waits
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: state_of(pid) in ("", "Z"), 20, "rank 2 to be gone")
        time.sleep(0.2)  # the server has noticed
        (run.notes / "halted.json").write_text("{}")
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    events = events_of(outcome, "hurt")
    assert violations(events) == []
    mine = [event for event in events if isinstance(event, Push) and event.rank == 2]
    tickets = {ticket for event in events if isinstance(event, Update) for ticket in event.pushes}
    assert mine[-1].ticket in tickets, "what it had pushed still counts"


# -- a script fails --------------------------------------------------------------------------------------------------


def test_a_script_that_raises_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    outcome = played(command(tmp_path, "k-sync:k=2", victims=[1], how="raise", samples=40_000), tmp_path)
    struck = outcome.run.note("struck-1")["at"]
    assert outcome.code == 1
    assert outcome.ended - struck < allowed(2 * SOON)
    assert outcome.tracebacks == 1
    assert 'raise ValueError("planted fault")' in outcome.err
    assert "paceline: rank 1 failed: ValueError: planted fault" in outcome.err.splitlines()
    assert not any(outcome.run.noted(f"end-{rank}") for rank in range(4))
    assert outcome.run.processes() == []


# -- a server dies, or hangs -----------------------------------------------------------------------------------------


def servers_of(run: Run, workers: int, servers: int) -> list[int]:
    """The servers' process ids, the first server's first."""
    for rank in range(workers):
        run.note(f"training-{rank}")
    known = {run.process.pid, *(run.note(f"worker-{rank}")["pid"] for rank in range(workers))}
    found = sorted(set(run.processes()) - known)
    assert len(found) == servers
    return found


EARLY = (
    PREAMBLE
    + """
import paceline, torch
from paceline.server import client
from torch.utils.data import DataLoader, TensorDataset

victim, before = json.loads(sys.argv[1])
plain = getattr(client.ServerClient, before)

def struck(self, *arguments):
    if os.environ["RANK"] == str(victim):
        time.sleep(0.3)
        note("struck")
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *arguments)

setattr(client.ServerClient, before, struck)
team = paceline.join()
model = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.randn(48, 2)), batch_size=6)
model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for (x,) in loader:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
"""One worker is killed on its way to the server."""


def killed_early(strategy: str, victim: int, before: str, folder: Path, *words: str) -> Outcome:
    fixed = [write_script(folder, EARLY), "--workers", "3", "--strategy", strategy, "--name", "early", *words]
    outcome = played([*fixed, "--", json.dumps([victim, before])], folder)
    assert outcome.run.noted("struck")
    return outcome


@pytest.mark.parametrize("before", ["__init__", "open", "wait_until_ready"])
def test_a_worker_that_is_killed_on_its_way_to_the_server_is_not_waited_for(before: str, tmp_path: Path) -> None:
    outcome = killed_early("async", 1, before, tmp_path)
    assert outcome.code == 0, outcome.err
    assert "rank 1 was killed by signal 9 (SIGKILL); the others went on without it" in outcome.err
    events = events_of(outcome, "early")
    assert violations(events) == []
    assert sum(event.samples for event in events if isinstance(event, Push)) == 48


@pytest.mark.parametrize(
    ("strategy", "victim", "words", "sentence"),
    [
        ("sync", 1, (), "WorkerLost: rank 1 died"),
        ("async", 0, (), "ServerLost: rank 0 died"),
        ("async", 1, ("--servers", "all"), "ServerLost: the server died while it started"),
    ],
)
def test_if_it_was_needed_all_are_told(
    strategy: str, victim: int, words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    outcome = killed_early(strategy, victim, "open", tmp_path, *words)
    assert outcome.code == 1, outcome.err
    assert sentence in outcome.err


def test_a_killed_server_is_started_again_and_no_worker_is(tmp_path: Path) -> None:
    words = command(tmp_path, "k-sync:k=2", "--servers", "2", samples=1600)
    with playing(words, tmp_path) as run:
        for pid in servers_of(run, 4, 2):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: state_of(pid) in ("", "Z"), 20, "the server to be dead")
        outcome = run.finish(90)
        pids = {rank: run.note(f"worker-{rank}")["pid"] for rank in range(4)}
    assert outcome.code == 0, outcome.err
    events = events_of(outcome, "hurt")
    assert sorted(event.server for event in events if isinstance(event, Recovery)) == [0, 1]
    assert {event.rank: event.pid for event in events if isinstance(event, Join)} == pids
    assert violations(events) == []
    for server in (0, 1):
        said = (
            f"paceline: server {server} was killed by signal 9 (SIGKILL); it is started again, and goes on where it was"
        )
        assert outcome.err.count(said) == 1
        assert outcome.err.count(f"paceline: server {server} is back, at version") == 1
    assert outcome.tracebacks == 0
    assert run.processes() == []
    assert not left_behind(run.shared_before)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_is_killed_again_and_again_is_lost_and_every_worker_learns_that(
    victim: int, tmp_path: Path
) -> None:
    words = command(tmp_path, "k-sync:k=2", "--servers", "2", samples=400_000)
    with playing(words, tmp_path) as run:
        known = servers_of(run, 4, 2)
        workers = {run.process.pid, *(run.note(f"worker-{rank}")["pid"] for rank in range(4))}
        other, pid = known[1 - victim], known[victim]
        deaths = 0
        while pid:
            os.kill(pid, signal.SIGKILL)
            killed, deaths = time.monotonic(), deaths + 1
            wait_until(lambda pid=pid: state_of(pid) in ("", "Z"), 20, "the server to be dead")
            gone = {*workers, other, pid}
            wait_until(lambda gone=gone: run.ended or set(run.processes()) - gone, 60, "the server to be started again")
            pid = 0 if run.ended else next(iter(set(run.processes()) - gone), 0)
        outcome = run.finish()
        for rank in range(4):
            caught = run.note(f"caught-{rank}")
            assert caught["kind"] == "ServerLost"
            assert "server" in caught["message"]
            assert caught["at"] - killed < allowed(SOON)
        assert deaths >= 6
        assert outcome.code == 1
        assert f"paceline: server {victim} was killed by signal 9 (SIGKILL)" in outcome.err
        assert outcome.tracebacks == 0
        assert run.processes() == []
        assert not left_behind(run.shared_before)


@pytest.mark.parametrize(("servers", "victim"), [(1, 0), (2, 1)])
def test_a_server_that_hangs_is_given_up_after_the_timeout(servers: int, victim: int, tmp_path: Path) -> None:
    words = command(tmp_path, "k-sync:k=2", "--servers", str(servers), "--timeout", "1.5", samples=40_000)
    with playing(words, tmp_path) as run:
        pid = servers_of(run, 4, servers)[victim]
        os.kill(pid, signal.SIGSTOP)
        halted = time.monotonic()
        wait_until(lambda: state_of(pid) == "T", 20, "the server to be halted")
        outcome = run.finish()
        for rank in range(4):
            caught = run.note(f"caught-{rank}")
            assert caught["kind"] == "TeamTimeout"
            assert "server" in caught["message"]
            # A worker leaves it to the first server to give up first, who knows better whom it waits for.
            assert 1.4 < caught["at"] - halted < 1.5 + 5 + allowed(SOON)
        assert outcome.code == 1
        assert "TeamTimeout" in outcome.err
        assert run.processes() == []


# -- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_no_server_is_left_of_a_run_whose_launcher_gets_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    words = command(tmp_path, "k-async:k=2", "--servers", "2", samples=40_000)
    with playing(words, tmp_path) as run:
        servers_of(run, 4, 2)
        assert_nothing_is_left(run, number)


def test_no_server_is_left_of_a_killed_launcher_in_processes_of_their_own(tmp_path: Path) -> None:
    words = command(tmp_path, "async", "--servers", "1", workers=2, samples=400_000)
    with started([PACELINE, "run", *words], tmp_path) as run:
        servers_of(run, 2, 1)
        assert_nothing_is_left(run, signal.SIGKILL)


def assert_nothing_is_left(run: Run | QuickRun, number: signal.Signals) -> None:
    recorded = run.cwd / "runs" / "hurt" / "streams" / "-1.jsonl"
    wait_until(lambda: b'"event":"update"' in recorded.read_bytes(), 30, "the first update to be written down")
    run.process.send_signal(number)
    wait_until(lambda: run.ended, 2 * SOON, "the launcher to end")
    wait_until(lambda: not run.processes(), SOON, "all processes of the run to end with the launcher")
    wait_until(lambda: not left_behind(run.shared_before), 30, "/dev/shm to be as it was")
    outcome = run.finish()
    if number == signal.SIGKILL:
        assert outcome.code == -signal.SIGKILL
        return
    assert outcome.code == 128 + number
    assert f"paceline: stopped by {number.name}; all workers have ended" in outcome.err
    assert outcome.tracebacks == 0
    assert run.summary("hurt")["updates"] >= 1


# -- another launcher ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run with two workers."""
    folder = tmp_path_factory.mktemp("torchrun")
    temporary = folder / "temporary"
    temporary.mkdir()
    script = write_script(folder, SCRIPT)
    launcher = [TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_port())]
    return done([*launcher, script, json.dumps({"strategy": "async", "name": "hand"})], folder, TMPDIR=str(temporary))


def test_a_script_that_torchrun_starts_brings_its_own_server(by_torchrun: Outcome) -> None:
    run = by_torchrun.run
    assert by_torchrun.code == 0, by_torchrun.err
    assert run.noted("end-0")
    assert run.noted("end-1")
    wait_until(lambda: not run.processes(), 20, "the server to end with its workers")
    wait_until(lambda: not left_behind(run.shared_before), 30, "/dev/shm to be as it was")
    assert [path.name for path in (run.cwd / "temporary").iterdir() if path.name.startswith("paceline")] == []


def test_such_a_server_writes_down_what_it_did(by_torchrun: Outcome) -> None:
    events = events_of(by_torchrun, "hand")
    assert sum(isinstance(event, Update) for event in events) == 80
    assert violations(events) == []


def test_such_a_server_comes_back_if_it_is_killed(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    launcher = [TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_port())]
    options = json.dumps({"strategy": "async", "name": "hand"})
    fault = {"PACELINE_FAULTS": "server0/chunk.written:9:kill", "PACELINE_FAULTS_FIRED": str(tmp_path)}
    outcome = done([*launcher, script, options], tmp_path, **fault)
    assert (tmp_path / "server0@chunk.written:9:kill").exists()
    assert outcome.code == 0, outcome.err
    events = events_of(outcome, "hand")
    assert [event.server for event in events if isinstance(event, Recovery)] == [0]
    assert sum(isinstance(event, Update) for event in events) == 80
    assert violations(events) == []
    wait_until(lambda: not outcome.run.processes(), 20, "the server to end with its workers")


@pytest.mark.parametrize("lingers", [0, 1])
def test_such_a_server_lasts_as_long_as_any_worker_needs_it(lingers: int, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    words = [PYTHON, script, json.dumps({"strategy": "async", "lingers": lingers})]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        starting(words, tmp_path, RANK="0", **place) as zero,
        starting(words, tmp_path, RANK="1", **place) as one,
    ):
        runs = (zero, one)
        outcomes = [run.finish() for run in runs]
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[lingers].err
        assert runs[lingers].note("late")["momenta"] == 4
        wait_until(lambda: not (zero.processes() or one.processes()), 20, "the server to end with its workers")


# -- what can not be is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "k-sync:k=5"], ["'k-sync:k=5'", "k is 5, with 4 workers", "from 1 to 4"]),
        (["--strategy", "k-async:k=0"], ["k is 0", "from 1 to 4"]),
        (["--strategy", "k-batch-sync:k=-1"], ["k is -1", "at least 1"]),
        (["--strategy", "k-batch-async:k=0"], ["k is 0", "at least 1"]),
        (["--strategy", "k-sync:k=two"], ["option 'k'", "'two'", "a whole number"]),
        (["--strategy", "k-sync:k=1.5"], ["option 'k'", "'1.5'", "a whole number"]),
        (["--strategy", "k-sync"], ["'k-sync' needs the option 'k'"]),
        (["--strategy", "k-sync:k="], ["option 'k'", "has no value"]),
        (["--strategy", "k-sync:k=2,j=3"], ["'k-sync' has no option 'j'", "'k'"]),
        (["--strategy", "async:k=2"], ["'async' has no option 'k'", "it takes 'servers', 'corrections' or 'compress'"]),
        (["--strategy", "k-synch:k=2"], ["unknown strategy 'k-synch'", "'k-sync'"]),
        (["--strategy", "ssp:s=-1"], ["s is -1", "0 or more"]),
        (["--strategy", "groups:size=5"], ["size is 5, with 4 workers", "from 1 to 4"]),
        (["--strategy", "groups:size=0"], ["size is 0", "from 1 to 4"]),
        (["--strategy", "groups:size=2,staleness=-1"], ["staleness is -1", "0 or more"]),
        (["--strategy", "groups:size=2,between=k-sync:k=3"], ["k is 3, with 2", "from 1 to 2"]),
        (["--strategy", "groups:size=2,between=gossip"], ["unknown strategy 'gossip'"]),
        (
            ["--strategy", "groups:size=2,between=all-reduce"],
            ["option 'between' of strategy 'groups': strategy 'all-reduce': it is no policy", "of a parameter server"],
        ),
        (
            ["--strategy", "groups:size=2,between=groups:size=1"],
            ["option 'between' of strategy 'groups' is 'groups:size=1'", "a policy without groups"],
        ),
        (["--strategy", "adaptive:of=ssp"], ["option 'of' of strategy 'adaptive' is 'ssp'", "'k-async'"]),
        (["--strategy", "adaptive:start=5"], ["start is 5", "from 1 to 4"]),
        (["--strategy", "async", "--servers", "0"], ["servers is '0'", "'lead' or 'all'"]),
        (["--strategy", "async", "--servers", "some"], ["servers is 'some'", "'lead' or 'all'"]),
        (["--strategy", "async", "--correct", "hope"], ["unknown correction 'hope'", "'drop'"]),
        (["--strategy", "async", "--correct", "drop:above=-1"], ["above is -1", "0 or more"]),
        (["--strategy", "async", "--correct", "drop"], ["'drop' needs the option 'above'"]),
        (["--strategy", "async", "--compress", "gzip"], ["compress is 'gzip'", "'int8'"]),
        (["--strategy", "async", "--compress", "topk:2"], ["compress is 'topk:2'", "at most 1"]),
    ],
    ids=lambda value: "-".join(value[1::2]) if value[0].startswith("--") else "refused",
)
def test_what_can_not_be_is_refused_before_anything_starts(
    options: list[str], words: list[str], tmp_path: Path
) -> None:
    script = write_script(tmp_path, PREAMBLE + "note('started')\n")
    outcome = played([script, "--workers", "4", *options], tmp_path)
    assert outcome.code == 2, outcome.err
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("paceline: ")
    for word in words:
        assert word in lines[0]
    assert outcome.out == ""
    assert not outcome.run.noted("started")
    assert not (tmp_path / "runs").exists()
