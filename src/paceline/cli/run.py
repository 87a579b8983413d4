"""`paceline run`: trains a script on several workers, of this machine or of a cluster."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from paceline.cli import panels
from paceline.cli.engines import ON_HELP, ON_METAVAR, RESTARTS_DEFAULT, check_given, with_engine_options
from paceline.cli.log import LOG_HELP, PUSH_HELP
from paceline.cluster.engines import detected_engine, find_engine
from paceline.cluster.engines.base import Engine, EngineCallbacks, Job
from paceline.cluster.preemption import PREEMPTED
from paceline.cluster.supervision import ExitStatus, Interrupted
from paceline.config import Launch, search_beside
from paceline.errors import UsageError
from paceline.launcher.failure import NEEDED, Failure, warnings
from paceline.launcher.folders import check_name, make_folder
from paceline.launcher.options import RunOptions
from paceline.launcher.progress import Progress
from paceline.launcher.record import RunRecord
from paceline.launcher.resumed_run import ResumedRun, name_of
from paceline.loggers import parse_loggers
from paceline.loggers.process import Logging, check_gateway
from paceline.transport.keys import VARIABLE as KEY
from paceline.transport.keys import key_of_run


@with_engine_options
def run(
    context: typer.Context,
    script: Annotated[
        Path | None,
        typer.Argument(help="The training script; with --resume, by default that of the run.", show_default=False),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for the script, after --.")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", "-w", help="Number of workers to start.", rich_help_panel=panels.WORKERS)
    ] = 2,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help="The strategy, as name:option=value,…, or your own policy as module:Class:option=value,…; replaces "
            "that of the script. [default: all-reduce]",
            rich_help_panel=panels.STRATEGY,
        ),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="N|lead|all",
            help="Processes that hold a parameter server's parameters: N of their own, the lead, or all workers. "
            "[default: 1]",
            rich_help_panel=panels.SERVER,
        ),
    ] = None,
    correct: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOW",
            help="Correction of stale gradients: lr/staleness, drop:above=8, dc-asgd:lambda=0.04, dc-asgd-adaptive, "
            "distance:c=0.1. Repeatable.",
            rich_help_panel=panels.SERVER,
        ),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            help="Compression of pushed gradients: none, bf16, fp16, int8, topk:0.01 (error feedback). [default: none]",
            rich_help_panel=panels.SERVER,
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on without a worker that is lost, under any strategy; all-reduce then continues from the last "
            "version with the workers that are left. --restarts implies it.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = False,
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Start killed workers again, at most N times. With a parameter server, or by all-reduce on one "
            "machine, a worker joins the run again; a team that cannot go on is started again, and goes on from its "
            "newest snapshot. "
            f"[default: {RESTARTS_DEFAULT}]",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a worker before giving up.", rich_help_panel=panels.FAULTS)
    ] = 300.0,
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time from SIGTERM, to a worker or to the whole run, until it must have left: a worker finishes its "
            "step, gives its samples back and leaves.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = "30s",
    snapshot: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|off",
            help="Time between snapshots, 30s, 5min or 1h: the whole state of the run, written in the background, for "
            "--resume and --restarts. [default: 30s if one of them or --name is given]",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Go on from the newest snapshot of a run that has ended, in the middle of an epoch; with its script "
            "and options, unless others are given: another number of workers, say, or another strategy.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    open_: Annotated[
        str | None,
        typer.Option(
            "--open",
            metavar="[ADDRESS:]PORT",
            help="Let other machines join the run, which has a parameter server, by --join at this port; they prove "
            f"that they know its {KEY}. Implies --elastic.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="Join a run of another machine that was started with --open: its workers train on with those of this "
            "machine. Strategy, servers and the like are the run's.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHO:HOW",
            help="Slow workers down: 1:4 (rank 1 takes 4 times as long), 'all:exp(0.1)' (seconds per step, of any "
            "distribution that simulate knows: constant, exp, pareto, gamma, lognormal), 1:3@backward (a part of its "
            "step: loading, forward, backward, link). Repeatable.",
            rich_help_panel=panels.FAULTS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random slowness.", rich_help_panel=panels.FAULTS)] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            help="The run's folder under runs/. [default: the script's name and the time]",
            rich_help_panel=panels.RECORDING,
        ),
    ] = None,
    on: Annotated[str, typer.Option(metavar=ON_METAVAR, help=ON_HELP, rich_help_panel=panels.ENGINES)] = "local",
    record: Annotated[
        bool,
        typer.Option(
            "--record/--no-record", help="Record events, for reports and the summary.", rich_help_panel=panels.RECORDING
        ),
    ] = True,
    record_limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Size of the recorded events above which they are thinned: some windows of time are recorded, of the "
            "rest the sums; 'off' for no limit.",
            rich_help_panel=panels.RECORDING,
        ),
    ] = "256MB",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help=f"{LOG_HELP} Replaces those of the script.", rich_help_panel=panels.RECORDING
        ),
    ] = None,
    push_metrics: Annotated[
        str | None, typer.Option(metavar="URL", help=PUSH_HELP, rich_help_panel=panels.RECORDING)
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Serve a web page that shows the run while it goes on; its address is printed.",
            rich_help_panel=panels.RECORDING,
        ),
    ] = False,
    all_output: Annotated[
        bool,
        typer.Option(
            "--all-output", help="Show the output of all workers, not only of the lead.", rich_help_panel=panels.OUTPUT
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print no progress line and no closing line.", rich_help_panel=panels.OUTPUT
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the summary as one JSON object; the script's output goes to stderr.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = False,
    **engine_options: Any,
) -> None:
    """Train a script on several workers, of this machine or of a Ray cluster.

    The script is an ordinary PyTorch script that calls `paceline.join()`; it has RANK, WORLD_SIZE, MASTER_ADDR
    and so on as under torchrun. The run leaves `runs/NAME/` with its events, summary, output and checkpoints.

    Under torchrun (`torchrun … -m paceline run train.py --strategy …`) the workers that torchrun starts run the script.

    `paceline run --resume NAME` goes on where a run was killed.

    Example: `paceline run train.py --workers 4 --slow 3:4 --name first -- --epochs 2`
    """
    engine_class = detected_engine() or find_engine(on)
    check_given(engine_class, context)
    values: dict[str, Any] = {
        "workers": workers,
        "strategy": strategy,
        "servers": servers,
        "correct": correct or [],
        "compress": compress,
        "elastic": elastic,
        "restarts": restarts,
        "slow": slow or [],
        "seed": seed,
        "timeout": timeout,
        "open": open_,
        "grace": grace,
        "record_limit": record_limit,
    }
    before = None if resume is None else _run_before(resume, engine_class, script)
    if before is not None:
        script, arguments = before.script(script, arguments)
        if not _on_several_machines(engine_class):  # where others do not see the run's folder
            values |= {key: value for key, value in before.options.items() if _is_default(context, key)}
        name = name or before.name
    elif resume is not None:
        name = name or name_of(resume)
    if script is None:
        raise UsageError("there is no script: paceline run SCRIPT, or paceline run --resume RUN")
    if not script.is_file():
        raise UsageError(f"there is no script at {script}")
    search_beside(script)
    values["workers"] = engine_class.world_size(values["workers"])
    if values["restarts"] is None:
        values["restarts"] = engine_class.DEFAULT_RESTARTS
    options = RunOptions(
        **values,
        record=record,
        snapshot=snapshot,
        logging=Logging(parse_loggers(log), push_metrics and check_gateway(push_metrics)),
        restarts_team=engine_class.RESTARTS_TEAM,
    )
    job = Job(
        script=script,
        arguments=arguments or [],
        workers=options.workers,
        servers=options.server_processes,
        restarts=options.restarts,
        on=on,
        options=engine_options,
    )
    if options.open is not None and engine_class.NAME == "ray":
        raise UsageError("--open does not go with --on ray; start the run with `paceline run` or torchrun")
    if options.open is not None and key_of_run(None) is None:
        raise UsageError(f"--open needs a key; print one with `paceline key`, and set it as {KEY} on every machine")
    if join is not None:
        from paceline.cli.joining import REFUSED, join_run  # loads torch

        refused = [name for name in REFUSED if not _is_default(context, name)]
        progress = Progress(None, options.workers, all_output=all_output, quiet=quiet or json, apart=json)
        raise typer.Exit(join_run(join, engine_class, job, options, refused, progress, _report_failures))
    engine = engine_class(job)
    named = name is not None or (restarts or 0) > 0
    if engine_class.detected():
        from_run = resume if before is None else str(before.folder)
        launch = options.launch(None, name and check_name(name), detected=True, named=named, resume=from_run)
        engine.run(launch, EngineCallbacks())
        return
    own = make_folder(script.stem, name, needed_by=engine_class.NAME if engine_class.SEVERAL_MACHINES else "")
    folder = None if own is None else own.path
    options = dataclasses.replace(options, record=record and folder is not None)
    launch = options.launch(
        None if folder is None else str(folder.resolve()), named=named, resume=_hand_over(before, folder)
    )
    config = options.config(script=str(script), arguments=arguments or [], on=on, resume=resume)
    progress = Progress(folder, options.workers, all_output=all_output, quiet=quiet or json, apart=json)
    if live and not options.record:
        progress.note("--live shows nothing, as the run is not recorded")
    if options.logging.arguments and not options.record:
        progress.note("--log and --push-metrics show nothing, as the run is not recorded")
    kept = RunRecord(progress, config, options.logging if options.record else None, live=live and options.record)
    raise typer.Exit(_run(engine, launch, kept, progress, json=json, quiet=quiet))


def _run(engine: Engine, launch: Launch, kept: RunRecord, progress: Progress, *, json: bool, quiet: bool) -> int:
    """Run the engine's job to its end, and tell how it was; returns the exit code."""
    with kept:
        try:
            code = _report_failures(kept.run(engine, launch), progress)
        except Interrupted as stop:
            progress.note(f"stopped by {signal.Signals(stop.number).name}; all workers have ended")
            code = 128 + stop.number
    if json:
        path = None if progress.folder is None else os.path.relpath(progress.folder)
        told = {"folder": path, "code": code, **msgspec.to_builtins(kept.summary, str_keys=True)}
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    elif not quiet and code != 2:
        progress.close(kept.summary, done=code == 0)
    return code


def _run_before(resume: str, engine: type[Engine], script: Path | None) -> ResumedRun | None:
    """The run to go on from; None on a machine where it was not."""
    try:
        return ResumedRun(resume)
    except UsageError:
        if engine.detected() and script is not None and os.environ.get("GROUP_RANK", "0") != "0":
            return None  # rank 0's machine has it, and sends the snapshot
        raise


def _on_several_machines(engine: type[Engine]) -> bool:
    """True if this is a worker of a team on several machines, each of which is told its options by itself."""
    return engine.detected() and os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")


def _hand_over(before: ResumedRun | None, folder: Path | None) -> str | None:
    """Gives the new run the snapshots of the one before; returns where they are."""
    if before is None:
        return None
    if folder is None:
        raise UsageError("--resume needs a folder for the run, and runs/ cannot be written")
    before.hand_over(folder)
    return str(folder.resolve())


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name in ("DEFAULT", "DEFAULT_MAP")


def _report_failures(statuses: list[ExitStatus], progress: Progress) -> int:
    """Tell the user once what went wrong; returns the exit code."""
    for sentence in warnings(statuses):
        progress.note(sentence)
    failure = Failure.of(statuses)
    if failure is None:
        return 0
    rank, report = failure.cause.rank, failure.cause.exit_report
    if report is None:
        progress.note(failure.cause.description + (NEEDED if failure.cause.preempted else progress.hint(rank)))
    elif report.usage:
        progress.note(report.message)
        return 2
    elif report.consequence:
        progress.note(f"{report.kind}: {report.message}")
    else:
        for line in report.traceback.rstrip().splitlines():
            progress.output(rank, "stderr", line.encode(), force=True)
        progress.note(f"rank {rank} failed: {report.kind}: {report.message}")
    for sentence in failure.notes:
        progress.note(sentence)
    return PREEMPTED if failure.cause.preempted else 1
