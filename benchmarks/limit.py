"""How far from the limit: this project against its best peer, and against what cannot be beaten, one ratio per row.

Every row is one run in which the contestants take turns, `--quick` for fewer rounds. The limit of training is as many
processes that never talk, with the same way of keeping freed memory; that of a collective is a copy of as many bytes,
by all workers at once. A row is a function and a line in ROWS. Nothing else should run on the machine meanwhile.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness.runs import bench
from rich.console import Console
from rich.table import Table

from paceline.bench.harness import measure
from paceline.bench.tasks import MODELS, TrainTask

ROUNDS, SECONDS = (3, 0.5) if "--quick" in sys.argv else (9, 1.0)


class Result(NamedTuple):
    """Ratios of one row; above 1 this project is ahead."""

    peer: str
    of_peer: float
    limit: str
    of_limit: float


def training(model: str, workers: int, loader: bool = False) -> Result:
    """Steps per second under all-reduce, as ratios to DDP's and to those of processes that never talk.

    loader: every contestant takes its batches from a DataLoader.
    """
    names = ["paceline", "ddp", "alone-keeping"]
    task = TrainTask(model=model, contestants=names, batch=MODELS[model], loader=loader, rounds=ROUNDS, seconds=SECONDS)
    ours, ddp, alone = (min(times) for times in map(measure(task, workers).__getitem__, names))
    return Result("DDP on gloo", ddp / ours, "never talking", alone / ours)


def collective(size: str, workers: int, against: str) -> Result:
    """The speed of all_reduce on ordinary tensors, as ratios to a peer's and to that of a copy."""
    words = ("--workers", str(workers), "--sizes", size, "--against", against, "--rounds", str(ROUNDS))
    seen = bench("collectives", *words)["points"][0]["contestants"]["torch"]
    return Result({"mpi": "OpenMPI"}.get(against, against), seen["ratio"], "memory bandwidth", seen["memory"])


@functools.cache
def over_hosts(shape: str, rate: str) -> dict[str, Any]:
    """The steps of a model on several hosts, as `overlap.py` measures them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        words = ("--shapes", shape, "--rates", rate, "--rounds", str(ROUNDS), "--json", str(file))
        beside = Path(__file__).with_name("overlap.py")
        subprocess.run([sys.executable, str(beside), *words], check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(file.read_text())[0])


def bare(shape: str, rate: str) -> Result:
    """Steps with nothing to hide an exchange in, as ratios to DDP's and to what computing and the link take."""
    found = over_hosts(shape, rate)
    steps = found["bare"]
    return Result("DDP on gloo", steps["faster"], "the link", (steps["alone"] + found["link"]) / steps["team"])


def hidden(shape: str, rate: str) -> Result:
    """Steps whose backward pass sleeps, as ratios to DDP's and to steps that exchange nothing."""
    steps = over_hosts(shape, rate)["sleeping"]
    return Result("DDP on gloo", steps["faster"], "exchanging nothing", steps["alone"] / steps["team"])


class Row(NamedTuple):
    name: str
    measure: Callable[[], Result]
    goal: str


ROWS = [
    Row("mlp25m, 2 workers", functools.partial(training, "mlp25m", 2), "0.95 of the limit"),
    Row("transformer, 2 workers", functools.partial(training, "transformer", 2), "0.97 of the limit"),
    Row("convnet, 2 workers", functools.partial(training, "convnet", 2), "0.97 of the limit"),
    Row("small with loaders, 2 workers", functools.partial(training, "small", 2, loader=True), "4 times the peer"),
    Row("small with loaders, 4 workers", functools.partial(training, "small", 4, loader=True), "6 times the peer"),
    Row("all_reduce of 25 MB, 2 workers", functools.partial(collective, "25M", 2, "gloo"), "4 times the peer"),
    Row("all_reduce of 100 MB, 2 workers", functools.partial(collective, "100M", 2, "gloo"), "4 times the peer"),
]
HOSTS = [
    Row(f"{shape} hosts, {rate / 1e6:g} Mbit/s, {what}", functools.partial(measured, shape, str(rate)), goal)
    for shape in ("2x1", "3x1", "2x2")
    for rate in (200e6, 1e9)
    for what, measured, goal in (
        ("short backward", bare, "ahead of the peer"),
        ("long backward", hidden, "85 % hidden"),
    )
]
"""Rows that need root, for network namespaces."""
OPENMPI = [
    Row("all_reduce of 1 KB, 2 workers", functools.partial(collective, "1K", 2, "mpi"), "ahead of the peer"),
    Row("all_reduce of 1 MB, 2 workers", functools.partial(collective, "1M", 2, "mpi"), "0.8 of the peer"),
    Row("all_reduce of 25 MB, 2 workers", functools.partial(collective, "25M", 2, "mpi"), "ahead of the peer"),
    Row("all_reduce of 100 MB, 2 workers", functools.partial(collective, "100M", 2, "mpi"), "ahead of the peer"),
]
"""Rows that need `pip install 'paceline[mpi]'`."""


def main() -> None:
    table = Table("", "peer", "times the peer", "limit", "share of the limit", "goal", title="How far from the limit")
    for row in [*ROWS, *(HOSTS if os.geteuid() == 0 else []), *(OPENMPI if importlib.util.find_spec("mpi4py") else [])]:
        print(f"{row.name} …", file=sys.stderr, flush=True)
        found = row.measure()
        table.add_row(row.name, found.peer, f"{found.of_peer:.2f}", found.limit, f"{found.of_limit:.2f}", row.goal)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
