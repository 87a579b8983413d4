"""`--on`: where a run's processes are started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from paceline.cli.progress import Progress
from paceline.cluster.engines.local import LocalEngine
from paceline.cluster.supervision import ExitStatus
from paceline.config import Launch, one_of, parse_servers, parse_strategy
from paceline.errors import UsageError
from paceline.policies import POLICIES

PLACES = ("spread", "pack")


class RunEngine(Protocol):
    """Starts the processes of a run, relays what they say, and ends them."""

    def run(self) -> list[ExitStatus]:
        """Start all, wait for all; returns how they ended, in that order."""


Make = Callable[[Launch, Progress], RunEngine]
"""Makes the engine of a run, once the run has a folder."""


def prepare(
    on: str,
    script: Path,
    arguments: Sequence[str],
    workers: int,
    *,
    strategy: str | None,
    servers: str | None,
    place: str,
    each: str | None,
    env: Sequence[str],
    restarts: int,
) -> Make:
    """See whether the engine that was asked for is there and has room, before the run leaves anything behind."""
    one_of("--place", place, PLACES)
    if on == "local":
        if each is not None or env:
            raise UsageError("--each and --env are for --on ray; this run is on this machine")
        return lambda launch, progress: LocalEngine(
            script,
            arguments,
            workers,
            launch,
            relay=progress.relay,
            tick=progress.tick,
            note=progress.note,
            restarts=restarts,
        )
    if on != "ray" and not on.startswith("ray://"):
        raise UsageError(f"--on is '{on}'; it must be 'local', 'ray' or 'ray://HOST:PORT'")
    from paceline.cluster.engines.ray import RayEngine
    from paceline.cluster.engines.ray_cluster import RayCluster, Room, parse_each, parse_environment

    environment = parse_environment(env)
    room = Room(workers=workers, each=parse_each(each or ""), servers=_beside(strategy, servers), place=place)
    folder = travelling(script)
    cluster = RayCluster(None if on == "ray" else on, folder, room)
    return lambda launch, progress: RayEngine(
        cluster,
        script.resolve().relative_to(folder),
        arguments,
        workers,
        launch,
        relay=progress.relay,
        tick=progress.tick,
        note=progress.note,
        environment=environment,
        restarts=restarts,
    )


def travelling(script: Path) -> Path:
    """The folder that goes to the nodes with a script: this one, if it is somewhere in it, or else its own."""
    here, its = Path.cwd().resolve(), script.resolve().parent
    return here if its.is_relative_to(here) else its


def _beside(strategy: str | None, servers: str | None) -> int:
    """How many server processes a run will have, as far as the command line says."""
    policy = strategy is not None and type(parse_strategy(strategy)) in POLICIES
    where = parse_servers(servers or "1")
    return where if isinstance(where, int) and (policy or servers is not None) else 0
