"""A session of tests leaves no process behind, however it ends; and limits are longer where the machine is busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import guard, load
from helpers.support import state_of, wait_until

SESSION = """
import os, subprocess, sys, time
from pathlib import Path
from helpers import guard

guard.start()
folder = Path(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep)
apart = subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:  # a daemon: its parent ends at once
    os.setsid()
    if os.fork():
        os._exit(0)
    (folder / "daemon").write_text(str(os.getpid()))
    time.sleep(600)
while not (folder / "daemon").exists() or not (folder / "daemon").read_text():
    time.sleep(0.01)
pids = [os.getpid(), child.pid, apart.pid, int((folder / "daemon").read_text())]
(folder / "partial").write_text(" ".join(map(str, pids)))
(folder / "partial").rename(folder / "pids")
try:
    time.sleep(0 if sys.argv[2] == "end" else 600)
finally:
    (folder / "finally").touch()
"""


@pytest.mark.parametrize("how", ["end", "interrupt group", "interrupt", "terminate", "kill session"])
def test_nothing_is_left_of_a_session_however_it_ends(how: str, tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(Path(guard.__file__).parents[1])}
    command = [sys.executable, "-c", SESSION.replace("guard.start()", "guard.GRACE = 0.1; guard.start()")]
    process = subprocess.Popen(
        [*command, str(tmp_path), how], env=variables, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "pids").exists, 30, "the session to have started others")
    session, *others = map(int, (tmp_path / "pids").read_text().split())
    assert len(others) == 3
    if how == "interrupt group":
        os.killpg(process.pid, signal.SIGINT)
    elif how != "end":
        number = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill session": signal.SIGKILL}[how]
        os.kill(session if how == "kill session" else process.pid, number)
    _, err = process.communicate(timeout=load.allowed(30))
    assert (process.returncode == 0) == (how == "end")
    assert (tmp_path / "finally").exists() == (how != "kill session")  # its own end came first
    assert all(state_of(pid) == "" for pid in (session, *others))
    killed = others[1:] if how == "interrupt group" else others  # the first is in that group
    assert all(f"{pid} (" in err for pid in killed)  # named, as a session should end its processes itself


def test_a_limit_is_longer_on_a_busy_machine_and_never_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "load"
    monkeypatch.setenv(guard.VARIABLE, str(path))
    now = time.monotonic()
    monkeypatch.setattr(load, "_began", now - 5.0)

    def limit(tasks: list[float]) -> float:
        first = now - guard.PERIOD * len(tasks)
        records = [guard.SLOT.pack(first + guard.PERIOD * place, one) for place, one in enumerate(tasks)]
        path.write_bytes(b"".join(records))
        return load.allowed(8.0)

    assert limit([]) == limit([0.5] * 40) == 8.0
    assert limit([3.0] * 40) == pytest.approx(24.0)
    assert limit([0.5] * 10 + [3.0] * 10 + [0.5] * 20) == pytest.approx(24.0)  # its busiest second counts
    assert limit([50.0] * 20 + [0.5] * 65) == 8.0  # before the test
    assert limit([1000.0] * 40) == 80.0


def test_the_guard_records_the_load() -> None:
    path = Path(os.environ[guard.VARIABLE])
    wait_until(lambda: any(at for at, _ in guard.SLOT.iter_unpack(path.read_bytes())), 10, "a record")
