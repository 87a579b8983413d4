"""`paceline.launch` runs a function as `paceline run` runs a script: same folder, same errors, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import QuickRun, done, starting
from helpers.support import PREAMBLE, PYTHON, left_behind, wait_until, write_script

import paceline
from paceline import UsageError
from paceline.launcher.finished_run import Run

START = (
    "from helpers.forks import fork_programs\nfork_programs()\n"
    + PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

def train(batches=16, each=lambda team: None):
    team = paceline.join()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8 * batches, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for x, y in loader:
        with team.step():
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            team.report(loss=loss)
            each(team)
    return model
"""
)
"""Defines, in the main module of a script, a function that trains; its workers start at once."""


def script(folder: Path, text: str) -> list[str | Path]:
    return [PYTHON, write_script(folder, START + text, "cells.py")]


def assert_nothing_is_left(run: QuickRun) -> None:
    wait_until(lambda: run.processes() == [], 10.0, "the end of all processes")
    assert left_behind(run.shared_before) == set()


def test_it_returns_what_rank_0_returns_and_leaves_a_run(tmp_path: Path) -> None:
    outcome = done(
        script(
            tmp_path,
            """
torch.manual_seed(3)
together = paceline.launch(train, workers=2, name="first")
assert type(together) is Net          # this script's own class, not a copy of it
run = paceline.last_run()
assert run.folder == pathlib.Path("runs/first").resolve()
assert (run.summary.updates, run.summary.world_size) == (16, 2)
paceline.launch(train, workers=2, name="first", strategy="k-async:k=1", slow="1:2", quiet=True)
print(paceline.last_run())
torch.manual_seed(3)
alone = train()                       # the same function as a team of one
for one, other in zip(together.parameters(), alone.parameters(), strict=True):
    assert torch.allclose(one, other, atol=1e-6)
""",
        ),
        tmp_path,
    )
    assert outcome.code == 0, outcome.err
    assert re.search(r"^<Run runs/first: k-async:k=1, 2 workers, 32 updates", outcome.out, re.MULTILINE)
    assert re.search(r"paceline: done: 16 updates, .* loss \S+; see runs/first/summary.json", outcome.err)
    assert "the earlier runs/first is now runs/first~1" in outcome.err  # it was over: nothing holds its folder
    config = json.loads((tmp_path / "runs" / "first" / "config.json").read_bytes())
    assert (config["function"], config["workers"], config["strategy"], config["slow"]) == (
        "train",
        2,
        "k-async:k=1",
        ["1:2"],
    )
    assert sorted(path.name for path in (tmp_path / "runs" / "first").iterdir()) == [
        "config.json",
        "events.jsonl",
        "output",
        "summary.json",
    ]
    assert_nothing_is_left(outcome.run)


def test_a_function_takes_along_what_it_uses(tmp_path: Path) -> None:
    write_script(tmp_path, "FACTOR = 3\n", "beside.py")
    outcome = done(
        script(
            tmp_path,
            """
import functools, random
sys.path.insert(0, "")  # as in a notebook
import beside

torch.set_default_dtype(torch.float64)
random.seed(5)
scale, drawn = 2, random.Random(5).random()
print("tail", end="")

def outer(offset):
    def inner(value, more=0):
        assert sys.argv[1:] == [] and pathlib.Path(__file__).name == "cells.py"
        assert random.random() == drawn
        assert torch.zeros(1).dtype == torch.float64
        torch.save(Net(), f"net{os.environ['RANK']}.pt")  # a class of the main module
        return value * scale * beside.FACTOR + offset + more
    return inner

assert paceline.launch(outer(1), 7, workers=2, quiet=True) == 43
assert paceline.launch(functools.partial(outer(1), more=100), 7, quiet=True) == 143
assert paceline.launch(lambda: int(os.environ["WORLD_SIZE"]), workers=3, quiet=True) == 3
assert paceline.launch(sys.exit, quiet=True) is None
assert paceline.launch("{}-{}".format, 1, 2, quiet=True) == "1-2"
""",
        ),
        tmp_path,
    )
    assert outcome.code == 0, outcome.err


def test_it_works_without_a_file(tmp_path: Path) -> None:
    code = "import paceline; print(paceline.launch(lambda: paceline.join().world_size, workers=2, quiet=True))"
    outcome = subprocess.run([PYTHON, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (outcome.stdout, outcome.stderr, outcome.returncode) == ("2\n", "", 0)


def test_an_exception_on_a_worker_is_raised_in_the_caller_with_its_traceback_and_rank(tmp_path: Path) -> None:
    outcome = done(
        script(
            tmp_path,
            """
class OwnError(Exception):
    def __init__(self, one, two):  # cannot be made of its arguments alone
        super().__init__(f"{one} and {two}")

def fail(team, kind):
    if team.rank == 1:
        raise {"value": ValueError("wrong on purpose"), "own": OwnError(1, 2)}[kind]

try:
    paceline.launch(train, 16, lambda team: fail(team, "value"), workers=3, name="failed")
except ValueError as error:
    assert str(error) == "wrong on purpose"
    assert "on rank 1 of 3; its output is in runs/failed/output/1.log" in error.__notes__
    assert all(re.search("rank [02] stopped: WorkerLost: .*rank 1", note) for note in error.__notes__[1:])
    text = str(error.__cause__)
    assert "in fail" in text and "call.py" not in text and "bootstrap" not in text
    assert 'raise {"value": ValueError("wrong on purpose")' in text  # the line of this file
assert paceline.last_run().folder.name == "failed"
try:
    paceline.launch(train, 16, lambda team: fail(team, "own"), workers=2)
except paceline.TeamError as error:
    assert str(error) == "OwnError: 1 and 2" and error.ranks == (1,)
paceline.launch(train, 16, lambda team: fail(team, "value"))
""".replace("try:", "import re\ntry:", 1),
        ),
        tmp_path,
    )
    assert outcome.code == 1
    assert outcome.tracebacks == 2, outcome.err  # of the last: here and on its worker, once each
    assert outcome.err.rstrip().splitlines()[-3] == "ValueError: wrong on purpose"
    assert_nothing_is_left(outcome.run)


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_a_killed_worker_is_named(strategy: str, tmp_path: Path) -> None:
    outcome = done(
        script(
            tmp_path,
            f"""
def die(team):
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

try:
    paceline.launch(train, 16, die, workers=2, strategy="{strategy}", servers={1 if strategy == "async" else None})
except paceline.WorkerLost as error:
    assert "rank 1 was killed by signal 9 (SIGKILL)" in str(error) and error.ranks == (1,), error
    print("named")
assert paceline.launch(os._exit, 0, workers=1) is None
""",
        ),
        tmp_path,
    )
    # Async goes on without it.
    assert outcome.out.count("named") == (strategy == "all-reduce"), outcome.err
    assert ("the others went on without it" in outcome.err) == (strategy == "async")
    assert "WorkerLost: rank 0 ended inside the function, so there is no result" in outcome.err
    assert_nothing_is_left(outcome.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_caller_ends_the_workers(number: signal.Signals, tmp_path: Path) -> None:
    text = """
def wait(team):
    note(f"here-{team.rank}")
    time.sleep(600)

try:
    paceline.launch(train, 16, wait, workers=2, strategy="sync", name="waits", grace="1s")
except KeyboardInterrupt:
    note("interrupted", strategy=paceline.last_run().summary.strategy)
    raise
"""
    with starting(script(tmp_path, text), tmp_path) as run:
        run.note("here-0")
        run.note("here-1")
        os.kill(run.process.pid, number)
        outcome = run.finish()
        assert_nothing_is_left(run)
    if number == signal.SIGINT:
        assert "paceline: stopped by SIGINT; all workers have ended" in outcome.err
        assert run.note("interrupted")["strategy"] in (None, "sync")
        assert outcome.tracebacks == 1
    else:
        assert outcome.code == -number


def test_a_thread_can_launch(tmp_path: Path) -> None:
    text = """
import threading
found = []
thread = threading.Thread(target=lambda: found.append(paceline.launch(lambda: paceline.join().world_size, quiet=True)))
thread.start()
thread.join()
assert found == [2]
"""
    assert done(script(tmp_path, text), tmp_path).code == 0


def test_output_goes_where_the_caller_prints(tmp_path: Path) -> None:
    text = """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as told:
    paceline.launch(lambda: print("ö", os.environ["RANK"]), workers=2, quiet=True)
assert told.getvalue() == "[0] ö 0\\n"
paceline.launch(lambda: print("all", os.environ["RANK"]), workers=2, all_output=True, record=False)
try:
    paceline.last_run()
except paceline.UsageError as error:
    assert "did not record its run" in str(error)
"""
    outcome = done(script(tmp_path, text), tmp_path)
    assert sorted(outcome.out.splitlines()) == ["[0] all 0", "[1] all 1"], outcome.err


# -- refused before anything is started ------------------------------------------------------------------------------


def nothing() -> None:
    """A function to launch."""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers is 0; it must be a whole number of at least 1"),
        ({"workers": 1.5}, "workers is 1.5; it must be a whole number of at least 1"),
        ({"timeout": -1}, "timeout is -1"),
        ({"strategy": "k-sync:k=5", "workers": 4}, "k"),
        ({"strategy": "none-such"}, "unknown strategy 'none-such'"),
        ({"strategy": "__main__:Mine"}, "put it into a module"),
        ({"slow": "9:4"}, "slow is '9:4'; '9' is not a rank from 0 to 1, nor 'all'"),
        ({"name": "a/b"}, "name is 'a/b'"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(UsageError) as found:
            paceline.launch(nothing, **options)
    assert sentence in str(found.value) and "--" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_copied_is_named() -> None:
    lock = threading.Lock()

    def function() -> Any:
        return lock

    with pytest.raises(UsageError, match="'lock', which the function uses, cannot be copied to the workers"):
        paceline.launch(function)
    with pytest.raises(UsageError, match="argument 2, which the function uses, cannot be copied"):
        paceline.launch(print, 1, sys._getframe())
    with pytest.raises(UsageError, match="launch takes a plain function first"):
        paceline.launch(3)


def test_a_result_that_cannot_be_copied_back_is_refused(tmp_path: Path) -> None:
    text = "paceline.launch(lambda: (number for number in range(3)))"
    outcome = done(script(tmp_path, text), tmp_path)
    assert "UsageError: the function's result, a generator, cannot be copied back" in outcome.err


def test_a_worker_cannot_launch_nor_take_a_team_along(tmp_path: Path) -> None:
    text = """
def nested():
    try:
        paceline.launch(print)
    except paceline.UsageError as error:
        return str(error)

assert "call paceline.join() to train with this team" in paceline.launch(nested, quiet=True)
team = paceline.join()
try:
    paceline.launch(lambda: team.rank)
except paceline.UsageError as error:
    assert "'team', which the function uses" in str(error) and "call paceline.join() there" in str(error)
    print("named")
"""
    outcome = done(script(tmp_path, text), tmp_path)
    assert outcome.out == "named\n", outcome.err


def test_without_a_run_there_is_no_last_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the folder of a finished run"):
        Run(tmp_path)
