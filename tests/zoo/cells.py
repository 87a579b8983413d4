"""Runs scripts of the zoo in teams, and says how each has ended: a cell of the table."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from helpers.team_pool import TeamPool
from helpers.teams import run_team
from helpers.training import under

import paceline
from paceline.errors import PacelineError, WorkerLost
from zoo.scripts import SCRIPTS, Result, Script

EXACT = {
    "all-reduce": "all-reduce",
    "sync": "sync",
    "pipeline": "pipeline:stages=2,microbatches=2",
    "tensor": "tensor:degree=2",
    "mesh": "mesh:data=2",
}
"""Columns of the table whose strategies must train as one process does."""
INEXACT = {"async": "async", "k-sync": "k-sync:k=1", "k-batch-async": "k-batch-async:k=2", "ssp": "ssp:s=1"}
"""Columns whose strategies update with other gradients than one process; their cells must come to an end."""
STRATEGIES = EXACT | INEXACT
COUPLING = "of which each worker has a part"
SAID = (
    "averaged by numbers of samples",
    "is this worker's own gradient",
    "a hook of the script on a parameter's gradient is given",
    "they are each worker's own",
    "batch norm layers use each worker's part",
    "which is taken for the number of this worker's items",
    "learning rate, or another value of its optimizer",
    COUPLING,
    "computes its loss of a batch in another way",
    "which is also the number of this worker's samples",
    "a worker has left an epoch before the others",
    "the model changes buffers in training",
)
"""Of notices that the team does not train as one process would."""
SECONDS = 40.0
"""For a cell; most take a second."""


class Cell(NamedTuple):
    """How a script has ended under a strategy."""

    kind: str
    """equal, refused, runs; or what no cell may be: said (differs, and the team says so), wrong, crashed, hangs."""
    text: str = ""
    """The sentence of a refusal, or what is wrong."""
    said: tuple[str, ...] = ()
    """The lines that the lead has printed about differences."""


@contextlib.contextmanager
def checkpoints() -> Iterator[None]:
    """A folder for a script's checkpoints, the same for all workers."""
    # A TemporaryDirectory would be removed by the first worker that ends: forks run its exit handlers, too.
    folder = os.environ["ZOO_FOLDER"] = tempfile.mkdtemp(prefix="paceline-zoo-")
    try:
        yield
    finally:
        shutil.rmtree(folder)


def plain(script: Script) -> Result:
    """What a script ends with in one process."""
    before, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(script.dtype)
    try:
        with checkpoints():
            return script.train(None)
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(state)


def run_cell(script: Script, column: str, expected: Result, workers: int = 2, pool: TeamPool | None = None) -> Cell:
    """The cell of a script in a column, or under a strategy, given what the plain script ends with.

    pool: the processes to run it in, instead of new ones.
    """
    launch = under(STRATEGIES.get(column, column), None, barrier=SECONDS / 2)
    try:
        with checkpoints():
            if pool is None:
                ends = run_team(_member, workers, script.name, launch=launch, timeout=SECONDS, joined=False)
            else:
                ends = pool.run(_member, workers, script.name, launch=launch, timeout=SECONDS)
                if any(kind != "done" for kind, _ in ends):
                    pool.renew()  # a script that was left in its middle has not tidied up
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Cell("hangs" if "said nothing" in str(error) else "crashed", lines[-1] if lines else "")
    return judged(script, column, expected, ends)


def judged(script: Script, column: str, expected: Result, ends: list[tuple[str, Any]]) -> Cell:
    """The cell of which every worker's end is known."""
    raw = [text for kind, text in ends if kind == "crashed"]
    if raw:
        return Cell("crashed", raw[0])
    refusals = [text for kind, text in ends if kind == "refused"]
    lost = [text for kind, text in ends if kind == "lost"]
    if refusals:
        return Cell("refused", refusals[0])
    if lost:
        return Cell("crashed", lost[0])
    results = [result for _, (*result, _) in ends]
    said = tuple(line for _, (*_, lines) in ends for line in lines)
    if column in INEXACT or script.within == math.inf:
        fine = all(math.isfinite(float(value.sum())) for values, _ in results for value in values.values())
        return Cell("runs", "", said) if fine else Cell("wrong", "values are not finite")
    for rank, (values, printed) in enumerate(results):
        # The lead is the one that prints; under sync a worker may have no part of the last batch.
        result = values, printed if rank == 0 or (printed and column != "sync") else expected[1]
        difference = apart(result, expected, script.within)
        if difference:
            return Cell("said", said[0], said) if said else Cell("wrong", f"rank {rank}: {difference}")
    return Cell("equal", "", said)


def apart(result: Result, expected: Result, within: float) -> str:
    """What of a result is further from the expected one than it may be; empty if nothing is."""
    values, printed = result
    wanted, numbers = expected
    if values.keys() != wanted.keys():
        return f"names of values differ: {sorted(values.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        if value.shape != values[name].shape:
            return f"'{name}' has the shape {tuple(values[name].shape)}, not {tuple(value.shape)}"
        distance = float((values[name].double() - value.double()).norm())
        size = float(value.double().norm())
        if not distance <= within * max(size, 1e-2):
            return f"'{name}' is {distance / max(size, 1e-300):.1e} away from the plain script's"
    if len(printed) != len(numbers):
        return f"{len(printed)} numbers were printed, not {len(numbers)}"
    for number, (ours, theirs) in enumerate(zip(printed, numbers, strict=True)):
        if not math.isclose(ours, theirs, rel_tol=max(within, 1e-9) * 10, abs_tol=1e-9):
            return f"number {number} that is printed is {ours!r}, not {theirs!r}"
    return ""


def _member(_: None, name: str) -> tuple[str, Any]:
    """A worker of a cell: how it ended, and what it ended with, with what it was told about differences."""
    script = SCRIPTS[name]
    torch.set_default_dtype(script.dtype)
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            with paceline.join() as team:
                values, printed = script.train(team)
            said = [line for line in errors.getvalue().splitlines() if any(word in line for word in SAID)]
            return "done", (values, printed, said)
        except WorkerLost as error:
            return "lost", f"{type(error).__name__}: {error}"
        except PacelineError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "crashed", f"{type(error).__name__}: {error}"
