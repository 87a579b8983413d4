"""What every engine knows about the end of a run: how each process ended, and when the others must end, too."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec

from paceline.cluster.process_set import ProcessEnd
from paceline.config import Timeouts

_HINT = "; a machine that announces AMX but cannot run it needs ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"

Relay = Callable[[int, str, bytes], None]
"""Takes a line that a worker wrote: rank, "stdout" or "stderr", and the line."""


class ExitReport(msgspec.Struct):
    """What a worker's bootstrap leaves behind when its script fails."""

    kind: str
    message: str
    usage: bool
    consequence: bool
    """It failed because another worker did."""
    traceback: str


@dataclasses.dataclass(slots=True)
class ExitStatus:
    """How one worker ended."""

    rank: int
    """Below 0 for a server."""
    code: int
    exit_report: ExitReport | None
    spared: bool = False
    """It was lost, and the others could go on without it."""
    replaced: bool = False
    """It was started again."""
    host: str = ""
    """Where, if it is the machine that was lost."""

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.spared

    @property
    def died(self) -> bool:
        """It was killed, or its machine was lost; nothing says that its script is wrong."""
        return self.code < 0

    @property
    def spoken(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else f"server {-1 - self.rank}"
        if self.host:
            return f"{who} was lost with what looked after it on {self.host}"
        if self.code < 0:
            hint = _HINT if -self.code == signal.SIGILL else ""
            return f"{who} was killed by signal {-self.code} ({signal.Signals(-self.code).name}){hint}"
        return f"{who} ended with exit code {self.code}"


def failures(endings: Iterable[ExitStatus]) -> list[ExitStatus]:
    """Those that a run failed by: of workers that could be spared, all if nobody was left to go on."""
    endings = list(endings)
    workers = [ending for ending in endings if ending.rank >= 0 and not ending.replaced]
    alone = bool(workers) and all(ending.code != 0 for ending in workers)
    return [ending for ending in endings if ending.failed or (alone and ending in workers)]


class Supervision:
    """Collects endings; after the first failure the others get time to say whom they miss, then the order to stop."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._patience = timeouts.stop
        self.endings: list[ExitStatus] = []
        self.spare = False
        """Whether a worker may be lost."""
        self.joining = False
        """Whether there is something that workers can join."""
        self._deadlines: list[tuple[float, int]] = []
        self._grace: float | None = None
        """Until when servers may end by themselves, once all workers have."""

    def record(self, gone: ProcessEnd, host: str = "") -> ExitStatus:
        exit_report = msgspec.json.decode(gone.exit_report, type=ExitReport) if gone.exit_report else None
        # A worker that was killed, or one that cannot go on without such a one, not one whose script is wrong; or one
        # that came too late to join.
        lost = gone.code < 0 or (exit_report is not None and exit_report.kind == "WorkerLost")
        late = exit_report is not None and exit_report.kind == "JoinError" and self.joining
        spared = gone.rank >= 0 and not self._deadlines and ((self.spare and lost) or late)
        ending = ExitStatus(gone.rank, gone.code, exit_report, spared, host=host)
        self.endings.append(ending)
        if not self._deadlines and ending.failed:
            now = time.monotonic()
            self._deadlines = [(now + self._patience, signal.SIGTERM), (now + self._patience + 1.0, signal.SIGKILL)]
        return ending

    @property
    def due(self) -> list[int]:
        """Signals for whom it is time."""
        return [number for deadline, number in self._deadlines if time.monotonic() >= deadline]

    @property
    def ending(self) -> bool:
        """Whether the others have been given time to end."""
        return bool(self._deadlines)

    def over(self, running: Collection[int]) -> bool:
        """Whether no worker is among those who run, and their servers have had time to end as well."""
        if any(rank >= 0 for rank in running):
            return False
        if self._grace is None:
            self._grace = time.monotonic() + self._patience
        return not running or time.monotonic() >= self._grace


class Interrupted(Exception):
    """The launcher was told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible(handle: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """While this lasts, Ctrl-C and its like call `handle`; what is yielded ends that, for the clearing up."""
    handlers = {
        number: signal.signal(number, lambda received, _: handle(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    def deaf() -> None:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield deaf
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
