"""Machines that join a running team: every sample counts once an epoch, and what cannot join is told why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.checker import events_of, violations
from helpers.forks import QuickRun, done, played, playing, starting
from helpers.hosts import Host, hosts
from helpers.support import PACELINE, PREAMBLE, TORCHRUN, Outcome, wait_until, write_script

from paceline.config import Timeouts
from paceline.errors import ServerLost
from paceline.events import Lost, Push, Recovery, Roster
from paceline.relay.door import AskPlaces, PlacesRefused
from paceline.relay.joining_machines import JoiningMachines
from paceline.relay.record import RelayRecord
from paceline.transport.keys import new_key

KEY, PORT, EPOCHS = new_key(), 29600, 3
SCRIPT = (
    PREAMBLE
    + """
import torch, paceline
from helpers.counting import Counting
from torch.utils.data import DataLoader, TensorDataset

notes = pathlib.Path(os.environ.get("TEAM_NOTES", os.environ["RUN_NOTES"]))
os.environ["RUN_NOTES"] = str(notes)
team = paceline.join()
model = torch.nn.Sequential(Counting(int(sys.argv[1]) if sys.argv[1:] else 240))
model.register_buffer("seen", torch.zeros(3))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(240)), 8, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
number = 0
for epoch in range(3):
    for (numbers,) in loader:
        with team.step():
            model(numbers).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.seen += 1
        number += 1
        if number == 2:
            note(f"training-{team.rank}", pid=os.getpid(), seen=float(model.seen[0]))
        if not (notes / "go-on.json").exists():
            time.sleep(0.005 * min(number, 150))
note(f"end-{team.rank}", counts=model[0].counts.tolist(), version=team._trainer.version)
"""
)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    with hosts(3) as found:
        yield found


def first(folder: Path, host: Host, strategy: str, *words: str) -> Any:
    folder.mkdir(exist_ok=True)
    script = str(write_script(folder, SCRIPT))
    command = [script, "--workers", "2", "--strategy", strategy, "--name", "run", "--timeout", "60", *words]
    return playing([*command, "--open", str(PORT)], folder, host=host, PACELINE_KEY=KEY)


def joining(folder: Path, host: Host, run: QuickRun, door: str, *words: str, key: str = KEY) -> Any:
    more = {"PACELINE_KEY": key, "TEAM_NOTES": str(run.notes)}
    command = [str(folder / "train.py"), "--join", door, "--timeout", "30", *words]
    return playing(command, folder, host=host, **more)


def went_well(outcome: Outcome, joined: Outcome) -> None:
    """Every sample counts once an epoch, by the model and by the events."""
    assert (joined.code, outcome.code) == (0, 0), joined.err + outcome.err
    assert joined.run.processes() == outcome.run.processes() == []
    assert set(outcome.run.note("end-0")["counts"]) == {float(EPOCHS)}, outcome.err
    assert violations(events_of(outcome, "run")) == []


@pytest.mark.parametrize("strategy", ["async", "sync", "k-batch-async:k=2"])
def test_a_machine_joins_a_run_with_a_parameter_server(strategy: str, machines: list[Host], tmp_path: Path) -> None:
    one, other, _ = machines
    with first(tmp_path, one, strategy) as run:
        run.note("training-1")
        with joining(tmp_path, other, run, f"{one.address}:{PORT}", "--workers", "2") as more:
            for rank in (2, 3):
                assert run.note(f"training-{rank}")["seen"] > 2, "it has the others' buffers"
            (run.notes / "go-on.json").write_text("{}")
            joined = more.finish()
        outcome = run.finish()
    went_well(outcome, joined)
    assert joined.err.count(f"ranks 2 and 3 join the run at {one.address}:{PORT}") == 1
    events = events_of(outcome, "run")
    assert [0, 1, 2, 3] in [event.workers for event in events if isinstance(event, Roster)]
    assert {event.rank for event in events if isinstance(event, Push)} == {0, 1, 2, 3}, "the events come home"


def test_a_machine_joins_a_team_of_two_that_have_servers_each(machines: list[Host], tmp_path: Path) -> None:
    script, door = write_script(tmp_path, SCRIPT), f"{machines[0].address}:{PORT}"
    agent = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", machines[0].address]
    words = ["--strategy", "async", "--servers", "each", "--open", str(PORT), "--name", "run"]
    command = [*agent, "--master-port", "29400", "--node-rank", "{}", "-m", "paceline", "run", str(script), *words]
    one, other = ([word.format(node) for word in command] for node in (0, 1))
    with starting(one, tmp_path, host=machines[0], PACELINE_KEY=KEY) as run:
        notes = str(run.notes)
        with starting(other, tmp_path, host=machines[1], PACELINE_KEY=KEY, TEAM_NOTES=notes) as second:
            run.note("training-1")
            with joining(tmp_path, machines[2], run, door, "--workers", "1") as more:
                run.note("training-2")
                (run.notes / "go-on.json").write_text("{}")
                joined = more.finish()
            assert second.finish().code == 0
        outcome = run.finish()
    went_well(outcome, joined)
    assert joined.err == f"paceline: rank 2 joins the run at {door}\n", "at the end nobody is taken for dead"
    assert {event.rank for event in events_of(outcome, "run") if isinstance(event, Push)} == {0, 1, 2}


def test_a_team_of_one_machine_under_torchrun_is_joined_also_from_there(machines: list[Host], tmp_path: Path) -> None:
    script, door = write_script(tmp_path, SCRIPT), f"{machines[0].address}:{PORT}"
    words = ["--strategy", "async", "--open", str(PORT), "--name", "run"]
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "paceline", "run", script, *words]
    with starting(command, tmp_path, host=machines[0], PACELINE_KEY=KEY) as run:
        run.note("training-1")
        with joining(tmp_path, machines[0], run, door, "--workers", "1") as near:
            run.note("training-2")
            with joining(tmp_path, machines[1], run, door, "--workers", "1") as far:
                run.note("training-3")
                (run.notes / "go-on.json").write_text("{}")
                assert far.finish().code == 0
            joined = near.finish()
        outcome = run.finish()
    went_well(outcome, joined)
    assert {event.rank for event in events_of(outcome, "run") if isinstance(event, Push)} == {0, 1, 2, 3}


def test_a_killed_server_of_an_open_run_comes_back(machines: list[Host], tmp_path: Path) -> None:
    with first(tmp_path, machines[0], "async") as run:
        workers = {run.note(f"training-{rank}")["pid"] for rank in (0, 1)}
        door = f"{machines[0].address}:{PORT}"
        with joining(tmp_path, machines[1], run, door, "--workers", "1") as more:
            run.note("training-2")
            launcher = run.process.pid
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii")
            (server,) = set(map(int, children.split())) - workers
            os.kill(server, signal.SIGKILL)
            (run.notes / "go-on.json").write_text("{}")
            joined = more.finish()
        outcome = run.finish()
    went_well(outcome, joined)
    assert "server 0 was killed by signal 9 (SIGKILL); it is started again" in outcome.err
    events = events_of(outcome, "run")
    assert [event.server for event in events if isinstance(event, Recovery)] == [0]
    assert {event.rank for event in events if isinstance(event, Push)} == {0, 1, 2}


def test_a_server_that_is_killed_time_and_again_ends_an_open_run(machines: list[Host], tmp_path: Path) -> None:
    with first(tmp_path, machines[0], "async") as run:
        workers = {run.note(f"training-{rank}")["pid"] for rank in (0, 1)}
        door = f"{machines[0].address}:{PORT}"
        with joining(tmp_path, machines[1], run, door, "--workers", "1") as more:
            run.note("training-2")
            launcher, killed = run.process.pid, set[int]()
            children = Path(f"/proc/{launcher}/task/{launcher}/children")
            while len(killed) < 6 and not run.ended:
                for server in set(map(int, children.read_text(encoding="ascii").split())) - workers - killed:
                    os.kill(server, signal.SIGKILL)
                    killed.add(server)
                time.sleep(0.1)
            joined = more.finish()
        outcome = run.finish()
    assert (joined.code, outcome.code) == (1, 1), joined.err + outcome.err
    assert joined.run.processes() == outcome.run.processes() == []
    assert joined.tracebacks == outcome.tracebacks == 0
    for rank in (0, 1):
        assert f"rank {rank} stopped: ServerLost: {ServerLost.UNTOLD}" in outcome.err, outcome.err
    assert f"ServerLost: {ServerLost.UNTOLD}" in joined.err, joined.err


def test_a_machine_that_has_joined_is_lost_and_another_joins(machines: list[Host], tmp_path: Path) -> None:
    one, other, _ = machines
    with first(tmp_path, one, "async") as run:
        run.note("training-1")
        with joining(tmp_path, other, run, f"{one.address}:{PORT}", "--workers", "1") as more:
            pid = run.note("training-2")["pid"]
            more.process.kill()  # its workers end with the launcher
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the worker to end")
        with joining(tmp_path, other, run, f"{one.address}:{PORT}", "--workers", "1") as more:
            run.note("training-3")  # the place of rank 2 is promised for a while
            (run.notes / "go-on.json").write_text("{}")
            joined = more.finish()
        outcome = run.finish()
    went_well(outcome, joined)
    assert [event.rank for event in events_of(outcome, "run") if isinstance(event, Lost)] == [2]


def test_a_killed_worker_of_an_open_run_is_started_again(machines: list[Host], tmp_path: Path) -> None:
    one, other, _ = machines
    with first(tmp_path, one, "async", "--restarts", "2") as run:
        pid = run.note("training-1")["pid"]
        with joining(tmp_path, other, run, f"{one.address}:{PORT}", "--workers", "1") as more:
            run.note("training-2")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: run.note("training-1")["pid"] != pid, 60, "rank 1 to train again")
            (run.notes / "go-on.json").write_text("{}")
            joined = more.finish()
        outcome = run.finish()
    went_well(outcome, joined)
    assert "it is started again (1 restarts left)" in outcome.err
    assert [event.rank for event in events_of(outcome, "run") if isinstance(event, Lost)] == [1]


@pytest.mark.parametrize(("restarts", "free"), [(True, 4), (False, 5)])
def test_a_lost_worker_that_is_started_again_keeps_its_rank(restarts: bool, free: int) -> None:
    spec = SimpleNamespace(workers=2, capacity=6, restarts=restarts, timeouts=Timeouts())
    config = SimpleNamespace(spec=spec, peers=[SimpleNamespace(address="")] * 9)
    context: Any = SimpleNamespace(config=config, record=RelayRecord())
    coordinator: Any = SimpleNamespace(reachable=lambda: True, may_join=lambda rank: rank != 0)  # 1 was lost
    answer = JoiningMachines(context, coordinator, lambda *_: None).answer(AskPlaces(6))
    assert isinstance(answer, PlacesRefused)
    assert f"{free} places are free" in answer.reason


def test_what_cannot_join_is_told_why_and_the_run_goes_on(machines: list[Host], tmp_path: Path) -> None:
    one, other, _ = machines
    door = f"{one.address}:{PORT}"
    refusals: list[tuple[list[str], dict[str, str], str]] = [
        ([], {"key": new_key()}, "the run there has another key than this machine, or none"),
        (["--workers", "5"], {}, "it has room for 6 workers, and 4 places are free; ask for fewer with --workers"),
        (["--workers", "1", "--", "99"], {}, "its model or optimizer is not the one that the run trains"),
        (["--strategy", "sync"], {}, "--strategy does not go with --join: the run decides it"),
        (["--join", f"127.0.0.1:{PORT}"], {}, "where no other machine finds this one"),
    ]
    with first(tmp_path, one, "async") as run:
        run.note("training-1")
        for words, more, sentence in refusals:
            with joining(tmp_path, other, run, door, *words, **more) as refused:
                ended = refused.finish()
            assert ended.code != 0
            assert sentence in ended.err and ended.tracebacks == 0, ended.err
        ended = done([PACELINE, "scale", "run", "3"], tmp_path, host=one)  # a launcher hears its own machine alone
        assert ended.code == 2 and "add workers with `paceline run --join`" in ended.err, ended.err
        ended = done([PACELINE, "scale", "run", "1"], tmp_path, host=one)
        assert (ended.code, ended.out) == (0, "from 2 to 1 workers: rank 1 will leave\n"), ended.err
        again = [str(tmp_path / "train.py"), "--strategy", "async", "--open", str(PORT), "--no-record"]
        ended = played(again, tmp_path, host=one, PACELINE_KEY=KEY)
        assert ended.code == 2 and f"--open cannot listen at port {PORT}" in ended.err, ended.err
        (run.notes / "go-on.json").write_text("{}")
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    assert set(outcome.run.note("end-0")["counts"]) == {float(EPOCHS)}
    with joining(tmp_path, other, run, door) as refused:
        ended = refused.finish()
    assert ended.code != 0 and "no run listens there: it has ended, or it was started without --open" in ended.err
    for words, sentence in (
        (["--open", "1", "--strategy", "all-reduce"], "'all-reduce' is not one"),
        (["--open", "1", "--strategy", "mesh:data=2,pipeline=2,sync=async", "--workers", "4"], "' is not one"),
        (["--open", "1", "--strategy", "async", "--on", "ray"], "--open does not go with --on ray"),
        (["--open", "x"], "--open is 'x'; it must be an address with a port, as 29600 or 10.0.0.1:29600"),
    ):
        ended = played([str(tmp_path / "train.py"), "--no-record", *words], tmp_path, host=one, PACELINE_KEY=KEY)
        assert ended.code == 2 and sentence in ended.err, ended.err
    ended = played([str(tmp_path / "train.py"), "--no-record", "--open", "1"], tmp_path, PACELINE_KEY="")
    assert ended.code == 2 and "--open needs a key" in ended.err, ended.err
