"""Workers that end before the others expect it, or not at all, are named at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.forks import played
from helpers.load import allowed
from helpers.support import PACELINE, finished, write_script

ABSENT = """
import os, sys
import torch, paceline
if os.environ["RANK"] == "1":
    {end}
team = paceline.join()
model = torch.nn.Linear(2, 1)
team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_ends_without_joining_is_named_at_once(
    end: str, strategy: str, workers: int, tmp_path: Path
) -> None:
    script = write_script(tmp_path, ABSENT.replace("{end}", end))
    start = time.monotonic()
    outcome = played([script, "--workers", str(workers), "--strategy", strategy, "--timeout", "30"], tmp_path)
    assert time.monotonic() - start < allowed(15.0)
    assert outcome.code == 1
    assert f"rank 1 ended without paceline.join(), and the team needs all {workers} workers" in outcome.err
    assert outcome.tracebacks == 0


def test_a_script_in_which_nobody_joins_is_fine(tmp_path: Path) -> None:
    assert played([write_script(tmp_path, "print('nothing to do')\n")], tmp_path).code == 0


THREADS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
import paceline
team = paceline.join()
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
thread = threading.Thread(target=time.sleep, args=((7.0, 0.2)[team.rank],), name="watcher")
thread.start()
"""


def test_a_thread_that_keeps_a_run_alive_is_named_and_one_that_soon_ends_is_not(tmp_path: Path) -> None:
    outcome = finished([PACELINE, "run", write_script(tmp_path, THREADS), "--workers", "2", "--all-output"], tmp_path)
    assert outcome.code == 0, outcome.err
    sentence = "has ended, but it still runs because of its thread watcher; make"
    assert outcome.err.count(sentence) == outcome.err.count(f"the script of rank 0 {sentence}") == 1, outcome.err
