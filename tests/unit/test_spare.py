"""Spare processes: a script that is started in one finds all that a new process would give to it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from paceline.cluster import process_set
from paceline.cluster.process_set import ProcessEnd, ProcessSet
from paceline.cluster.servers import BOOTSTRAP

_SCRIPT = """
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], os.environ["OWN"], "early" in sys.modules, sys.path[0]]))
for number in map(int, sys.argv[1:]):
    print(os.read(number, 9).decode())
raise ValueError("too bad")
"""


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def processes(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> ProcessSet:
    monkeypatch.setattr(process_set, "_IMPORTS", ("early",))
    (tmp_path / "early.py").write_text("import os; kept = os.dup(2)")
    (tmp_path / "script.py").write_text(_SCRIPT)
    return ProcessSet(BOOTSTRAP, tmp_path, lambda _rank, _stream, line: lines.append(line.decode()))


def _end(processes: ProcessSet) -> ProcessEnd:
    until = time.monotonic() + 60
    while not (ends := processes.poll(1.0)):
        assert time.monotonic() < until
    return ends[0]


# A descriptor under a number that a library in the spare has opened a file by: the script starts in a new program.
@pytest.mark.parametrize("taken", [False, True])
def test_a_script_in_a_spare_has_its_own_environment_descriptors_and_exit_report(
    taken: bool, tmp_path: Path, processes: ProcessSet, lines: list[str]
) -> None:
    base = {**os.environ, "PYTHONPATH": str(tmp_path)}
    processes.prepare(base)
    spare = processes._spare
    assert spare is not None
    reading, writing = os.pipe()
    other = 3 if taken else 60
    saved = os.dup(other) if taken else None
    os.write(writing, b"0123456789abcdefgh")
    os.dup2(reading, other)
    try:
        processes.spawn(0, tmp_path / "script.py", [str(other)], {**base, "OWN": "x" * 100_000}, [other])
        end = _end(processes)
    finally:
        os.close(reading)
        os.close(writing)
        os.close(other) if saved is None else (os.dup2(saved, other), os.close(saved))
        processes.stop()
    assert lines[0] == f'[{spare.process.pid}, ["{other}"], "{"x" * 100_000}", {str(not taken).lower()}, "{tmp_path}"]'
    assert lines[1] == "012345678"
    assert end.code == 1 and b"too bad" in (end.exit_report or b"")


def test_a_spare_ends_with_the_run(tmp_path: Path, processes: ProcessSet) -> None:
    processes.prepare({**os.environ, "PYTHONPATH": str(tmp_path)})
    spare = processes._spare
    assert spare is not None
    processes.stop()
    assert spare.process.returncode is not None
    assert isinstance(spare.ours, socket.socket) and spare.ours.fileno() == -1


def test_a_spare_that_was_killed_is_replaced_by_a_new_process(
    tmp_path: Path, processes: ProcessSet, lines: list[str]
) -> None:
    base = {**os.environ, "PYTHONPATH": str(tmp_path), "OWN": "1"}
    processes.prepare(base)
    spare = processes._spare
    assert spare is not None
    spare.process.kill()
    spare.process.wait()
    processes.spawn(0, tmp_path / "script.py", [], base)
    assert _end(processes).code == 1
    processes.stop()
    assert "false" in lines[0]
