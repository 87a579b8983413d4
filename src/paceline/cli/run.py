"""`paceline run`: train a script on several workers, of this machine or of a cluster."""

from __future__ import annotations

import datetime
import os
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from paceline.cli.engines import RunEngine, prepare
from paceline.cli.live import LivePage
from paceline.cli.progress import Progress, shown
from paceline.cluster.engines.torchrun import become, started_by_torchrun
from paceline.cluster.supervision import ExitStatus, Interrupted, failures
from paceline.config import (
    Launch,
    Place,
    Strategy,
    Timeouts,
    capacity,
    check_workers,
    parse_compression,
    parse_correction,
    parse_servers,
    parse_slowness,
    parse_strategy,
)
from paceline.errors import UsageError, names
from paceline.events.summary import Summary, merge
from paceline.policies import POLICIES, make_policy


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS…]", help="Arguments for the script, after --.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers to start.")] = 2,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", "-s", help="How to train; wins over the script's. [default: all-reduce]"),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="N|lead|all",
            help="Where a parameter server holds the parameters: in so many processes, in the lead, or in all workers. "
            "[default: 1]",
        ),
    ] = None,
    correct: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOW",
            help="What to do about stale gradients: lr/staleness, drop:above=8, dc-asgd:lambda=0.04, dc-asgd-adaptive, "
            "distance:c=0.1. Repeatable.",
        ),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(help="What is pushed: none, bf16, fp16, int8, topk:0.01 (error feedback). [default: none]"),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on without a worker that is lost, under any strategy; all-reduce then re-forms from the last "
            "version. --restarts implies it.",
        ),
    ] = False,
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Start a killed worker again, at most so many times; with a parameter server it joins the run where "
            "that is, otherwise (on Ray) the team starts from its newest checkpoint. [default: 0; on Ray 1]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The run's folder under runs/. [default: the script's name and the time]"),
    ] = None,
    all_output: Annotated[
        bool, typer.Option("--all-output", help="Show every worker's output, not the lead's only.")
    ] = False,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHO:HOW",
            help="Make workers slow on purpose: 1:4 (rank 1 takes 4 times as long), 'all:exp(0.1)', "
            "'all:0.05+exp(0.05)', '2:pareto(0.02,2.5)' (seconds per step), 1:3@backward (a part of its step: loading, "
            "forward, backward, link). Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds the slowness that is drawn.")] = 0,
    on: Annotated[
        str,
        typer.Option(
            metavar="local|ray|ray://HOST:PORT",
            help="Where to start the workers: on this machine, or in a Ray cluster (RAY_ADDRESS, or this machine's).",
        ),
    ] = "local",
    place: Annotated[
        str, typer.Option(metavar="spread|pack", help="On Ray: over many nodes, or on as few as possible.")
    ] = "spread",
    each: Annotated[
        str | None, typer.Option(metavar="cpu=1,gpu=1", help="On Ray: what each worker takes. [default: cpu=1]")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="On Ray: an environment variable that travels. Repeatable."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a worker before giving up.")] = 300.0,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record events, for reports and the summary.")
    ] = True,
    live: Annotated[
        bool, typer.Option("--live", help="Serve a page that shows the run while it goes on; prints its address.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress line and no closing table.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object; the script's output goes to stderr.")
    ] = False,
) -> None:
    """Train a script on several workers, of this machine or of a Ray cluster.

    The script is an ordinary PyTorch script that calls `paceline.join()`; it sees RANK, WORLD_SIZE, MASTER_ADDR and so
    on as under torchrun. The run leaves `runs/NAME/` with its events, summary, output and checkpoints.

    Under torchrun (`torchrun … -m paceline run train.py --strategy …`) the script is run by the workers that it starts.

    Example: `paceline run train.py --workers 4 --slow 3:4 --name first -- --epochs 2`
    """
    torchrun = started_by_torchrun()
    workers = _workers_of_torchrun(context) if torchrun else workers
    if workers < 1:
        raise UsageError(f"--workers is {workers}; it must be at least 1")
    if not timeout > 0:
        raise UsageError(f"--timeout is {timeout:g}; it must be above 0 seconds")
    restarts = (0 if on == "local" else 1) if restarts is None else restarts
    if restarts < 0:
        raise UsageError(f"--restarts is {restarts}; it must be 0 or more")
    if not script.is_file():
        raise UsageError(f"there is no script at {script}")
    chosen = None if strategy is None else str(_check(strategy, workers))
    policy = chosen is not None and type(parse_strategy(chosen)) in POLICIES
    if restarts and on == "local" and chosen is not None and not policy:
        raise UsageError("--restarts needs a parameter server; under all-reduce the others go on with --elastic")
    for one in correct or []:
        parse_correction(one)
    parse_servers(servers or "1")
    parse_compression(compress or "none")
    slowness = parse_slowness(slow or [], workers, capacity(workers))
    launch = Launch(
        strategy=chosen,
        timeouts=Timeouts(barrier=timeout, join=max(timeout, Timeouts().join)),
        slow=slowness,
        seed=seed,
        record=record,
        servers=servers,
        corrections=correct or [],
        compress=compress,
        # On Ray a team without a server is started again as a whole.
        elastic=elastic or (restarts > 0 and (policy or on == "local")),
    )
    if torchrun:
        become(script, arguments or [], msgspec.structs.replace(launch, name=name and _check_name(name)))
    make_engine = prepare(
        on,
        script,
        arguments or [],
        workers,
        strategy=chosen,
        servers=servers,
        place=place,
        each=each,
        env=env or [],
        restarts=restarts,
    )
    folder = _make_folder(script, name)
    launch = msgspec.structs.replace(launch, folder=str(folder.resolve()))
    config: dict[str, Any] = {
        "script": str(script),
        "arguments": arguments or [],
        "workers": workers,
        "strategy": chosen,  # until the workers have said what the script wants
        "servers": servers,
        "correct": correct or [],
        "compress": compress,
        "elastic": elastic,
        "restarts": restarts,
        "slow": slow or [],
        "seed": seed,
        "cores": len(os.sched_getaffinity(0)),
        "timeout": timeout,
        "on": on,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    _write_config(folder, config)
    progress = Progress(folder, workers, all_output=all_output, quiet=quiet or json, apart=json)
    code, summary = _carry_out(make_engine(launch, progress), progress, LivePage(folder) if live else None, config)
    if json:
        _print_json(folder, summary, code)
    elif not quiet and code != 2:
        _close(folder, summary, code)
    raise typer.Exit(code)


def _carry_out(
    engine: RunEngine, progress: Progress, page: LivePage | None, config: dict[str, Any]
) -> tuple[int, Summary]:
    """Run it to its end, however that comes; the exit code, and what the run's folder then tells."""
    code, folder = 0, progress.folder
    try:
        if page is not None:
            page.start()
        with progress:
            endings = engine.run()
        code = _tell(endings, progress)
    except Interrupted as stop:
        progress.note(f"stopped by {signal.Signals(stop.number).name}; all workers have ended")
        code = 128 + stop.number
    finally:
        summary = merge(folder, config["workers"])
        _write_config(folder, {**config, "strategy": summary.strategy or config["strategy"]})
        if page is not None:
            page.stop()
    return code, summary


_TORCHRUNS = ("workers", "on", "place", "each", "env", "restarts", "live", "all_output", "quiet")
"""Options of ours about what torchrun does, if it is there."""


def _workers_of_torchrun(context: typer.Context) -> int:
    """How many it has started; refuses what it decides."""
    given = [name for name in _TORCHRUNS if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"{options}: torchrun has started this worker, and decides how many there are, where, what is shown of "
            "them and what is started again (--nproc-per-node, --max-restarts)"
        )
    return Place.from_environment().world_size


def _check(spec: str, workers: int) -> Strategy:
    """The strategy, if so many workers can follow it."""
    strategy = parse_strategy(spec)
    if type(strategy) in POLICIES:
        make_policy(strategy, range(workers))
    check_workers(strategy, workers)
    return strategy


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")


def _make_folder(script: Path, name: str | None) -> Path:
    """A new folder for the run. One of the same name is kept, under another."""
    if name is None:
        name = f"{script.stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder = Path("runs") / _check_name(name)
    if folder.exists():
        number = 1
        while (old := folder.with_name(f"{name}~{number}")).exists():
            number += 1
        folder.rename(old)
        print(f"paceline: the earlier {folder} is now {old}", file=sys.stderr)
    (folder / "output").mkdir(parents=True)
    return folder


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise UsageError(f"--name is '{name}'; it may have letters, digits and . _ + - only")
    return name


def _tell(endings: list[ExitStatus], progress: Progress) -> int:
    """Say once what went wrong, and decide the exit code."""
    # Who was started again, or came too late to join, is no loss.
    lost = [ending for ending in endings if ending.spared and not ending.replaced and ending.exit_report is None]
    failed = failures(endings)
    for ending in [one for one in lost if one not in failed]:
        progress.note(f"warning: {ending.spoken}; the others went on without it")
    if not failed:
        return 0
    # What failed of its own accord comes before what failed for want of it.
    causes = [e for e in failed if e.exit_report is None or not e.exit_report.consequence] or failed
    first = causes[0]
    if first.exit_report is None:
        progress.note(f"{first.spoken}{_where(first, progress)}")
    elif first.exit_report.usage:
        progress.note(first.exit_report.message)
        return 2
    elif first.exit_report.consequence:
        progress.note(f"{first.exit_report.kind}: {first.exit_report.message}")
    else:
        for line in first.exit_report.traceback.rstrip().splitlines():
            progress.relay(first.rank, "stderr", line.encode(), force=True)
        progress.note(f"rank {first.rank} failed: {first.exit_report.kind}: {first.exit_report.message}")
    alike = [
        e.rank
        for e in causes[1:]
        if e.exit_report
        and first.exit_report
        and (e.exit_report.kind, e.exit_report.message) == (first.exit_report.kind, first.exit_report.message)
    ]
    if alike:
        progress.note(f"{names(alike)} failed alike")
    others = [e for e in failed if e is not first and e.rank not in alike]
    for ending in others:
        if ending.exit_report is not None:
            progress.note(f"rank {ending.rank} stopped: {ending.exit_report.kind}: {ending.exit_report.message}")
    return 1


def _where(ending: ExitStatus, progress: Progress) -> str:
    return f"; its output is in {progress.output_of(ending.rank)}"


def _print_json(folder: Path, summary: Summary, code: int) -> None:
    told = {"folder": os.path.relpath(folder), "code": code, **msgspec.to_builtins(summary, str_keys=True)}
    print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())


def _close(folder: Path, summary: Summary, code: int) -> None:
    """The few numbers that one wants at once."""
    words = [f"{summary.updates} updates"]
    if summary.samples_per_second:
        words.append(f"{summary.samples_per_second:,.0f} samples/s")
    if summary.seconds_per_update:
        words.append(f"{summary.seconds_per_update * 1e3:.3g} ms per update")
    words += [f"{name} {shown(value)}" for name, value in summary.last.items()]
    state = "done" if code == 0 else "ended early"
    where = os.path.relpath(folder)
    print(
        f"paceline: {state}: {', '.join(words)}; see {where}/summary.json, or: paceline report {where}", file=sys.stderr
    )
