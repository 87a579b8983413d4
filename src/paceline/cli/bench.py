"""`paceline bench`: compares strategies, memory and collectives with their peers on this machine."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from paceline.bench.figures import draw_collectives, draw_scaling
from paceline.bench.harness import measure, measure_collectives, measure_memory
from paceline.bench.tasks import (
    MODELS,
    OPERATIONS,
    OPTIMIZERS,
    PEERS,
    PRECISIONS,
    RIVALS,
    TOPOLOGIES,
    CollectiveTask,
    CollectiveTimes,
    MemoryTask,
    TrainTask,
)
from paceline.cli import panels
from paceline.cli.panels import PanelCommand
from paceline.cli.status import StatusLine
from paceline.config import one_of, parse_strategy
from paceline.config.units import duration
from paceline.errors import UsageError

app = typer.Typer(
    help="Measure this machine: ratios of contestants that take turns in one run.\n\n"
    "Example: `paceline bench train --model mlp25m --workers 2 --against ddp`",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Option(help=f"The model to train: {', '.join(MODELS)}.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of a table.", rich_help_panel=panels.OUTPUT)
]
Rounds = Annotated[
    int, typer.Option(help="Number of rounds in which the contestants take turns.", rich_help_panel=panels.MEASUREMENT)
]
Optimizer = Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")]


@app.command(cls=PanelCommand)
def train(
    model: Model = "small",
    workers: Annotated[int, typer.Option("--workers", "-w", help="Number of workers.")] = 2,
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="The strategy of the team.")] = "all-reduce",
    against: Annotated[
        str, typer.Option(help="ddp (DistributedDataParallel on gloo) or alone (processes that never talk).")
    ] = "ddp",
    batch: Annotated[int | None, typer.Option(help="Samples per worker and step.")] = None,
    optimizer: Optimizer = "sgd",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (autocast).")] = "fp32",
    loader: Annotated[
        bool, typer.Option("--loader", help="Take every batch from a shuffling DataLoader, on both sides.")
    ] = False,
    rounds: Rounds = 9,
    seconds: Annotated[
        float, typer.Option(help="Approximate seconds of each turn.", rich_help_panel=panels.MEASUREMENT)
    ] = 1.0,
    json: Json = False,
) -> None:
    """Train a model with a team and with a peer, in turns, and print the ratio of their speeds.

    Example: `paceline bench train --model mlp25m --workers 2 --against ddp`
    """
    one_of("--against", against, PEERS)
    task = _train_task(model, ["paceline", against], workers, batch, optimizer, precision, rounds, seconds)
    task = msgspec.structs.replace(task, loader=loader)
    chosen = str(parse_strategy(strategy))
    with StatusLine(f"measuring {model}, {workers} workers") as status:
        result = measure(task, workers, chosen, status.detail)
    ours, theirs = result["paceline"], result[against]
    facts: dict[str, Any] = {
        "model": model,
        "workers": workers,
        "strategy": chosen,
        "against": against,
        "batch": task.batch,
        "optimizer": optimizer,
        "precision": precision,
        "loader": loader,
        "ratio": min(theirs) / min(ours),
        "ratio_of_medians": statistics.median(theirs) / statistics.median(ours),
        "steps_per_second": {"paceline": 1 / min(ours), against: 1 / min(theirs)},
        "rounds": result,
    }
    table = Table("", "best round", "median round", title=f"{model}, {workers} workers, batch {task.batch} each")
    for name in ("paceline", against):
        times = result[name]
        table.add_row(name, f"{duration(min(times))}/step", f"{duration(statistics.median(times))}/step")
    closing = f"{chosen} makes {facts['ratio']:.2f} times as many steps per second as {against}"
    _print(facts, json, table, closing)


@app.command(cls=PanelCommand)
def scaling(
    model: Model = "mlp25m",
    workers: Annotated[str, typer.Option("--workers", "-w", help="Numbers of workers, as 1,2,4.")] = "1,2",
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="The strategy of the team.")] = "all-reduce",
    batch: Annotated[str | None, typer.Option(help="Samples per worker and step, as 8,16,32.")] = None,
    precision: Annotated[str, typer.Option(help="Of fp32, bf16, fp16, as fp32,bf16.")] = "fp32",
    optimizer: Optimizer = "sgd",
    rounds: Rounds = 9,
    seconds: Annotated[
        float, typer.Option(help="Approximate seconds of each turn.", rich_help_panel=panels.MEASUREMENT)
    ] = 1.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curves into this HTML file.", rich_help_panel=panels.OUTPUT)
    ] = None,
    json: Json = False,
) -> None:
    """Print scaling efficiency: the time of an iteration of plain torch over that in a team, at the same batch.

    `at once`, which is plotted, is as many plain processes as there are workers, so that memory and caches are shared
    as in the team; `single` is one that has the machine to itself; `same allocator` is as many at once with
    Paceline's way of keeping freed memory.

    Example: `paceline bench scaling --model mlp25m --workers 1,2,4 --batch 8,32 --plot scaling.html`
    """
    chosen = str(parse_strategy(strategy))
    if plot is not None and plot.suffix != ".html":
        raise UsageError(f"--plot is '{plot}'; it must end in .html")
    points: list[dict[str, Any]] = []
    for precise in precision.split(","):
        for size in _numbers("--batch", batch) if batch else [_usual(model)]:
            for count in _numbers("--workers", workers):
                contestants = ["paceline", "single", "alone", "alone-keeping"]
                task = _train_task(model, contestants, count, size, optimizer, precise, rounds, seconds)
                with StatusLine(f"measuring {model}, {count} workers, batch {size}, {precise}") as status:
                    measured = measure(task, count, chosen, status.detail)
                best = {name: min(times) for name, times in measured.items()}
                points.append(
                    {
                        "workers": count,
                        "batch": size,
                        "precision": precise,
                        "efficiency": best["alone"] / best["paceline"],
                        "efficiency_single": best["single"] / best["paceline"],
                        "efficiency_same_allocator": best["alone-keeping"] / best["paceline"],
                        "throughput": count * size / best["paceline"],
                        "speedup": count * best["single"] / best["paceline"],
                    }
                )
    facts = {"model": model, "strategy": chosen, "optimizer": optimizer, "points": points}
    if plot is not None:
        draw_scaling(facts, plot)
    heads = ("", "batch", "workers", "at once", "single", "same alloc.", "speedup", "samples/s")
    table = Table(*heads, title=f"Scaling efficiency of {model} under {chosen}")
    for point in points:
        table.add_row(
            point["precision"],
            str(point["batch"]),
            str(point["workers"]),
            *(f"{point[key]:.2f}" for key in ("efficiency", "efficiency_single", "efficiency_same_allocator")),
            f"{point['speedup']:.2f}",
            f"{point['throughput']:,.0f}",
        )
    _print(facts, json, table, f"figure: {plot}" if plot else None)


@app.command(cls=PanelCommand)
def memory(
    model: Model = "mlp25m",
    workers: Annotated[int, typer.Option("--workers", "-w", help="Number of workers.")] = 2,
    optimizer: Optimizer = "momentum",
    json: Json = False,
) -> None:
    """Compare the memory of a team with that of DDP: proportional set size, summed over the workers.

    Example: `paceline bench memory --model mlp25m --workers 4 --optimizer adamw`
    """
    if workers < 2:
        raise UsageError(f"--workers is {workers}; it must be at least 2")
    one_of("--optimizer", optimizer, OPTIMIZERS)
    one_of("--model", model, MODELS)
    taken = {}
    for name in ("paceline", "ddp"):
        with StatusLine(f"measuring the memory of {name}, {workers} workers"):
            taken[name] = measure_memory(MemoryTask(model=model, contestant=name, optimizer=optimizer), workers)
    ours, theirs = taken["paceline"], taken["ddp"]
    facts = {
        "model": model,
        "workers": workers,
        "optimizer": optimizer,
        "ratio": ours.parameters_and_state / theirs.parameters_and_state,
        "ratio_everything": ours.everything / theirs.everything,
        "bytes": {name: msgspec.to_builtins(result) for name, result in taken.items()},
    }
    table = Table(
        "", "parameters and optimizer state", "gradients and buffers too", title=f"{model}, {workers} workers"
    )
    for name, result in taken.items():
        table.add_row(name, f"{result.parameters_and_state / 1e6:,.0f} MB", f"{result.everything / 1e6:,.0f} MB")
    closing = f"{facts['ratio']:.2f} times DDP's parameters and state, {facts['ratio_everything']:.2f} times its whole"
    _print(facts, json, table, closing)


@app.command("collectives", cls=PanelCommand)
def collectives_(
    workers: Annotated[int, typer.Option("--workers", "-w", help="Number of workers.")] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes of the tensors, as 1K,1M,25M.")] = "1K,100K,1M,25M,100M",
    operation: Annotated[str, typer.Option(help=f"One of {', '.join(OPERATIONS)}.")] = "all_reduce",
    against: Annotated[str, typer.Option(help="gloo, mpi (OpenMPI, all_reduce only) or none.")] = "gloo",
    topology: Annotated[str, typer.Option(help=f"Of paceline.collectives: {', '.join(TOPOLOGIES)}.")] = "auto",
    rounds: Rounds = 5,
    seconds: Annotated[
        float, typer.Option(help="Approximate seconds of each turn.", rich_help_panel=panels.MEASUREMENT)
    ] = 0.2,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curves into this HTML file.", rich_help_panel=panels.OUTPUT)
    ] = None,
    json: Json = False,
) -> None:
    """Time a collective through torch.distributed, through paceline.collectives, and with a peer, in turns.

    `torch` is torch.distributed on ordinary tensors, `in place` the same on tensors that lie in shared memory
    (paceline.collectives.empty), `collectives` is paceline.collectives on ordinary tensors.

    `algorithm` is the bytes of the tensor over the time, `bus` the bytes that had to cross each worker's link. `memory`
    is the share of this machine's memory bandwidth: the time in which all workers at once copy as many bytes.

    Example: `paceline bench collectives --workers 2 --sizes 1K,1M,25M --against gloo --plot collectives.html`
    """
    one_of("--against", against, RIVALS)
    one_of("--operation", operation, OPERATIONS)
    one_of("--topology", topology, TOPOLOGIES)
    if against == "mpi" and operation != "all_reduce":
        raise UsageError(f"--against mpi measures all_reduce; --operation is {operation}")
    for name, value, least in (("--workers", workers, 2), ("--rounds", rounds, 1)):
        if value < least:
            raise UsageError(f"{name} is {value}; it must be at least {least}")
    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}; it must be above 0")
    if plot is not None and plot.suffix != ".html":
        raise UsageError(f"--plot is '{plot}'; it must end in .html")
    contestants = ["torch", "in place", "collectives", "copy"]
    contestants += [against] if against != "none" else []
    task = CollectiveTask(
        operation=operation,
        sizes=_sizes(sizes),
        contestants=contestants,
        topology=topology,
        rounds=rounds,
        seconds=seconds,
    )
    with StatusLine(f"measuring {operation}, {workers} workers") as status:
        times = measure_collectives(task, workers, status.detail)
    facts = _collective_facts(task, workers, against, times)
    if plot is not None:
        draw_collectives(facts, plot)
    title = f"{operation} on {workers} workers"
    table = Table("bytes", "", "time", "algorithm", "bus", "memory", f"times {against}", title=title)
    for point in facts["points"]:
        for name, seen in point["contestants"].items():
            ratio = f"{seen['ratio']:.1f}" if "ratio" in seen else ""
            table.add_row(
                _spoken_size(point["bytes"]),
                name,
                f"{seen['seconds'] * 1e6:,.1f} µs",
                f"{seen['algorithm'] / 1e9:.2f} GB/s",
                f"{seen['bus'] / 1e9:.2f} GB/s",
                f"{seen['memory']:.0%}",
                ratio,
            )
        table.add_section()
    _print(facts, json, table, f"figure: {plot}" if plot else None)


def _collective_facts(task: CollectiveTask, workers: int, against: str, times: CollectiveTimes) -> dict[str, Any]:
    points = []
    for size in task.sizes:
        best = {name: min(times[name][str(size)]) for name in task.contestants}
        copy = best.pop("copy")
        seen: dict[str, dict[str, float]] = {}
        for name, seconds in best.items():
            rate = size / seconds
            seen[name] = {
                "seconds": seconds,
                "algorithm": rate,
                "bus": rate * OPERATIONS[task.operation](workers),
                "memory": copy / seconds,
            }
            if against not in ("none", name):
                seen[name]["ratio"] = best[against] / seconds
        points.append({"bytes": size, "contestants": seen})
    return {
        "operation": task.operation,
        "workers": workers,
        "topology": task.topology,
        "against": against,
        "points": points,
        "rounds": times,
    }


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.upper().split(","):
        number, unit = part.rstrip("KMG"), part[len(part.rstrip("KMG")) :]
        if not number.isdecimal() or int(number) < 1 or unit not in _UNITS:
            raise UsageError(f"--sizes is '{text}'; it must be numbers of bytes with K, M or G, as 1K,100K,25M")
        sizes.append(int(number) * _UNITS[unit])
    return sizes


def _spoken_size(size: int) -> str:
    for unit in ("G", "M", "K"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def _numbers(name: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UsageError(f"{name} is '{text}'; it must be whole numbers of at least 1, as 1,2,4")
    return [int(part) for part in parts]


def _train_task(
    model: str,
    contestants: list[str],
    workers: int,
    batch: int | None,
    optimizer: str,
    precision: str,
    rounds: int,
    seconds: float,
) -> TrainTask:
    for name, value in (("--workers", workers), ("--rounds", rounds), ("--batch", batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}; it must be above 0")
    return TrainTask(
        model=model,
        contestants=contestants,
        batch=batch or _usual(model),
        optimizer=one_of("--optimizer", optimizer, OPTIMIZERS),
        precision=one_of("--precision", precision, PRECISIONS),
        rounds=rounds,
        seconds=seconds,
    )


def _print(facts: dict[str, Any], json: bool, table: Table, closing: str | None) -> None:
    if json:
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
        return
    Console().print(table)
    if closing is not None:
        print(closing)


def _usual(model: str) -> int:
    """A model's default batch size."""
    return MODELS[one_of("--model", model, MODELS)]
