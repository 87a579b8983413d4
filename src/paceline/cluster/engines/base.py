"""The contract of an engine: the part of a run that starts its processes and supervises them.

A new engine is one file beside this one and one line in the registry (`paceline.cluster.engines`). It subclasses
`Engine`; if it starts the processes itself, its `run` returns `SupervisedRun.run()` of a subclass that knows how
to start, poll, signal and stop processes in its place. The supervision of a run is written here once, for all engines.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from paceline.cluster.file_sync import newest_checkpoint, newest_snapshot
from paceline.cluster.process_set import ProcessEnd
from paceline.cluster.servers import EndWorkers, LeadRequest, StartServers
from paceline.cluster.supervision import ExitStatus, Interrupted, Supervision, failures, interruptible
from paceline.config import Launch

TICK = 0.2
"""Seconds between two calls of `EngineCallbacks.tick`, at the most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOption:
    """An option of `paceline run` that one engine alone understands."""

    name: str
    """Without the dashes."""
    metavar: str
    help: str
    default: str | None = None
    repeatable: bool = False
    """True if the option's value is a list of all that were given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The processes that an engine is asked to start."""

    script: Path
    arguments: Sequence[str] = ()
    workers: int
    ranks: Sequence[int] = ()
    """Their ranks, if they join a team that runs elsewhere."""
    servers: int = 0
    """Server processes that the workers will ask for, as far as the command line determines it."""
    restarts: int = 0
    """Number of times that a worker, or the team, may be started again."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the workers and servers, beside those that the engine passes by itself."""
    on: str = ""
    """The value of `--on`, which may have an address."""
    inherited: Sequence[int] = ()
    """File descriptors that the workers inherit, if they are processes of the launcher."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of the engine's own options, by name; one that is missing has its default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCallbacks:
    """Functions through which an engine tells about a run. All are called in the thread of `Engine.run`."""

    output: Callable[[int, str, bytes], None] = lambda _rank, _stream, _line: None
    """Takes each line that a process writes: rank (below 0 for a server), "stdout" or "stderr", and the line."""
    tick: Callable[[], None] = lambda: None
    """Called at least every `TICK` seconds while processes run."""
    note: Callable[[str], None] = lambda _sentence: None
    """Takes one sentence for the user: a restart, a change of the number of workers."""


class Engine(abc.ABC):
    """Starts the processes of one run, supervises them, and leaves none behind.

    1. `paceline run` finds the class by `--on` (`SELECTORS`), or by `detected`.
    2. The constructor checks the job before the run has a folder: it raises UsageError for a wrong option, for a
       cluster that does not answer, or for one that has too little room.
    3. `run` starts the workers, waits until all processes have ended, and returns how they ended.
    """

    NAME: ClassVar[str]
    SELECTORS: ClassVar[tuple[str, ...]] = ()
    """Values of `--on` that select this engine; in `scheme://…` any address may follow the scheme."""
    PLACE: ClassVar[str] = ""
    """Where it starts the workers, for the help of `--on`: "on this machine"."""
    OPTIONS: ClassVar[tuple[EngineOption, ...]] = ()
    """This engine's own options of `paceline run`."""
    DECIDES: ClassVar[tuple[str, ...]] = ()
    """Parameters of `paceline run` that this engine decides by itself, so that giving them is an error."""
    DECIDES_REASON: ClassVar[str] = ""
    """The end of that error's message."""
    DEFAULT_RESTARTS: ClassVar[int] = 0
    """`--restarts` where it is not given."""
    RESTARTS_TEAM: ClassVar[bool] = False
    """True if a team that cannot go on without a lost process is started again also if it has no snapshot."""
    SEVERAL_MACHINES: ClassVar[bool] = False
    """True if workers may run on other machines than the launcher's."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @classmethod
    def detected(cls) -> bool:
        """True if this process is a worker that the engine has started.

        Then the engine is used whatever `--on` is, and its `run` executes the script in this process. The workers
        themselves make the run's folder.
        """
        return False

    @classmethod
    def world_size(cls, workers: int) -> int:
        """Number of workers of the run, where `--workers` is `workers`."""
        return workers

    @abc.abstractmethod
    def run(self, launch: Launch, callbacks: EngineCallbacks) -> list[ExitStatus]:
        """Run the job to its end.

        - Every worker has torchrun's environment variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
          MASTER_ADDR, MASTER_PORT) and `Launch.VARIABLE`. The run's files are in `launch.folder` when this returns.
        - Returns the exit status of every process that was supervised, in the order in which they ended.
        - SIGINT and SIGTERM end the run: all processes are stopped, then Interrupted is raised. After SIGTERM the
          workers have `launch.grace` seconds to leave, unless another signal comes.
        - No process, port or temporary file outlives the call, nor the death of the launcher itself.
        """


class SupervisedRun(abc.ABC):
    """One run of an engine that starts the processes itself.

    Subclasses start, poll, signal and stop processes; this class decides what happens when one ends:

    - A failure that the others cannot survive ends them all, after the time that `Supervision` gives them to report it.
    - A server that was killed is started again, if the engine keeps the run's memory: workers wait for it.
    - A lost worker that the others can spare is started again while restarts are left and there is a server to join.
    - If the team had to end because a process was lost, it is started again and goes on from its newest snapshot; if it
      has none, only where `restarts_team` is set.
    """

    restarts_team: ClassVar[bool] = False
    """As `Engine.RESTARTS_TEAM`."""

    def __init__(self, job: Job, launch: Launch, callbacks: EngineCallbacks) -> None:
        self.job, self.launch, self.callbacks = job, launch, callbacks
        self.folder = Path(launch.folder or ".")
        self.supervision = Supervision(launch.timeouts)
        """Of the current attempt: a team that is started again gets a new one."""
        self.restarts_left = job.restarts
        self._interrupted: int | None = None
        """The signal that told the launcher to stop."""

    # -- implemented by each engine ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def start(self, attempt: int) -> None:
        """Start all workers. `attempt` is 0 at first, and one more each time that the team is started again."""

    @property
    @abc.abstractmethod
    def running(self) -> Collection[int]:
        """Ranks of the processes that run; server i has rank -1 - i."""

    @abc.abstractmethod
    def poll(self, seconds: float) -> list[ProcessEnd]:
        """Wait up to `seconds` for events and handle them; returns the processes that have ended.

        Lines of output go to `callbacks.output`, requests of the lead to `take_request`.
        """

    @abc.abstractmethod
    def start_servers(self, request: StartServers) -> None:
        """Start the requested servers on the lead's machine. Without an address there is nothing to join."""

    @abc.abstractmethod
    def restart_worker(self, rank: int) -> None:
        """Start a worker again that joins the run through its server."""

    @abc.abstractmethod
    def end_worker(self, rank: int) -> None:
        """Kill a worker, which was evicted, and the processes that it has started; one that has ended is no error."""

    @abc.abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to all processes that run, and to the processes that these have started."""

    @abc.abstractmethod
    def preempt(self) -> None:
        """Send SIGTERM to all workers, but not to the processes that these have started."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End all processes that still run and free all that the run holds. Called once, also after a failed start."""

    def comes_back(self, end: ProcessEnd) -> bool:
        """True if this process is a server that was killed, and that `restart_server` can start again."""
        return False

    def restart_server(self, index: int) -> None:
        """Start a server again, which goes on where it was killed."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called when all workers of an attempt have ended: collect the rest of their files."""

    def can_restart(self, status: ExitStatus) -> bool:
        """True if this process may be started again by itself."""
        return status.rank >= 0 and status.spared and self.supervision.joinable and not status.preempted

    def interrupt(self, number: int) -> None:
        """Handle SIGINT or SIGTERM. It is remembered here, since an exception raised by a handler can be lost."""
        self._interrupted = number

    # -- the same for all --------------------------------------------------------------------------------------------

    def run(self) -> list[ExitStatus]:
        """As `Engine.run`."""
        with interruptible(self.interrupt) as postpone_signals:
            try:
                try:
                    self._attempt()
                except Interrupted as stop:
                    if stop.number == signal.SIGTERM:
                        self._let_leave()
                    raise
                finally:
                    postpone_signals()
            finally:  # also if a signal came before they were postponed
                self.stop()
        return self.supervision.statuses

    def _attempt(self) -> None:
        """Run the team until it has ended for good."""
        for attempt in itertools.count():
            self.supervision = Supervision(self.launch.timeouts)
            self.start(attempt)
            self._supervise()
            self.finish()
            if not (self.restarts_left and self._was_lost() and self._can_go_on()):
                break
            self.restarts_left -= 1
            self._announce_restart()

    def take_request(self, data: bytes) -> None:
        """Handle a request of the lead."""
        request = msgspec.msgpack.decode(data, type=LeadRequest)
        if isinstance(request, EndWorkers):
            for rank in request.ranks:
                self.end_worker(rank)
        else:
            self.serve(request)

    def serve(self, request: StartServers) -> None:
        """Handle the lead's request for servers."""
        self.supervision.tolerates_loss, self.supervision.joinable = request.tolerates_loss, bool(request.address)
        self.supervision.needs_lead = request.needs_lead
        if self.restarts_left and not request.address and not self.restarts_team:
            self.callbacks.note(
                "--restarts starts no worker again, as there is nothing that it could join; if one is lost, the others "
                "go on, as with --elastic"
            )
        self.start_servers(request)

    def check_interrupted(self) -> None:
        if self._interrupted is not None:
            raise Interrupted(self._interrupted)

    def _supervise(self) -> None:
        while not self.supervision.over(self.running):
            for end in self.poll(TICK):
                back = not self.supervision.ending and self.comes_back(end)
                status = self.supervision.record(end, comes_back=back)
                if status.preempted and status.spared:
                    self.callbacks.note(status.description)
                self._restart(status)
            for number in self.supervision.due:
                self.signal(number)
            self.callbacks.tick()
            self.check_interrupted()

    def _let_leave(self) -> None:
        """Tell all workers to leave, and wait for them within the grace time; another signal ends the wait."""
        self._interrupted = None
        until = time.monotonic() + self.launch.grace
        self.preempt()
        while any(rank >= 0 for rank in self.running) and time.monotonic() < until:
            self.poll(TICK)
            self.callbacks.tick()
            self.check_interrupted()

    def _restart(self, status: ExitStatus) -> None:
        if status.restarted:
            self.callbacks.note(f"{status.description}; it is started again, and goes on where it was")
            self.restart_server(-1 - status.rank)
        elif self.restarts_left and self.can_restart(status):
            self.restarts_left -= 1
            status.restarted = True
            self.callbacks.note(f"{status.description}; it is started again ({self.restarts_left} restarts left)")
            self.restart_worker(status.rank)

    def _was_lost(self) -> bool:
        """True if the team failed because a process was lost, not because a script is wrong."""
        failed = failures(self.supervision.statuses)
        wrong = [one for one in failed if not one.died and not (one.exit_report and one.exit_report.consequence)]
        return not wrong and any(status.died for status in failed)

    def _can_go_on(self) -> bool:
        """True if the team is to be started again, from its newest snapshot if it has one."""
        if newest_snapshot(self.folder) is not None:
            self.launch = msgspec.structs.replace(self.launch, resume=str(self.folder))
            return True
        if not self.restarts_team and self.launch.snapshot is not None:
            self.callbacks.note("the team is not started again, as it has no snapshot yet")
        return self.restarts_team

    def _announce_restart(self) -> None:
        first = next(status for status in failures(self.supervision.statuses) if status.died)
        snapshot, checkpoint = newest_snapshot(self.folder), newest_checkpoint(self.folder)
        if snapshot is not None:
            origin = f"and goes on from snapshot {snapshot.name}"
        elif checkpoint is not None:
            origin = f"with checkpoint {checkpoint.name}"
        else:
            origin = "from the beginning, as it saved no checkpoint"
        self.callbacks.note(
            f"{first.description}; the team is started again {origin} ({self.restarts_left} restarts left)"
        )
