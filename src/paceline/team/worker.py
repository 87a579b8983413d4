"""This process as a worker of a run: its place, device, folder and events, with or without a model."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from paceline.cluster import preemption
from paceline.cluster.compiler import import_compiler_late
from paceline.cluster.event_forwarding import EventForwarding
from paceline.cluster.file_sync import newest_snapshot
from paceline.cluster.membership import Members, join_team
from paceline.cluster.process import keep_freed_memory, started_at
from paceline.config import (
    AllReduce,
    Launch,
    Mesh,
    Pipeline,
    Place,
    Strategy,
    Tensor,
    Timeouts,
    between_replicas,
    check_workers,
)
from paceline.errors import UsageError
from paceline.events import Join, Leave
from paceline.events.recorder import Recorder, folder_of, limit_of
from paceline.events.stopwatch import Stopwatch
from paceline.events.summary import merge
from paceline.observation import observer
from paceline.policies import Policy
from paceline.team.team_logging import TeamLogging


class Worker:
    """One worker of a run, which it joins when it is made."""

    def __init__(
        self,
        place: Place,
        launch: Launch,
        strategy: Strategy,
        name: str | None,
        timeouts: Timeouts | None,
        loggers: str | Sequence[str],
    ) -> None:
        """name, timeouts, loggers: the script's, unless its launcher has others."""
        _check_strategy(strategy, launch, place.world_size)
        if launch.restarts and isinstance(strategy, Pipeline | Tensor | Mesh):
            launch = msgspec.structs.replace(launch, elastic=False)
        observer.enter_team()
        self.rank, self.size, self.launch, self.strategy = place.rank, place.world_size, launch, strategy
        """size: the number of workers at the start."""
        self.device = _device(place.local_rank)
        self.folder = _folder(launch, name)
        self._writes_summary = launch.folder is None and self.folder is not None
        self._logging = TeamLogging(launch, self.folder, loggers, self.rank)
        reforms = launch.elastic and isinstance(strategy, AllReduce)
        self.members: Members = join_team(place, launch, timeouts or launch.timeouts, self.say, elastic=reforms)
        if reforms and launch.joins is not None:
            self.size = self.members.size
        self.resumed_by = 0
        """The rank that reads the snapshot which the run goes on from."""
        self.launch = self._gone_on(launch)
        import_compiler_late()
        if place.world_size > 1 or launch != Launch():
            preemption.arm(self.rank, launch.grace)
        if self.size > 1:
            keep_freed_memory()
        limit = limit_of(launch.record_limit, self.members.machine, len(self.members.machines))
        self.recorder = Recorder(self._streams_folder() if launch.record else None, self.rank, limit)
        self._logging.start()
        self.stopwatch = Stopwatch(self.recorder, self.rank, launch.slow.get(self.rank), launch.seed)
        where = (socket.gethostname(), str(self.device), str(strategy))
        self.recorder.add(Join(self.rank, time.perf_counter(), os.getpid(), *where, time.time()))

    def _gone_on(self, launch: Launch) -> Launch:
        """The settings, with the run's own folder to go on from if torchrun has started the team again.

        Every machine looks for a snapshot of this run: one that was written since its torchrun was started. When
        machines come or go, torchrun starts all workers again and may make another machine rank 0's.
        """
        restarts = "TORCHELASTIC_RUN_ID" in os.environ and self._writes_summary
        if not restarts or launch.resume is not None or launch.joins is not None:
            return launch
        assert self.folder is not None
        own, snapshot = b"", newest_snapshot(self.folder)
        if snapshot is not None and snapshot.stat().st_mtime > started_at(os.getppid()):
            own = f"{snapshot.name}\0{self.folder.absolute()}".encode()
        found = self.members.gather(own)
        newest = max(found)
        if not newest:
            return launch
        self.resumed_by = found.index(newest)
        name, _, folder = newest.decode().partition("\0")
        if self.rank == 0:
            self.say(f"torchrun has started the team again, which goes on from snapshot {name}")
        return msgspec.structs.replace(launch, resume=folder)

    def _streams_folder(self) -> Path | None:
        """The folder of this worker's events; on other machines than rank 0's, a relay or the lead forwards them."""
        if self.folder is None:
            return None
        relayed = isinstance(between_replicas(self.strategy, 1)[0], Policy)
        if self.members.connections is not None and self.launch.record and not relayed:
            EventForwarding(self.members, self.folder)
        return folder_of(self.folder, self.members.machine if self.launch.joins is None else self.launch.machine)

    def say(self, message: str) -> None:
        """Prints a line of Paceline's on stderr."""
        print(f"paceline: {message}", file=sys.stderr, flush=True)

    def say_preempted(self, *, holds: bool) -> None:
        """Says that this worker leaves because of SIGTERM, where its launcher does not; holds: it holds a server."""
        if holds:
            self.say(
                f"rank {self.rank} was told to leave (SIGTERM), but holds parameters of the run, which ends with it: "
                f"it stays for the others for {self.launch.grace:g} s at most; --servers 1 holds them elsewhere"
            )
        elif self.launch.control is None and self.launch.folder is None:
            self.say(f"rank {self.rank} was told to leave (SIGTERM), and leaves")

    def leave(self) -> None:
        """Records the last event and leaves the others."""
        self.recorder.add(Leave(self.rank, time.perf_counter()))
        self.recorder.close()
        self.members.leave()

    def finish(self, *, lead: bool) -> None:
        """After `leave`: completes the run's folder, if this is the lead, and the loggers."""
        if lead and self.folder is not None and (self._writes_summary or len(self.members.machines) > 1):
            self.members.wait_until_left()
        if self._writes_summary and lead and self.folder is not None:
            merge(folder_of(self.folder, self.members.home), self.size)
        self._logging.stop()

    def detach(self) -> None:
        """Lets this process, a fork of the worker, do nothing in its name."""
        self.members.detach()
        self.recorder.detach()


def _check_strategy(strategy: Strategy, launch: Launch, workers: int) -> None:
    """Refuses a strategy that these workers cannot train by."""
    if (launch.open is not None or launch.plan is not None) and not isinstance(strategy, Policy):
        raise UsageError(
            f"--open and --join are for runs whose workers share a parameter server, and have the whole model each; "
            f"'{strategy}' is not one"
        )
    between, replicas = between_replicas(strategy, workers)
    if isinstance(between, Policy):
        if launch.joins is None:
            between.for_workers(range(replicas))  # refuses what cannot be
    elif launch.servers or launch.corrections or launch.compress:
        raise UsageError(
            f"--servers, --correct and --compress are for a parameter server, which '{strategy}' does not have"
        )
    if workers > 1 or launch.strategy:  # with plain python any script's own strategy is a team of one
        check_workers(strategy, workers)


def _device(local_rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, local_rank % torch.accelerator.device_count())


def _folder(launch: Launch, name: str | None) -> Path | None:
    if launch.folder is not None:
        return Path(launch.folder)
    name = launch.name or name
    return None if name is None else Path("runs") / name
