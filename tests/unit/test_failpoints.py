"""Points at which tests let a process fail: as they are told, once, and nowhere else."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline import UsageError, failpoints
from paceline.failpoints import POINTS, Fault, InjectedFault, draw_fault, parse_faults

HOUSE = Path(paceline.__file__).parent


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    failpoints.disarm()
    yield
    failpoints.disarm()


def raises(point: str) -> bool:
    try:
        failpoints.hit(point)
    except InjectedFault:
        return True
    return False


def test_a_fault_happens_the_nth_time_that_its_point_is_reached_and_never_again() -> None:
    failpoints.arm("server0", "update.chunk:3:raise")
    assert [raises("update.chunk") for _ in range(5)] == [False, False, True, False, False]
    assert not raises("update.begin")


def test_a_fault_of_one_process_does_not_happen_in_another() -> None:
    failpoints.arm("worker1", "worker0/push.made:1:raise,worker1/push.made:2:raise,server0/update.begin:1:raise")
    assert [raises("push.made") for _ in range(3)] == [False, True, False]
    assert not raises("update.begin")
    failpoints.arm("server0", "server0/update.begin:1:raise")  # in a thread of the worker
    assert raises("update.begin")


def test_the_environment_says_which_faults_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "push.made:1:raise")
    assert not raises("push.made"), "a process that has not entered a run has no faults"
    failpoints.enter("worker0")
    assert raises("push.made")


def test_a_fault_leaves_word_and_happens_once_in_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(failpoints.FIRED, str(tmp_path))
    for process in ("server0", "server1"):  # the second might be the first one, started again
        failpoints.disarm()
        failpoints.arm(process, "update.chunk:1:raise")
        assert raises("update.chunk") == (process == "server0")
    (word,) = tmp_path.iterdir()
    at, pid, *names = word.read_text().split()
    assert word.name == "update.chunk:1:raise"
    assert (int(pid), names) == (os.getpid(), ["server0"])
    assert float(at) <= time.monotonic()


def test_a_delay_takes_its_time() -> None:
    failpoints.arm("worker0", "push.made:1:delay=0.05")
    start = time.monotonic()
    failpoints.hit("push.made")
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_is_killed_or_stopped(action: str, number: signal.Signals) -> None:
    pid = os.fork()
    if pid == 0:
        failpoints.arm("worker0", f"push.made:1:{action}")
        failpoints.hit("push.made")
        os._exit(3)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if action == "kill":
        assert os.waitstatus_to_exitcode(status) == -number
        return
    assert os.WIFSTOPPED(status)
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3, "it goes on where it was stopped"


def test_a_fork_of_a_process_has_no_faults_of_its_own() -> None:
    failpoints.arm("worker0", "push.made:1:raise")
    pid = os.fork()
    if pid == 0:
        os._exit(4 if raises("push.made") else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert raises("push.made")


@pytest.mark.parametrize(
    "text",
    ["update.chunk", "update.chunk:0:kill", "update.chunk:1:explode", "no.such.point:1:kill", "update.chunk:1:delay"],
)
def test_what_is_no_fault_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"PACELINE_FAULTS: '{text}' is no fault; it must be")):
        parse_faults(text)


def test_faults_are_read_as_they_are_written() -> None:
    faults = [Fault("update.chunk", 3, "kill", process="server0"), Fault("pull.begin", 1, "delay", 0.25)]
    assert parse_faults(",".join(map(str, faults))) == faults


def test_a_seed_draws_one_fault_always_the_same() -> None:
    drawn = [parse_faults(f"seed={seed}") for seed in range(50)]
    assert drawn == [parse_faults(f"seed={seed}") for seed in range(50)]
    assert all(len(faults) == 1 for faults in drawn)
    assert len({str(faults[0]) for faults in drawn}) > 40
    source = random.Random(1)
    some = [draw_fault(source, ["pull.begin"], ("kill",), ("worker0", "worker1"), 2) for _ in range(30)]
    assert {str(fault) for fault in some} == {
        f"worker{rank}/pull.begin:{nth}:kill" for rank in (0, 1) for nth in (1, 2)
    }


def test_every_point_is_somewhere_in_the_code_and_every_one_in_the_code_is_known() -> None:
    used = {
        point
        for path in HOUSE.rglob("*.py")
        if path.name != "failpoints.py"
        for point in re.findall(r'failpoints\.hit\("([^"]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert used == set(POINTS)
