"""`paceline run --join`: workers of this machine that join a run of another one."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.cluster.engines.base import Engine, EngineCallbacks, Job
from paceline.cluster.supervision import ExitStatus, Interrupted
from paceline.config import parse_door
from paceline.errors import UsageError, names
from paceline.launcher.options import RunOptions
from paceline.launcher.progress import Progress
from paceline.relay.door import AskPlaces, PlacesGiven, call
from paceline.relay.launch import JoiningPlan
from paceline.transport.keys import is_loopback, key_of_run
from paceline.transport.unix_connection import new_address

REFUSED = (
    *("strategy", "servers", "correct", "compress", "elastic", "restarts", "snapshot", "resume", "open_", "name"),
    *("log", "push_metrics", "live", "json"),
)
"""Parameters of `paceline run` that the run which is joined decides."""


def join_run(
    door: str,
    engine: type[Engine],
    job: Job,
    options: RunOptions,
    refused: Sequence[str],
    progress: Progress,
    report: Callable[[list[ExitStatus], Progress], int],
) -> int:
    """Joins a run with the workers of a job, and runs them to their end; returns the exit code.

    refused: parameters that were given, and that the run decides; report: tells the user of failures.
    """
    if engine.NAME != "local":
        raise UsageError("--join starts workers on this machine; it does not go with --on, nor under torchrun")
    if refused:
        raise UsageError(f"--{refused[0].strip('_').replace('_', '-')} does not go with --join: the run decides it")
    if is_loopback(parse_door(door, "--join")[0]):
        raise UsageError(
            f"--join is '{door}', where no other machine finds this one; give an address of the run's machine that the "
            "others reach it at"
        )
    places = call(door, key_of_run(None), AskPlaces(job.workers), options.timeout)
    assert isinstance(places, PlacesGiven)
    config, folder = places.config, Path(tempfile.mkdtemp(prefix="paceline-join-"))
    plan = folder / "plan"
    plan.write_bytes(msgspec.msgpack.encode(JoiningPlan(door, places)))
    spec = config.spec
    launch = msgspec.structs.replace(
        options.launch(spec.folder),
        strategy=spec.strategy,
        timeouts=spec.timeouts,
        record=spec.folder is not None,
        elastic=True,
        joins=new_address(),
        machine=config.machine,
        plan=str(plan),
    )
    progress.note(f"{names(places.ranks)} {'join' if places.ranks[1:] else 'joins'} the run at {door}")
    try:
        with progress:
            callbacks = EngineCallbacks(output=progress.output, tick=progress.tick, note=progress.note)
            statuses = engine(replace(job, ranks=places.ranks)).run(launch, callbacks)
        return report(statuses, progress)
    except Interrupted as stop:
        progress.note(f"stopped by {signal.Signals(stop.number).name}; all workers of this machine have ended")
        return 128 + stop.number
    finally:
        shutil.rmtree(folder, ignore_errors=True)
