"""Faults struck on purpose: what the survivors say, how fast, and that nothing of the run is left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.forks import QuickRun, played, playing, starting
from helpers.load import allowed
from helpers.support import (
    PACELINE,
    PREAMBLE,
    PYTHON,
    Run,
    can_listen,
    drill,
    free_port,
    left_behind,
    listening,
    started,
    state_of,
    wait_until,
    write_script,
)

SOON = 10.0
"""Seconds in which a fault must be known, on a busy machine; without it, everybody waits for a minute or longer."""
AT_ONCE = 2.0
"""Seconds in which no process is left once its launcher has ended: whoever notices by itself takes up to five."""

KILL = """
def fault(rank):
    if rank == {victim}:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
"""

# -- a worker that raises --------------------------------------------------------------------------------------------

RAISE = """
def fault(rank):
    if rank == 1:
        note("raised")
        raise ValueError("planted fault")
    if rank == 2:
        note("busy")
        time.sleep(60)
"""


def test_a_worker_that_raises_is_shown_once_and_the_others_are_stopped(tmp_path: Path) -> None:
    outcome = played([drill(tmp_path, RAISE), "-w", "3"], tmp_path)
    raised = outcome.run.note("raised")["at"]
    assert outcome.run.noted("busy"), "rank 2 should have been far from any barrier"
    assert outcome.code == 1
    assert outcome.ended - raised < allowed(SOON)
    assert outcome.tracebacks == 1
    assert "[1] ValueError: planted fault" in outcome.err.splitlines()
    assert "paceline: rank 1 failed: ValueError: planted fault" in outcome.err.splitlines()
    assert 'raise ValueError("planted fault")' in outcome.err
    lost = outcome.run.note("caught-0")
    assert lost["kind"] == "WorkerLost"
    assert lost["ranks"] == [1]
    assert outcome.run.processes() == []


NEVER_JOINS = (
    PREAMBLE
    + """
import paceline
if os.environ["RANK"] == "1":
    time.sleep(0.2)
    note("raised")
    raise ValueError("planted before joining")
note("waiting")
paceline.join()
"""
)


def test_a_worker_that_fails_before_it_joins_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    outcome = played([write_script(tmp_path, NEVER_JOINS)], tmp_path)
    assert outcome.run.noted("waiting")
    assert outcome.ended - outcome.run.note("raised")["at"] < allowed(SOON)
    assert outcome.code == 1
    assert outcome.tracebacks == 1
    assert "paceline: rank 1 failed: ValueError: planted before joining" in outcome.err.splitlines()
    assert outcome.run.processes() == []


ALL_RAISE = """
def fault(rank):
    note(f"raised-{rank}")
    raise ValueError("planted in all")
"""


def test_what_fails_alike_everywhere_is_shown_once(tmp_path: Path) -> None:
    outcome = played([drill(tmp_path, ALL_RAISE), "-w", "2"], tmp_path)
    assert all(outcome.run.noted(f"raised-{rank}") for rank in range(2))
    assert outcome.code == 1
    assert outcome.tracebacks == 1
    assert outcome.err.count("] ValueError: planted in all\n") == 1
    alike = [line for line in outcome.err.splitlines() if line.endswith("failed with the same error")]
    assert len(alike) == 1
    assert alike[0].startswith("paceline: rank ")


# -- a worker that dies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_every_survivor_of_a_killed_worker_learns_who_died(victim: int, tmp_path: Path) -> None:
    script = drill(tmp_path, KILL.replace("{victim}", str(victim)))
    outcome = played([script, "-w", "3"], tmp_path)
    killed = outcome.run.note("killed")["at"]
    for rank in {0, 1, 2} - {victim}:
        caught = outcome.run.note(f"caught-{rank}")
        assert caught["kind"] == "WorkerLost"
        assert caught["ranks"] == [victim]
        assert f"rank {victim} died" in caught["message"]
        assert caught["at"] - killed < allowed(SOON)
    assert outcome.code == 1
    assert f"paceline: rank {victim} was killed by signal 9 (SIGKILL)" in outcome.err
    assert outcome.tracebacks == 0
    assert outcome.run.processes() == []


@pytest.mark.parametrize("victim", [0, 1])
def test_workers_started_by_hand_learn_who_died(victim: int, tmp_path: Path) -> None:
    script = drill(tmp_path, KILL.replace("{victim}", str(victim)))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        starting([PYTHON, script], tmp_path, RANK="0", **place) as zero,
        starting([PYTHON, script], tmp_path, RANK="1", **place) as one,
    ):
        runs = (zero, one)
        lost, survivor = runs[victim], runs[1 - victim]
        assert lost.finish(25).code == -signal.SIGKILL
        killed = lost.note("killed")["at"]
        outcome = survivor.finish(25)
        caught = survivor.note(f"caught-{1 - victim}")
        assert caught["kind"] == "WorkerLost"
        assert caught["ranks"] == [victim]
        assert caught["at"] - killed < allowed(SOON)
        assert outcome.code == 1
        assert f"rank {victim} died" in outcome.err


EARLY_END = """
def fault(rank):
    if rank == 1:
        note("ended")
        sys.exit(0)
"""


def test_a_script_that_ends_early_is_named_by_those_who_go_on(tmp_path: Path) -> None:
    outcome = played([drill(tmp_path, EARLY_END), "-w", "2"], tmp_path)
    ended = outcome.run.note("ended")["at"]
    caught = outcome.run.note("caught-0")
    assert caught["kind"] == "WorkerLost"
    assert caught["ranks"] == [1]
    assert "its script has ended" in caught["message"]
    assert caught["at"] - ended < allowed(SOON)
    assert outcome.code == 1
    assert "rank 1 has left the team: its script has ended" in outcome.err
    assert outcome.tracebacks == 0


# -- a worker that does not come -------------------------------------------------------------------------------------

STOP = """
def fault(rank):
    if rank == 1:
        note("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        note("went-on")
"""


def test_a_stopped_worker_is_named_then_given_up_after_the_timeout(tmp_path: Path) -> None:
    script = drill(tmp_path, STOP, "timeouts=paceline.Timeouts(barrier=1.0, notice=0.4)")
    with playing([script, "-w", "2"], tmp_path) as run:
        run.note("stopped")
        outcome = run.finish()
        assert not run.noted("went-on")
        caught = run.note("caught-0")
        assert caught["kind"] == "TeamTimeout"
        assert caught["ranks"] == [1]
        assert 1.0 <= caught["waited"] < 1.0 + allowed(SOON)
        assert "paceline: rank 0 waits for rank 1 at an update" in outcome.err
        assert outcome.code == 1
        assert "TeamTimeout" in outcome.err
        assert outcome.tracebacks == 0
        assert run.processes() == []


BUSY = """
def fault(rank):
    if rank == 0:
        note("busy")
        time.sleep(60)
"""


def test_the_timeout_of_the_command_line_holds(tmp_path: Path) -> None:
    outcome = played([drill(tmp_path, BUSY), "--timeout", "1"], tmp_path)
    assert outcome.run.noted("busy")
    caught = outcome.run.note("caught-1")
    assert caught["kind"] == "TeamTimeout"
    assert caught["ranks"] == [0]
    assert 1.0 <= caught["waited"] < 1.0 + allowed(SOON)
    assert outcome.code == 1
    assert re.search(r"rank 1 waited [\d.]+ s .*; the timeout is 1 s", outcome.err), outcome.err
    assert outcome.run.processes() == []


# -- workers that do different things --------------------------------------------------------------------------------

DIFFERENT = """
def fault(rank):
    if rank == 0:
        note("barrier")
        team.barrier()
"""


def test_workers_that_do_different_things_are_told_what_each_does(tmp_path: Path) -> None:
    outcome = played([drill(tmp_path, DIFFERENT), "-w", "2"], tmp_path)
    assert outcome.run.noted("barrier")
    caught = [outcome.run.note(f"caught-{rank}") for rank in (0, 1) if outcome.run.noted(f"caught-{rank}")]
    assert [each["kind"] for each in caught] == ["Mismatch", "Mismatch"]
    for each in caught:
        assert "a barrier" in each["message"]
        assert "an update" in each["message"]
        assert "rank 0" in each["message"]
        assert "rank 1" in each["message"]
    assert outcome.code == 1
    assert outcome.err.count("Mismatch") >= 1
    assert outcome.tracebacks == 0


# -- nothing is left -------------------------------------------------------------------------------------------------

LIVELY = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

pause = pathlib.Path(os.environ["RUN_NOTES"]) / "pause"

def loader_started(number):
    note(f"loader-{os.environ['RANK']}-{number}")

team = paceline.join()
torch.distributed.init_process_group("gloo")
note(f"worker-{team.rank}", port=int(os.environ["MASTER_PORT"]))
model = torch.nn.Linear(256, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
inputs = torch.randn(20_000, 256)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=loader_started)
model, optimizer, loader = team.setup(model, optimizer, loader)
for number, (x, y) in enumerate(loader):
    mse_loss(model(x), y).backward()
    time.sleep(0.01)
    optimizer.step()
    optimizer.zero_grad()
    if number == 75:  # events reach the disk twice a second; some have by now
        note(f"training-{team.rank}")
    if pause.exists():
        note(f"paused-{team.rank}")
        time.sleep(60)
"""
)
"""Uses all that a run can hold: loader processes with their shared tensors, the port, shared parameters."""


def in_the_middle_of_training(run: Run | QuickRun) -> int:
    """Wait until everything is there that could be left behind; returns the port."""
    for rank in (0, 1):
        run.note(f"training-{rank}")
    noted = {run.process.pid}
    noted |= {run.note(f"worker-{rank}")["pid"] for rank in (0, 1)}
    noted |= {run.note(f"loader-{rank}-{number}")["pid"] for rank in (0, 1) for number in (0, 1)}
    assert set(run.processes()) == noted
    assert len(noted) == 7
    port = int(run.note("worker-0")["port"])
    assert listening(port)
    return port


def assert_nothing_is_left(run: Run | QuickRun, port: int, after_launcher: float) -> None:
    """After the launcher's end, which must come soon, the rest may take so many seconds more."""
    wait_until(lambda: run.ended, 2 * SOON, "the launcher to end")
    wait_until(lambda: not run.processes(), after_launcher, "all processes of the run to end with the launcher")
    wait_until(lambda: not left_behind(run.shared_before), 30, "/dev/shm to be as it was")
    # A process gives up its memory, by which we know it, an instant before its sockets.
    wait_until(lambda: can_listen(port), 20, "the port to be free")


def test_nothing_is_left_of_a_run_whose_launcher_is_killed_in_processes_of_their_own(tmp_path: Path) -> None:
    with started([PACELINE, "run", write_script(tmp_path, LIVELY), "--name", "cut"], tmp_path) as run:
        port = in_the_middle_of_training(run)
        run.process.send_signal(signal.SIGKILL)
        # Loader processes notice by themselves that they are orphans.
        assert_nothing_is_left(run, port, after_launcher=2 * SOON)
        assert run.finish().code == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_nothing_is_left_of_a_run_whose_launcher_gets_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    script = write_script(tmp_path, LIVELY)
    with playing([script, "--name", "cut"], tmp_path) as run:
        port = in_the_middle_of_training(run)
        run.process.send_signal(number)
        assert_nothing_is_left(run, port, AT_ONCE)
        outcome = run.finish()
        assert outcome.code == 128 + number
        assert f"paceline: stopped by {number.name}; all workers have ended" in outcome.err
        assert outcome.tracebacks == 0
        assert run.summary("cut")["updates"] >= 1


@pytest.mark.parametrize("victim", ["worker-0", "worker-1", "loader-1-0"])
def test_nothing_is_left_of_a_run_of_which_a_process_is_killed(victim: str, tmp_path: Path) -> None:
    with playing([write_script(tmp_path, LIVELY)], tmp_path) as run:
        port = in_the_middle_of_training(run)
        pid = run.note(victim)["pid"]
        if victim.startswith("loader"):  # not in the middle of a batch, which would be an error of another kind
            (run.notes / "pause").touch()
            run.note("paused-1")
            time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: state_of(pid) in ("", "Z"), 20, f"{victim} to be dead")
        assert_nothing_is_left(run, port, AT_ONCE)
        outcome = run.finish()
        assert outcome.code == 1
        rank = victim.split("-")[1]
        if victim.startswith("worker"):
            assert f"paceline: rank {rank} was killed by signal 9 (SIGKILL)" in outcome.err
        else:
            assert f"paceline: rank {rank} failed: RuntimeError: DataLoader worker (pid" in outcome.err
            assert "Traceback" in outcome.err
            assert f"[{1 - int(rank)}] " not in outcome.err
