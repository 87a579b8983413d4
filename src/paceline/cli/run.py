"""`paceline run`: trains a script on several workers, of this machine or of a cluster."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from paceline.cli.engines import ON_HELP, ON_METAVAR, RESTARTS_DEFAULT, check_given, with_engine_options
from paceline.cli.folders import RunFolder, check_name
from paceline.cli.live import LivePage
from paceline.cli.progress import Progress, shown
from paceline.cluster.engines import detected_engine, find_engine
from paceline.cluster.engines.base import Engine, EngineCallbacks, Job
from paceline.cluster.supervision import ExitReport, ExitStatus, Interrupted, failures
from paceline.config import (
    Launch,
    Strategy,
    Timeouts,
    capacity,
    check_workers,
    parse_compression,
    parse_correction,
    parse_servers,
    parse_slowness,
    parse_strategy,
    search_beside,
)
from paceline.config.launch import LONGEST
from paceline.errors import UsageError, names
from paceline.events.private import write_private
from paceline.events.summary import Summariser, Summary, merge
from paceline.policies import Policy


@with_engine_options
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS…]", help="Arguments for the script, after --.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", help="Number of workers to start.")] = 2,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help="The strategy, as name:option=value,…, or your own policy as module:Class:option=value,…; replaces "
            "that of the script. [default: all-reduce]",
        ),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="N|lead|all",
            help="Processes that hold a parameter server's parameters: N of their own, the lead, or all workers. "
            "[default: 1]",
        ),
    ] = None,
    correct: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOW",
            help="Correction of stale gradients: lr/staleness, drop:above=8, dc-asgd:lambda=0.04, dc-asgd-adaptive, "
            "distance:c=0.1. Repeatable.",
        ),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            help="Compression of pushed gradients: none, bf16, fp16, int8, topk:0.01 (error feedback). [default: none]"
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on without a worker that is lost, under any strategy; all-reduce then continues from the last "
            "version with the workers that are left. --restarts implies it.",
        ),
    ] = False,
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Start killed workers again, at most N times. With a parameter server a worker joins the run again; "
            f"without one, in a cluster, the team starts from its newest checkpoint. [default: {RESTARTS_DEFAULT}]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The run's folder under runs/. [default: the script's name and the time]"),
    ] = None,
    all_output: Annotated[
        bool, typer.Option("--all-output", help="Show the output of all workers, not only of the lead.")
    ] = False,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHO:HOW",
            help="Slow workers down: 1:4 (rank 1 takes 4 times as long), 'all:exp(0.1)', "
            "'all:0.05+exp(0.05)', '2:pareto(0.02,2.5)' (seconds per step), 1:3@backward (a part of its step: loading, "
            "forward, backward, link). Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random slowness.")] = 0,
    on: Annotated[str, typer.Option(metavar=ON_METAVAR, help=ON_HELP)] = "local",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a worker before giving up.")] = 300.0,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record events, for reports and the summary.")
    ] = True,
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve a web page that shows the run while it goes on; its address is printed."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress line and no closing line.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object; the script's output goes to stderr.")
    ] = False,
    **engine_options: Any,
) -> None:
    """Train a script on several workers, of this machine or of a Ray cluster.

    The script is an ordinary PyTorch script that calls `paceline.join()`; it has RANK, WORLD_SIZE, MASTER_ADDR
    and so on as under torchrun. The run leaves `runs/NAME/` with its events, summary, output and checkpoints.

    Under torchrun (`torchrun … -m paceline run train.py --strategy …`) the workers that torchrun starts run the script.

    Example: `paceline run train.py --workers 4 --slow 3:4 --name first -- --epochs 2`
    """
    engine_class = detected_engine() or find_engine(on)
    check_given(engine_class, context)
    workers = engine_class.world_size(workers)
    if workers < 1:
        raise UsageError(f"--workers is {workers}; it must be at least 1")
    if not 0 < timeout <= LONGEST:
        raise UsageError(f"--timeout is {timeout:g}; it must be above 0 and at most {LONGEST:,.0f} seconds")
    restarts = engine_class.DEFAULT_RESTARTS if restarts is None else restarts
    if restarts < 0:
        raise UsageError(f"--restarts is {restarts}; it must be 0 or more")
    if not script.is_file():
        raise UsageError(f"there is no script at {script}")
    search_beside(script)
    chosen = None if strategy is None else str(_check(strategy, workers))
    policy = chosen is not None and isinstance(parse_strategy(chosen), Policy)
    if restarts and not engine_class.RESTARTS_TEAM and chosen is not None and not policy:
        raise UsageError("--restarts needs a parameter server; under all-reduce the others go on with --elastic")
    for one in correct or []:
        parse_correction(one)
    where = parse_servers(servers or "1")
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
        # Where a team without a server is started again as a whole, it need not survive the loss of a worker.
        elastic=elastic or (restarts > 0 and (policy or not engine_class.RESTARTS_TEAM)),
    )
    engine = engine_class(
        Job(
            script=script,
            arguments=arguments or [],
            workers=workers,
            # As far as the command line determines it.
            servers=where if isinstance(where, int) and (policy or servers is not None) else 0,
            restarts=restarts,
            on=on,
            options=engine_options,
        )
    )
    if engine_class.detected():
        engine.run(msgspec.structs.replace(launch, name=name and check_name(name)), EngineCallbacks())
        return
    own = _make_folder(script, name, engine_class)
    folder = None if own is None else own.path
    launch = msgspec.structs.replace(
        launch, folder=None if folder is None else str(folder.resolve()), record=record and folder is not None
    )
    config: dict[str, Any] = {
        "script": str(script),
        "arguments": arguments or [],
        "workers": workers,
        "strategy": chosen,  # until the events tell the script's own strategy
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
    progress = Progress(folder, workers, all_output=all_output, quiet=quiet or json, apart=json)
    _write_config(progress, config)
    page = LivePage(folder) if live and launch.record and folder is not None else None
    if live and page is None:
        progress.note("--live shows nothing, as the run is not recorded")
    code, summary = _carry_out(engine, launch, progress, page, config)
    if json:
        path = None if folder is None else os.path.relpath(folder)
        told = {"folder": path, "code": code, **msgspec.to_builtins(summary, str_keys=True)}
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    elif not quiet and code != 2:
        _close(progress, summary, code)
    raise typer.Exit(code)


def _carry_out(
    engine: Engine, launch: Launch, progress: Progress, page: LivePage | None, config: dict[str, Any]
) -> tuple[int, Summary]:
    """Run to the end, also to an early one; returns the exit code, and the summary of the run's events."""
    code, workers = 0, config["workers"]
    try:
        if page is not None:
            page.start()
        with progress:
            callbacks = EngineCallbacks(output=progress.output, tick=progress.tick, note=progress.note)
            statuses = engine.run(launch, callbacks)
        code = _report_failures(statuses, progress)
    except Interrupted as stop:
        progress.note(f"stopped by {signal.Signals(stop.number).name}; all workers have ended")
        code = 128 + stop.number
    finally:
        folder = progress.folder
        summary = Summariser(workers).result() if folder is None else merge(folder, workers, progress.note_once)
        _write_config(progress, {**config, "strategy": summary.strategy or config["strategy"]})
        if page is not None:
            page.stop()
    return code, summary


def _check(spec: str, workers: int) -> Strategy:
    """The strategy, checked for this number of workers."""
    strategy = parse_strategy(spec)
    if isinstance(strategy, Policy):
        strategy.for_workers(range(workers))
    check_workers(strategy, workers)
    return strategy


def _write_config(progress: Progress, config: dict[str, Any]) -> None:
    if progress.folder is not None:
        with progress.recording():
            text = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
            write_private(progress.folder / "config.json", text)


def _make_folder(script: Path, name: str | None, engine: type[Engine]) -> RunFolder | None:
    """The run's folder; None if it cannot be made, which is said."""
    try:
        return RunFolder(script, name)
    except OSError as error:
        why = f"runs/ cannot be written: {error.strerror or error}"
        if engine.SEVERAL_MACHINES:
            raise UsageError(f"{why}; a run on {engine.NAME} needs its folder") from None
        print(f"paceline: {why}; the run is not recorded", file=sys.stderr)
        return None


def _report_failures(statuses: list[ExitStatus], progress: Progress) -> int:
    """Tell the user once what went wrong; returns the exit code."""
    # A worker that was started again, or that came too late to join, is no loss.
    lost = [one for one in statuses if one.spared and not one.restarted and one.exit_report is None]
    failed = failures(statuses)
    for status in [one for one in lost if one not in failed]:
        progress.note(f"warning: {status.description}; the others went on without it")
    if not failed:
        return 0
    # Causes come before their consequences.
    causes = [one for one in failed if one.exit_report is None or not one.exit_report.consequence] or failed
    first = causes[0]
    report = first.exit_report
    if report is None:
        where = progress.output_of(first.rank)
        progress.note(first.description + (f"; its output is in {where}" if where is not None else ""))
    elif report.usage:
        progress.note(report.message)
        return 2
    elif report.consequence:
        progress.note(f"{report.kind}: {report.message}")
    else:
        for line in report.traceback.rstrip().splitlines():
            progress.output(first.rank, "stderr", line.encode(), force=True)
        progress.note(f"rank {first.rank} failed: {report.kind}: {report.message}")
    reports = [(one.rank, one.exit_report) for one in causes[1:]]
    same = [rank for rank, other in reports if report and other and _error(other) == _error(report)]
    if same:
        progress.note(f"{names(same)} failed with the same error")
    for status in failed:
        if status is not first and status.rank not in same and status.exit_report is not None:
            progress.note(f"rank {status.rank} stopped: {status.exit_report.kind}: {status.exit_report.message}")
    return 1


def _error(report: ExitReport) -> tuple[str, str]:
    return report.kind, report.message


def _close(progress: Progress, summary: Summary, code: int) -> None:
    """Print the main results on one line."""
    folder, state = progress.folder, "done" if code == 0 else "ended early"
    if folder is None or progress.unrecorded:
        print(f"paceline: {state}; how it went is not recorded", file=sys.stderr)
        return
    words = [f"{summary.updates} updates"]
    if summary.samples_per_second:
        words.append(f"{summary.samples_per_second:,.0f} samples/s")
    if summary.seconds_per_update:
        words.append(f"{summary.seconds_per_update * 1e3:.3g} ms per update")
    words += [f"{name} {shown(value)}" for name, value in summary.last.items()]
    where = os.path.relpath(folder)
    print(
        f"paceline: {state}: {', '.join(words)}; see {where}/summary.json, or: paceline report {where}", file=sys.stderr
    )
