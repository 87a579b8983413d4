"""The end of a run, the same for every engine: how each process ended, and when the others must end, too."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec

from paceline.cluster.preemption import PREEMPTED
from paceline.cluster.process_set import ProcessEnd
from paceline.config import Timeouts

_HINT = "; a machine that announces AMX but cannot run it needs ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


class ExitReport(msgspec.Struct):
    """The error of a worker's script, as its bootstrap has written it."""

    kind: str
    message: str
    usage: bool
    consequence: bool
    """True if it failed because another worker did."""
    traceback: str


@dataclasses.dataclass(slots=True)
class ExitStatus:
    """How one worker or server ended."""

    rank: int
    """Below 0 for a server."""
    code: int
    exit_report: ExitReport | None
    spared: bool = False
    """True if it was lost, and the others could go on without it."""
    restarted: bool = False
    """True if it was started again."""
    host: str = ""
    """The machine, if the process was lost with it."""

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.spared

    @property
    def died(self) -> bool:
        """True if it was killed or its machine was lost, which is no error of its script."""
        return self.code < 0

    @property
    def preempted(self) -> bool:
        """True if it has left because of SIGTERM."""
        return self.code == PREEMPTED and self.exit_report is None and self.rank >= 0

    @property
    def description(self) -> str:
        """Who ended and how, as a clause of a message."""
        who = f"rank {self.rank}" if self.rank >= 0 else f"server {-1 - self.rank}"
        if self.host:
            return f"{who} was lost with its agent on {self.host}"
        if self.code < 0:
            hint = _HINT if -self.code == signal.SIGILL else ""
            return f"{who} was killed by signal {-self.code} ({signal.Signals(-self.code).name}){hint}"
        if self.preempted:
            return f"{who} was preempted (SIGTERM) and has left"
        return f"{who} ended with exit code {self.code}"


def failures(statuses: Iterable[ExitStatus]) -> list[ExitStatus]:
    """Processes that made the run fail: with no worker left to go on, also those that could be spared."""
    statuses = list(statuses)
    workers = [status for status in statuses if status.rank >= 0 and not status.restarted]
    alone = bool(workers) and all(status.code != 0 for status in workers)
    return [status for status in statuses if status.failed or (alone and status in workers)]


class Supervision:
    """Collects exit statuses; after the first failure the others get time to report whom they miss, then signals."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._patience = timeouts.stop
        self.statuses: list[ExitStatus] = []
        self.tolerates_loss = False
        """True if the run goes on when a worker is lost."""
        self.needs_lead = False
        """True if it does not when the lead is."""
        self.joinable = False
        """True if the run has a server that new workers can join."""
        self._deadlines: list[tuple[float, int]] = []
        self._grace: float | None = None
        """Until when servers may end by themselves after all workers have ended."""

    def record(self, end: ProcessEnd, *, comes_back: bool = False) -> ExitStatus:
        """comes_back: True if the process is started again, and the others wait for it."""
        exit_report = msgspec.json.decode(end.exit_report, type=ExitReport) if end.exit_report else None
        status = ExitStatus(end.rank, end.code, exit_report, host=end.host)
        # Spared: a worker that was killed or that needed one that was killed, one that came too late to join, and one
        # that has left, which every server survives.
        lost = end.code < 0 or (exit_report is not None and exit_report.kind == "WorkerLost") or status.preempted
        late = exit_report is not None and exit_report.kind == "JoinError"
        needed = end.rank < 0 or (end.rank == 0 and self.needs_lead)
        spared = (self.tolerates_loss and lost and not needed) or (self.joinable and (late or status.preempted))
        status.spared, status.restarted = (spared and not self._deadlines) or comes_back, comes_back
        self.statuses.append(status)
        if not self._deadlines and status.failed:
            now = time.monotonic()
            self._deadlines = [(now + self._patience, signal.SIGTERM), (now + self._patience + 1.0, signal.SIGKILL)]
        return status

    @property
    def due(self) -> list[int]:
        """Signals that are to be sent now."""
        return [number for deadline, number in self._deadlines if time.monotonic() >= deadline]

    @property
    def ending(self) -> bool:
        """True if a process has failed and the others are ending."""
        return bool(self._deadlines)

    def over(self, running: Collection[int]) -> bool:
        """True if no worker runs any more, and the servers have ended or have had time to."""
        if any(rank >= 0 for rank in running):
            return False
        if self._grace is None:
            self._grace = time.monotonic() + self._patience
        return not running or time.monotonic() >= self._grace


class Interrupted(Exception):
    """SIGINT or SIGTERM has told the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible(handle: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Lets SIGINT and SIGTERM call `handle`; yields a function that postpones both from then on, for the clean-up.

    A signal that came during the clean-up raises Interrupted after it, unless an error is on its way already. Only
    the main thread can handle signals: in another one they are left to it.
    """
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ((signal.SIGINT, signal.SIGTERM) if main else ())}
    late: list[int] = []

    def postpone() -> None:
        for number in handlers:
            signal.signal(number, lambda received, _: late.append(received))

    try:
        for number in handlers:
            signal.signal(number, lambda received, _: handle(received))
        yield postpone
    finally:
        for number, handler in reversed(handlers.items()):  # SIGINT last: it may raise at once
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python
    if late:
        raise Interrupted(late[0])
