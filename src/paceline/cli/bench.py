"""`paceline bench`: measure this machine, as ratios of things measured in one go."""

from __future__ import annotations

import statistics
import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from paceline.bench.contestants import CONTESTANTS, OPTIMIZERS, PRECISIONS
from paceline.bench.harness import measure
from paceline.bench.worker import Task
from paceline.bench.workloads import WORKLOADS, workload
from paceline.config import one_of, parse_strategy
from paceline.errors import UsageError

app = typer.Typer(help="Measure this machine, as ratios of things measured in one go.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help=f"What to train: {', '.join(WORKLOADS)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Rounds = Annotated[int, typer.Option(help="Rounds in which the contestants take turns.")]
Optimizer = Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")]


@app.command()
def train(
    model: Model = "small",
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers.")] = 2,
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="How the team trains.")] = "all-reduce",
    against: Annotated[
        str, typer.Option(help="ddp (DistributedDataParallel on gloo) or alone (processes that never talk).")
    ] = "ddp",
    batch: Annotated[int | None, typer.Option(help="Samples per worker and step.")] = None,
    optimizer: Optimizer = "sgd",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (autocast).")] = "fp32",
    rounds: Rounds = 7,
    seconds: Annotated[float, typer.Option(help="How long each turn lasts, about.")] = 1.0,
    json: Json = False,
) -> None:
    """Train a model with a team and with a peer, in turns, and print how many times as fast the team is.

    Example: `paceline bench train --model mlp25m --workers 2 --against ddp`
    """
    one_of("--against", against, [name for name in CONTESTANTS if name != "paceline"])
    task = _task(model, ["paceline", against], workers, batch, optimizer, precision, rounds, seconds)
    chosen = str(parse_strategy(strategy))
    result = measure(task, workers, chosen, label=f"{model}, {workers} workers:")
    ours, theirs = result.seconds["paceline"], result.seconds[against]
    facts: dict[str, Any] = {
        "model": model,
        "workers": workers,
        "strategy": chosen,
        "against": against,
        "batch": task.batch,
        "optimizer": optimizer,
        "precision": precision,
        "ratio": min(theirs) / min(ours),
        "ratio_of_medians": statistics.median(theirs) / statistics.median(ours),
        "steps_per_second": {"paceline": 1 / min(ours), against: 1 / min(theirs)},
        "rounds": result.seconds,
    }
    if json:
        _print_json(facts)
        return
    table = Table("", "best round", "median round", title=f"{model}, {workers} workers, batch {task.batch} each")
    for name in ("paceline", against):
        times = result.seconds[name]
        table.add_row(name, f"{min(times) * 1e3:.3g} ms/step", f"{statistics.median(times) * 1e3:.3g} ms/step")
    Console().print(table)
    print(f"{chosen} makes {facts['ratio']:.2f} times as many steps per second as {against}")


def _task(
    model: str,
    contestants: list[str],
    workers: int,
    batch: int | None,
    optimizer: str,
    precision: str,
    rounds: int,
    seconds: float,
) -> Task:
    for name, value in (("--workers", workers), ("--rounds", rounds), ("--batch", batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}; it must be above 0")
    return Task(
        model=model,
        contestants=contestants,
        batch=batch or workload(model).batch,
        optimizer=one_of("--optimizer", optimizer, OPTIMIZERS),
        precision=one_of("--precision", precision, PRECISIONS),
        rounds=rounds,
        seconds=seconds,
        output="",
    )


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
