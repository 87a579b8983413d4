"""The contract of an engine, held by the local engine and by one that a test adds with a single registry line."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.forks import Fork
from helpers.support import wait_until, write_script

from paceline.cli.engines import with_engine_options
from paceline.cluster import engines
from paceline.cluster.engines.base import Engine, EngineCallbacks, EngineOption, Job, SupervisedRun
from paceline.cluster.process_set import ProcessEnd, ProcessSet
from paceline.cluster.servers import BOOTSTRAP, SERVER, StartServers
from paceline.cluster.supervision import ExitStatus, Interrupted
from paceline.config import Launch, Timeouts
from paceline.errors import UsageError

# -- a new engine ------------------------------------------------------------------------------------------------------


class StoreEngine(Engine):
    """Starts workers that find each other through torch's store, as those of a cluster do."""

    NAME = "store"
    SELECTORS = ("store", "store://HOST")
    PLACE = "where a test wants them"
    OPTIONS = (EngineOption(name="queue", metavar="NAME", help="A queue."),)
    RESTARTS_TEAM = True

    def run(self, launch: Launch, callbacks: EngineCallbacks) -> list[ExitStatus]:
        return StoreRun(self.job, launch, callbacks).run()


class StoreRun(SupervisedRun):
    restarts_team = True

    def __init__(self, job: Job, launch: Launch, callbacks: EngineCallbacks) -> None:
        super().__init__(job, launch, callbacks)
        self._processes = ProcessSet(BOOTSTRAP, self.folder, callbacks.output)
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._processes.listen(self._ours.fileno(), self._read_lead)
        self._joins: str | None = None

    def start(self, attempt: int) -> None:
        self._joins = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        for rank in range(self.job.workers):
            self.restart_worker(rank)

    def restart_worker(self, rank: int) -> None:
        size, starter = str(self.job.workers), self._theirs.fileno()
        launch = msgspec.structs.replace(self.launch, joins=self._joins, starter=starter)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        environment = {**os.environ, **self.job.environment, **place, **store, **launch.to_environment()}
        self._processes.spawn(rank, self.job.script, self.job.arguments, environment, [starter])

    def _read_lead(self) -> None:
        self.take_request(self._ours.recv(1 << 17))

    def start_servers(self, request: StartServers) -> None:
        self._joins = request.address or None
        for index in range(request.servers):
            self._processes.spawn(-1 - index, SERVER, request.arguments(index), os.environ)

    @property
    def running(self) -> set[int]:
        return self._processes.ranks

    def poll(self, seconds: float) -> list[ProcessEnd]:
        return self._processes.poll(seconds)

    def end_worker(self, rank: int) -> None:
        self._processes.signal(signal.SIGKILL, [rank])

    def signal(self, number: int) -> None:
        self._processes.signal(number)

    def preempt(self) -> None:
        self._processes.preempt()

    def stop(self) -> None:
        self._processes.stop()
        self._ours.close()
        self._theirs.close()


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "store", StoreEngine)


# -- the registry ------------------------------------------------------------------------------------------------------


def test_a_new_engine_is_selected_by_its_name_and_by_its_addresses() -> None:
    assert engines.find_engine("store") is engines.find_engine("store://somewhere") is StoreEngine
    assert engines.selectors() == ["local", "ray", "ray://HOST:PORT", "store", "store://HOST"]
    with pytest.raises(UsageError, match=r"--on is 'stor'; it must be 'local', .* 'store' or 'store://HOST'"):
        engines.find_engine("stor")


def test_a_command_gets_the_options_of_all_engines() -> None:
    @with_engine_options
    def command(on: str = "local", timeout: float = 1.0, **engine_options: Any) -> None:
        pass

    assert list(inspect.signature(command).parameters) == ["on", "place", "each", "env", "queue", "timeout"]


def test_a_process_that_torchrun_has_started_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert engines.detected_engine() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert engines.detected_engine() is engines.ENGINES["torchrun"]


# -- the contract ------------------------------------------------------------------------------------------------------


class Told:
    """Records an engine's calls."""

    def __init__(self, on_tick: Callable[[], None] = lambda: None) -> None:
        self._on_tick = on_tick
        self.lines: list[tuple[int, str, str]] = []
        self.notes: list[str] = []
        self.ticks: list[float] = []
        self.threads: set[int] = set()

    @property
    def callbacks(self) -> EngineCallbacks:
        return EngineCallbacks(output=self.output, tick=self.tick, note=self.note)

    def output(self, rank: int, stream: str, line: bytes) -> None:
        self.threads.add(threading.get_ident())
        self.lines.append((rank, stream, line.decode()))

    def tick(self) -> None:
        self.threads.add(threading.get_ident())
        self.ticks.append(time.monotonic())
        self._on_tick()

    def note(self, sentence: str) -> None:
        self.threads.add(threading.get_ident())
        self.notes.append(sentence)


EVERY = pytest.mark.parametrize("name", ["local", "store"])


def engine(name: str, folder: Path, text: str, **more: Any) -> tuple[Engine, Launch]:
    script = write_script(folder, text)
    strategy = more.pop("strategy", None)
    job = Job(script=script, arguments=("--epochs", "2"), workers=2, on=name, environment={"SEEN": "yes"}, **more)
    launch = Launch(folder=str(folder), strategy=strategy, timeouts=Timeouts(stop=1.0))
    return engines.find_engine(name)(job), launch


SPEAKS = """
import os, sys, time
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SEEN")), *sys.argv[1:])
print("no newline", end="", file=sys.stderr)
until = time.monotonic() + 60
while not os.path.exists("ENOUGH") and time.monotonic() < until:
    time.sleep(0.01)
sys.exit(0)
"""


@EVERY
def test_output_ticks_and_exit_statuses_are_reported(name: str, tmp_path: Path) -> None:
    told = Told(lambda: (tmp_path / "enough").touch() if len(told.ticks) == 4 else None)
    made, launch = engine(name, tmp_path, SPEAKS.replace("ENOUGH", str(tmp_path / "enough")))
    statuses = made.run(launch, told.callbacks)
    assert sorted((status.rank, status.code, status.failed) for status in statuses) == [(0, 0, False), (1, 0, False)]
    for rank in (0, 1):
        assert (rank, "stdout", f"{rank} 2 {rank} 2 yes --epochs 2") in told.lines
        assert (rank, "stderr", "no newline") in told.lines
    assert len(told.ticks) >= 4
    assert told.threads == {threading.get_ident()}
    assert told.notes == []


FAILS = """
import os, pathlib, time
pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    raise ValueError("planted")
time.sleep(60)
"""


@EVERY
def test_a_failure_ends_the_others_and_is_in_the_exit_report(name: str, tmp_path: Path) -> None:
    made, launch = engine(name, tmp_path, FAILS, restarts=1)
    told = Told()
    first, second = made.run(launch, told.callbacks)
    assert (first.rank, first.code, first.died) == (1, 1, False)
    assert first.exit_report is not None
    assert (first.exit_report.kind, first.exit_report.message) == ("ValueError", "planted")
    assert "Traceback" in first.exit_report.traceback
    assert (second.rank, second.code) == (0, -signal.SIGTERM)
    assert told.notes == []  # an error of the script is not tried again


@EVERY
def test_an_interrupt_ends_all_processes(name: str, tmp_path: Path) -> None:
    made, launch = engine(name, tmp_path, FAILS.replace('== "1"', '== "none"'))
    pids = [tmp_path / "0", tmp_path / "1"]

    def tick() -> None:
        if all(path.exists() and path.read_text() for path in pids):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM"):
        made.run(launch, EngineCallbacks(tick=tick))
    wait_until(lambda: not any(Path(f"/proc/{path.read_text()}").exists() for path in pids), 10, "the end of all")


LOSES = """
import os, pathlib, signal, time
import torch, paceline
team = paceline.join()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
again = pathlib.Path(__file__).with_name("again")
joined = '"joins":"' in os.environ["PACELINE_LAUNCH"].replace(" ", "")
if joined:
    again.touch()
for step in range(100000):
    with team.step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step == 3 and team.rank == 1 and not joined:
        os.kill(os.getpid(), signal.SIGKILL)
    if step > 3 and again.exists():
        break
    time.sleep(0.01)
"""


@EVERY
def test_a_killed_worker_is_started_again_and_joins_the_servers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Fork)  # the other tests start new interpreters
    told = Told()
    made, launch = engine(name, tmp_path, LOSES, restarts=1, strategy="async")
    statuses = made.run(launch, told.callbacks)
    assert told.notes == ["rank 1 was killed by signal 9 (SIGKILL); it is started again (0 restarts left)"]
    lost, *others = statuses
    assert (lost.rank, lost.spared, lost.restarted) == (1, True, True)
    assert sorted(status.rank for status in others) == [-1, 0, 1]
    assert all(status.code == 0 for status in others)


DIES_ONCE = """
import os, pathlib, signal, time
died = pathlib.Path(__file__).with_name("died")
if os.environ["RANK"] == "1" and not died.exists():
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5 if died.exists() else 60)
"""


def test_a_team_that_lost_a_worker_is_started_again_where_the_engine_does_that(tmp_path: Path) -> None:
    told = Told()
    made, launch = engine("store", tmp_path, DIES_ONCE, restarts=1)
    statuses = made.run(launch, told.callbacks)
    assert sorted((status.rank, status.code) for status in statuses) == [(0, 0), (1, 0)]
    (note,) = told.notes
    assert note == (
        "rank 1 was killed by signal 9 (SIGKILL); the team is started again from the beginning, as it saved no "
        "checkpoint (0 restarts left)"
    )
