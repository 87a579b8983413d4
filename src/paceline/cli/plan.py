"""`paceline plan`: ranks strategies for a script and a goal."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import panels, quantities
from paceline.cli.clusters import with_links
from paceline.cli.status import StatusLine
from paceline.config import Mesh, Pipeline, name_and_options, parse_strategy, search_beside, strategy_class
from paceline.config.units import duration
from paceline.errors import UsageError
from paceline.planner.candidates import asked_for
from paceline.planner.choose import Choice, rank, simplest
from paceline.planner.profile import profile
from paceline.schedules import SCHEDULES
from paceline.simulate.calibrate import Calibration, calibrate
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.convergence import Convergence, fit_runs, observed
from paceline.simulate.replica import Model

if TYPE_CHECKING:
    from paceline.planner.learn import SplitKnowledge

_SHOWN = 12
"""Rows of the table."""
_NEAR = 0.03
"""Distance of the goal from the lowest loss, as a share of the whole fall of the loss."""


def plan(
    script: Annotated[
        Path | None, typer.Argument(help="The training script, to profile it for some seconds.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for the script, after --.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", help="Number of workers. [default: 2, or as in --from]", rich_help_panel=panels.WORKERS
        ),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            help="'loss' (close to the lowest that was observed), a loss such as 'loss=0.3', or 'throughput'. "
            "[default: loss where the script reports one, else throughput]",
            rich_help_panel=panels.GOAL,
        ),
    ] = "",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Limit of parameters, gradients and versions together: 2GB. With --partition, of each device: "
            "2GB,1:1GB if one has less.",
            rich_help_panel=panels.GOAL,
        ),
    ] = None,
    learn: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Learn from recorded runs, instead of a profile. Repeatable.",
            rich_help_panel=panels.PROFILE,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of each of the two profile runs.", rich_help_panel=panels.PROFILE)
    ] = 15.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHO:HOW", help="As in paceline run, for the profile. Repeatable.", rich_help_panel=panels.PROFILE
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Plan for links with this latency, one way: 50us.", rich_help_panel=panels.LINKS)
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Plan for links of this bandwidth: 1Gbit/s. With --partition 1Gbit/s,2:1Mbit/s if one is slower.",
            rich_help_panel=panels.LINKS,
        ),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --partition: the links between the stages' machines, as written by paceline doctor --json.",
            rich_help_panel=panels.LINKS,
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="Also rank this strategy, for instance your own as module:Class or module:Class:option=value. "
            "Repeatable.",
            rich_help_panel=panels.GOAL,
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split", help="Also rank strategies that split the model over devices.", rich_help_panel=panels.MODEL
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(
            help="With --split: layers that a tensor split has to agree on. [default: by the script's model]",
            rich_help_panel=panels.MODEL,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help="With --split: bytes of activations between two layers. [default: by the script's model]",
            rich_help_panel=panels.MODEL,
        ),
    ] = None,
    partition: Annotated[
        bool,
        typer.Option(
            "--partition",
            help="Only find the best cut of the script's model into stages.",
            rich_help_panel=panels.PARTITION,
        ),
    ] = False,
    stages: Annotated[
        int,
        typer.Option(help="Number of stages, or of devices with --replicate.", rich_help_panel=panels.PARTITION),
    ] = 2,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a batch.", rich_help_panel=panels.PARTITION)] = 8,
    schedule: Annotated[
        str, typer.Option(help=f"One of {', '.join(SCHEDULES)}.", rich_help_panel=panels.PARTITION)
    ] = "1f1b",
    pace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE:PACE",
            help="A device's pace; 1:0.5 is half as fast. Repeatable.",
            rich_help_panel=panels.PARTITION,
        ),
    ] = None,
    replicate: Annotated[
        bool,
        typer.Option("--replicate", help="Several devices may share a stage.", rich_help_panel=panels.PARTITION),
    ] = False,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="The optimizer's state is on disk, not in memory, as with offload=disk over machines.",
            rich_help_panel=panels.PARTITION,
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw it into this SVG file.", rich_help_panel=panels.PARTITION),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the simulation, and of random slowness.", rich_help_panel=panels.PROFILE)
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=panels.OUTPUT)] = False,
) -> None:
    """Rank all strategies for a script and a goal, by simulation from a short profile, and print the line to run.

    Example: `paceline plan train.py --workers 4 --goal loss=0.3 -- --epochs 2`

    From runs that there are already: `paceline plan --from runs/first --from runs/second --goal throughput`

    Where to cut a model: `paceline plan --partition train.py --stages 4 --pace 1:0.5 --figure cut.svg`
    """
    if partition:
        if script is None:
            raise UsageError("--partition needs the training script, to see its model")
        from paceline.cli.partition import PartitionOptions, show_partition  # only here: it loads torch

        options = PartitionOptions(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            paces=pace or [],
            memory=memory,
            latency=latency,
            bandwidth=bandwidth,
            links=links,
            replicate=replicate,
            offload=offload,
            figure=figure,
            json=json,
        )
        show_partition(script, arguments or [], options)
        return
    if links is not None:
        raise UsageError("--links is for --partition; without it give --latency and --bandwidth")
    if (script is None) == (not learn):
        raise UsageError("give either a script to profile, or recorded runs with --from RUN")
    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}; it must be above 0")
    _check_strategies(strategy or [], script)
    limit = None if memory is None else quantities.size("--memory", memory)
    wanted = _goal(goal)
    with_links(SimulatedCluster(workers=1), latency, bandwidth, [], None)  # before a profile, which takes its time
    _with_options(Model(), layers, activations)
    if learn:
        known = [calibrate(path) for path in learn]
    else:
        assert script is not None
        known = _profile(script, arguments or [], 2 if workers is None else workers, slow or [], seconds, seed)
    convergence, target = _target(known, wanted)
    cluster = with_links(known[0].for_workers(workers), latency, bandwidth, [], None)
    if latency is not None or bandwidth is not None:
        cluster = dataclasses.replace(cluster, per_machine=1)
    model, cuts, split = _split(script if split else None, arguments or [], cluster.workers, split)
    model = _with_options(model, layers, activations)
    with StatusLine("simulating all strategies") as status:
        choices = rank(
            cluster,
            convergence=convergence,
            goal=target,
            memory=limit,
            model=model,
            split=split,
            seed=seed,
            also=[one for spec in strategy or [] for one in asked_for(spec, cluster.workers)],
            tick=lambda done, every: status.show(f"simulating {done} of {every} strategies"),
        )
    for choice in choices:
        if (cut := cuts.get(_stages(choice.strategy))) is not None:
            choice.reason = ", ".join(filter(None, [choice.reason, cut.spoken]))
    best = simplest(choices)
    if best is None:
        raise UsageError(f"no strategy reaches a loss of {target:g}, by the convergence of the runs; give a higher one")
    line = _line(best, script, arguments or [], cluster.workers)
    if json:
        told = {
            "goal": "throughput" if target is None else "loss",
            "loss": target,
            "strategy": best.strategy,
            "servers": best.servers,
            "balance": best.balance,
            "run": line,
            "learned": msgspec.to_builtins(known[0].summary, str_keys=True),
            "cuts": msgspec.to_builtins(cuts, str_keys=True),
            "choices": msgspec.to_builtins(choices),
        }
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
        return
    _print(known[0], convergence, choices, best, line, target)


def _check_strategies(specs: list[str], script: Path | None) -> None:
    """Refuses unknown strategies before the profile."""
    if script is not None:
        search_beside(script)
    for spec in specs:
        strategy_class(name_and_options(spec)[0])


def _goal(text: str) -> float | str:
    """`throughput`, `loss`, a loss, or nothing."""
    if text in ("", "loss", "throughput"):
        return text
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if name != "loss" or not math.isfinite(number):
        raise UsageError(f"--goal is '{text}'; it must be 'throughput', 'loss' or 'loss=NUMBER'")
    return number


def _profile(
    script: Path, arguments: list[str], workers: int, slow: list[str], seconds: float, seed: int
) -> list[Calibration]:
    if not script.is_file():
        raise UsageError(f"there is no script at {script}")
    if workers < 1:
        raise UsageError(f"--workers is {workers}; it must be at least 1")
    options = [word for spec in slow for word in ("--slow", spec)] + ["--seed", str(seed)]
    with (
        tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder,
        StatusLine("starting the script, to profile it") as status,
    ):
        runs = profile(
            script,
            arguments,
            workers,
            options,
            seconds,
            Path(folder),
            lambda what, share: status.show(f"profiling under {what}: {share:.0%}"),
        )
        return [calibrate(run) for run in runs]


def _split(
    script: Path | None, arguments: list[str], workers: int, split: bool
) -> tuple[Model, Mapping[int, SplitKnowledge], bool]:
    """The script's model, its best cuts by number of stages, and True if it can be split."""
    if script is None:
        return Model(), {}, split
    from paceline.pipeline.script_profile import profile_script
    from paceline.planner.learn import MICROBATCHES, learn  # only here: it loads torch

    try:
        with StatusLine("tracing the model and measuring its operations"):
            return *learn(profile_script(script, arguments, MICROBATCHES), workers), True
    except UsageError as error:
        print(f"paceline: models that are split are left out: {error}", file=sys.stderr)
        return Model(), {}, False


def _with_options(model: Model, layers: int | None, activations: str | None) -> Model:
    """The model with the values of the options that were given."""
    if layers is not None:
        model = dataclasses.replace(model, layers=layers)
    if activations is not None:
        model = dataclasses.replace(model, activations=quantities.size("--activations", activations))
    return model


def _stages(strategy: str) -> int:
    """Number of stages of a pipeline, or of one in a mesh; 1 for all other strategies."""
    match parse_strategy(strategy):
        case Pipeline(stages=stages) | Mesh(pipeline=stages):
            return stages
    return 1


def _target(known: list[Calibration], wanted: float | str) -> tuple[Convergence | None, float | None]:
    """The fitted convergence and the goal's loss; None for throughput."""
    if wanted == "throughput":
        return None, None
    seen = [found for run in known if (found := observed(run)) is not None]
    if not seen:
        if wanted == "":
            return None, None
        raise UsageError(
            "the goal is a loss, but the runs have recorded none; report it in the script with team.report(loss=…)"
        )
    lowest, highest = min(float(one.losses.min()) for one in seen), max(float(one.losses.max()) for one in seen)
    near = lowest + _NEAR * (highest - lowest)
    return fit_runs(known), near if isinstance(wanted, str) else wanted


def _line(best: Choice, script: Path | None, arguments: list[str], workers: int) -> str:
    words = ["paceline", "run", str(script or "SCRIPT"), "--workers", str(workers), "--strategy", best.strategy]
    if best.servers != "1":
        words += ["--servers", best.servers]
    if arguments:
        words += ["--", *arguments]
    return shlex.join(words) + ("   # with team.setup(…, balance=True)" if best.balance else "")


def _print(
    known: Calibration,
    convergence: Convergence | None,
    choices: list[Choice],
    best: Choice,
    line: str,
    target: float | None,
) -> None:
    console = Console()
    console.width = max(console.width, 140)
    console.print(known.description, highlight=False)
    if convergence is not None:
        console.print(convergence.description, highlight=False)
    what = "samples per second" if target is None else f"seconds to a loss of {target:.4g}"
    table = Table(title=f"by {what}", box=None)
    table.add_column("strategy", no_wrap=True)
    heads = ["× all-reduce", *([] if target is None else ["s to goal", "95 % within"])]
    for head in (*heads, "samples/s", "per update", "staleness"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("why")
    for choice in choices[:_SHOWN]:
        row = [choice.spoken, "–" if choice.gain is None else f"{choice.gain:.2f}"]
        if target is not None:
            row += [_number(choice.score), f"{_number(choice.low)} – {_number(choice.high)}"]
        row += [f"{choice.samples_per_second:.4g}", duration(choice.seconds_per_update), f"{choice.staleness:.2f}"]
        note = "" if choice.runnable else " (simulated only)"
        table.add_row(*row, choice.reason + note, style="bold" if choice is best else None)
    console.print(table)
    if len(choices) > _SHOWN:
        console.print(f"and {len(choices) - _SHOWN} more, with --json", style="dim")
    print(f"\n{line}", file=sys.stdout)


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"
