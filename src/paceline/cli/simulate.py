"""`paceline simulate`: predicts the speed and staleness of strategies without training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import panels, quantities
from paceline.cli.clusters import with_links, with_trouble
from paceline.cli.traces import given_runs
from paceline.cli.what_if import what_if
from paceline.config.distributions import parse_distribution
from paceline.errors import UsageError, names
from paceline.report.page import write_report
from paceline.report.source import open_run
from paceline.simulate.calibrate import Calibration, calibrate
from paceline.simulate.cluster import Cores, SimulatedCluster
from paceline.simulate.convergence import Convergence, fit_runs
from paceline.simulate.predict import predict, simulate
from paceline.simulate.replica import Model

_DRAWN = 200
"""Updates in a drawn timeline."""
_NAMED = 8
"""Workers whose gradients are never used that are named; of others there is the number."""
_WIDTH = 110
"""Characters that a table needs beside the strategies' names; a narrower terminal wraps its lines."""


def simulate_command(
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="A policy of the parameter server, 'all-reduce:topology=ring', 'pipeline:stages=4,microbatches=8', "
            "'tensor:degree=2' or 'mesh:data=2,pipeline=2,sync=async'. Repeatable. [default: sync]",
            rich_help_panel=panels.STRATEGY,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", help="Number of workers. [default: 4, or as in --from]", rich_help_panel=panels.WORKERS
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            help="Seconds of a minibatch: 0.1, 'exp(1)', '1+exp(1)', 'pareto(1,2.5)', 'gamma(2,0.5)', "
            "'lognormal(1,0.3)'. [default: 1+exp(1), or as in --from]",
            rich_help_panel=panels.WORKERS,
        ),
    ] = None,
    learn: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Take all of these from a recorded run, or from traces of other programs, one per rank. Repeatable, "
            "to fit the convergence as well.",
            rich_help_panel=panels.WORKERS,
        ),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(
            help="For traces in Chrome's format: which slices are what (JSON).", rich_help_panel=panels.WORKERS
        ),
    ] = None,
    asked: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGE",
            help="Replay the run of --from as it was but for one thing: 'like=5' (worker 5 like the others), "
            "'speed=5:2' (twice as fast), 'no-stalls', 'link=2' (links twice as fast); several separated by commas. "
            "Repeatable.",
            rich_help_panel=panels.STRATEGY,
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK:FACTOR",
            help="Make a worker persistently slower: 3:4. Repeatable.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    spells: Annotated[
        str | None,
        typer.Option(
            metavar="FACTOR,EVERY,LASTING", help="Transient slowness: '4,60s,5s'.", rich_help_panel=panels.FAULTS
        ),
    ] = None,
    failures: Annotated[
        str | None,
        typer.Option(
            metavar="EVERY,RESTART",
            help="Mean time between failures of a worker, and time until it is back: '1h,30s'.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Bytes of a gradient: 100MB.", rich_help_panel=panels.WORKERS)
    ] = None,
    compress: Annotated[
        str | None, typer.Option(help="How gradients are pushed: bf16, int8, topk:0.01.", rich_help_panel=panels.LINKS)
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Latency of every link, one way: 50us.", rich_help_panel=panels.LINKS)
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth of every link, each way: 1Gbit/s.", rich_help_panel=panels.LINKS)
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK:LATENCY,BANDWIDTH",
            help="One worker's own link: '2:10ms,10Mbit/s'. Repeatable.",
            rich_help_panel=panels.LINKS,
        ),
    ] = None,
    per_machine: Annotated[
        int | None,
        typer.Option(
            help="Workers that share a machine, its link and its cores. [default: 1, or as in --from]",
            rich_help_panel=panels.WORKERS,
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            help="Cores of a machine, for all its workers. [default: always enough, or as in --from]",
            rich_help_panel=panels.WORKERS,
        ),
    ] = None,
    servers: Annotated[
        str,
        typer.Option(
            help="Machines that hold the parameters: a number, 'lead' (rank 0's) or 'all'.",
            rich_help_panel=panels.SERVER,
        ),
    ] = "1",
    server_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth of a server's link. [default: as a worker's]", rich_help_panel=panels.SERVER),
    ] = None,
    push_seconds: Annotated[
        str | None, typer.Option(help="A server's time to receive a gradient: 100us.", rich_help_panel=panels.SERVER)
    ] = None,
    update_seconds: Annotated[
        str | None, typer.Option(help="A server's time for an update: 1ms.", rich_help_panel=panels.SERVER)
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(
            help="Share of a step, at its end, during which its gradient is already being sent.",
            rich_help_panel=panels.LINKS,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples in a minibatch. [default: 1, or as in --from]", rich_help_panel=panels.WORKERS),
    ] = None,
    layers: Annotated[
        int, typer.Option(help="Layers of a model that 'tensor' splits.", rich_help_panel=panels.MODEL)
    ] = 1,
    activations: Annotated[
        str, typer.Option(help="Bytes of a minibatch's activations between two layers.", rich_help_panel=panels.MODEL)
    ] = "0",
    goal: Annotated[
        float | None,
        typer.Option(
            help="Also predict when this loss is reached, by the convergence of --from.",
            rich_help_panel=panels.STRATEGY,
        ),
    ] = None,
    updates: Annotated[
        int, typer.Option(help="Number of updates to simulate.", rich_help_panel=panels.STRATEGY)
    ] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.", rich_help_panel=panels.STRATEGY)] = 0,
    theory: Annotated[
        bool, typer.Option("--theory", help="Also print the values of the closed forms.", rich_help_panel=panels.OUTPUT)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the timelines, marked as predicted, into this folder.", rich_help_panel=panels.OUTPUT
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object (a list for several strategies).", rich_help_panel=panels.OUTPUT
        ),
    ] = False,
) -> None:
    """Simulate strategies on workers, links and servers as described, with the same policies that the server runs.

    Example: `paceline simulate --strategy k-sync:k=4 --workers 8 --compute 'exp(1)' --updates 20000 --seed 1 --json`

    From a real run, for twice as many workers:
    `paceline simulate --from runs/first --workers 8 -s sync -s k-sync:k=6 -s async`

    The same run with one thing changed: `paceline simulate --from runs/first --what-if like=3 --what-if no-stalls`
    """
    if asked:
        if strategy or workers is not None:
            raise UsageError("--what-if replays the run as it was, so it takes no --strategy and no --workers")
        what_if(learn or [], asked, mapping, json=json)
        return
    known = [calibrate(run.path) for run in given_runs(learn or [], mapping)]
    base = known[0].for_workers(workers) if known else SimulatedCluster(workers=4 if workers is None else workers)
    if per_machine is None and (latency is not None or bandwidth is not None):
        per_machine = 1  # each worker has its own link
    if per_machine is None and cores is not None:
        per_machine = base.workers
    changes: dict[str, Any] = {
        "cores": None if cores is None else dataclasses.replace(base.cores or Cores(cores), count=cores),
        "batch": batch,
        "compress": compress,
        "overlap": overlap,
        "per_machine": per_machine,
        "servers": servers,
        "size": None if size is None else quantities.size("--size", size),
        "push_seconds": None if push_seconds is None else quantities.seconds("--push-seconds", push_seconds),
        "update_seconds": None if update_seconds is None else quantities.seconds("--update-seconds", update_seconds),
    }
    if compute is not None:
        changes |= {"compute": parse_distribution(compute), "factors": (), "own": ()}
    cluster = dataclasses.replace(base, **{name: value for name, value in changes.items() if value is not None})
    cluster = with_links(cluster, latency, bandwidth, link or [], server_bandwidth)
    cluster = with_trouble(cluster, slow or [], spells, failures)
    forward = known[0].forward if known else None
    model = Model(
        layers=layers, activations=quantities.size("--activations", activations), forward=forward or Model().forward
    )
    convergence = _convergence(known, goal)

    answers: list[dict[str, Any]] = []
    for spec in strategy or ["sync"]:
        told, _ = simulate(spec, cluster, updates=updates, seed=seed, model=model, loss=_followed(spec, convergence))
        answer = msgspec.to_builtins(told, str_keys=True)
        if theory:
            answer["theory"] = msgspec.to_builtins(predict(spec, cluster, model))
        if known:
            answer["learned"] = msgspec.to_builtins(known[0].summary, str_keys=True)
        if convergence is not None and goal is not None:
            answer["goal"] = msgspec.to_builtins(convergence.reach(goal, told))
        answers.append(answer)
    if json:
        print(msgspec.json.format(msgspec.json.encode(answers[0] if len(answers) == 1 else answers), indent=2).decode())
    else:
        _print(known, answers, theory)
    if out is not None:
        _draw(out, strategy or ["sync"], cluster, model, updates, seed)


def _followed(spec: str, convergence: Convergence | None) -> Callable[[int, int], float] | None:
    """The loss that `adaptive` follows, by the fitted convergence."""
    if convergence is None or not spec.startswith("adaptive"):
        return None
    return lambda version, k: float(convergence.loss(np.array([float(version)]), float(k), 0.0)[0])


def _draw(out: Path, specs: list[str], cluster: SimulatedCluster, model: Model, updates: int, seed: int) -> None:
    """Write the timelines as runs, and a report of them."""
    facts = []
    for spec in specs:
        folder = out / "".join("-" if character in ":,=" else character for character in spec)
        _, trace = simulate(spec, cluster, updates=min(updates, _DRAWN), seed=seed, model=model, trace=True)
        assert trace is not None
        trace.write(folder, {"seed": seed, "compute": str(cluster.compute)})
        facts.append(open_run(folder).facts(name=spec))
    write_report(out / "report.html", "Predicted by simulation", facts)
    Console(stderr=True).print(f"report: {os.path.relpath(out / 'report.html')}")


def _convergence(known: list[Calibration], goal: float | None) -> Convergence | None:
    if goal is None:
        return None
    if not known:
        raise UsageError("--goal needs --from RUN: how fast the loss falls is learned from runs")
    return fit_runs(known)


def _print(known: list[Calibration], answers: list[dict[str, Any]], theory: bool) -> None:
    console = Console()
    console.width = max(console.width, _WIDTH + max(len(answer["strategy"]) for answer in answers))
    if known:
        console.print(known[0].description, highlight=False)
    table = Table(box=None)
    table.add_column("strategy", no_wrap=True)
    for head, _ in _cells(answers[0], theory):
        table.add_column(head, justify="right", no_wrap=True)
    for answer in answers:
        table.add_row(answer["strategy"], *(cell for _, cell in _cells(answer, theory)))
    console.print(table)
    for answer in answers:
        if answer["verdict"]:
            console.print(f"{answer['strategy']}: {answer['verdict']}")
        if answer["starved"]:
            more = len(answer["starved"]) - _NAMED
            who = names(answer["starved"][:_NAMED]) + (f" and {more} more" if more > 0 else "")
            console.print(f"{answer['strategy']}: no gradient of {who} is ever used")


def _cells(answer: dict[str, Any], theory: bool) -> list[tuple[str, str]]:
    """The cells of a strategy's row, each with the head of its column."""
    formula, waiting, goal = answer.get("theory") or {}, answer["waiting"], answer.get("goal")
    cells = [("s per update", f"{answer['seconds_per_update']:.4g}")]
    cells += [("±", f"{1.96 * (answer['standard_error'] or 0):.2g}")]
    cells += [("by formula", _number(formula.get("seconds_per_update")))] if theory else []
    cells += [("samples/s", f"{answer['samples_per_second']:.4g}")]
    cells += [("staleness", f"{answer['staleness']['mean']:.3f}")]
    cells += [("by formula", _number(formula.get("staleness")))] if theory else []
    cells += [("waiting", f"{max(0.0, sum(waiting) / len(waiting)) if waiting else 0.0:.1%}")]
    cells += [("cancelled", f"{answer['cancelled']:,}")]
    if goal is not None:
        cells += [("s to goal", _number(goal["seconds"]))]
        cells += [("95 % within", f"{_number(goal['low'])} – {_number(goal['high'])}")]
    return cells


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
