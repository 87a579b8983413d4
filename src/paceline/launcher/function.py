"""`paceline.launch`: runs a function as a team of workers of this machine, from a script, a REPL or a notebook.

The workers are new processes, as those of `paceline run`: a notebook has threads, and may have used an accelerator,
after which a fork of it would be unsafe. They get the function and what it uses by value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from paceline.cluster.engines import detected_engine
from paceline.cluster.engines.base import Job
from paceline.cluster.engines.local import LocalEngine
from paceline.cluster.supervision import ExitStatus, Interrupted
from paceline.config import Launch, Strategy
from paceline.errors import ServerLost, TeamError, UsageError, WorkerLost
from paceline.launcher.failure import Failure, warnings
from paceline.launcher.finished_run import Run
from paceline.launcher.folders import RunFolder, make_folder
from paceline.launcher.line_display import NotebookLine
from paceline.launcher.options import RunOptions
from paceline.launcher.payload import CallMemory
from paceline.launcher.progress import Progress
from paceline.launcher.record import RunRecord

T = TypeVar("T")

_CALL = Path(__file__).with_name("call.py")
_last: Run | None = None


class WorkerTraceback(Exception):
    """The cause of an exception that was raised on a worker: the traceback there."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}\n\n{text.rstrip()}\n")


def launch(
    function: Callable[..., T],
    *arguments: Any,
    workers: int = 2,
    strategy: str | Strategy | None = None,
    servers: int | str | None = None,
    correct: str | Sequence[str] = (),
    compress: str | None = None,
    elastic: bool = False,
    name: str | None = None,
    all_output: bool = False,
    slow: str | Sequence[str] = (),
    seed: int = 0,
    timeout: float = 300.0,
    grace: str = "30s",
    record: bool = True,
    record_limit: str = "256MB",
    live: bool = False,
    quiet: bool = False,
) -> T:
    """Calls `function(*arguments)` on several workers of this machine; returns what rank 0 returns.

    The function does what a script for `paceline run` does: it calls `paceline.join()`, and called plainly it trains as
    a team of one. The workers are new processes; they get the function, the variables that it uses and its arguments by
    value, and the state of this process's random generators. An exception on a worker is raised here.

    The run leaves a folder under `runs/` as `paceline run` does, which `paceline.last_run()` reads. In a notebook a
    short report is shown below the cell.

    workers, strategy, servers, correct, compress, elastic, slow, seed, record, live: as `paceline run` takes them.
    name: the run's folder under `runs/`; by default the function's name and the time.
    all_output: show the output of all workers, not only of rank 0.
    timeout: seconds to wait for a worker before giving up.
    grace: the time that workers have to leave after SIGTERM to this process.
    record_limit: size of the recorded events above which they are thinned.
    quiet: show no progress and no report.
    """
    __tracebackhide__ = True  # of IPython: the error is the function's
    _check(function, strategy)
    called = _name_of(function)
    try:
        options = RunOptions(
            workers=workers,
            strategy=None if strategy is None else str(strategy),
            servers=None if servers is None else str(servers),
            correct=_several(correct),
            compress=compress,
            elastic=elastic,
            slow=_several(slow),
            seed=seed,
            timeout=timeout,
            grace=grace,
            record=record,
            record_limit=record_limit,
        )
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(contextlib.closing(CallMemory(function, arguments, workers)))
            folder = make_folder(called, name)
            if folder is not None:
                stack.callback(folder.close)
            found = _Launched(memory, options, folder, all_output=all_output, quiet=quiet).run(called, live)
    except UsageError as error:
        raise UsageError(_as_arguments(str(error))) from error.__cause__
    if found.error is not None:
        raise found.error
    return cast(T, found.value)


def last_run() -> Run:
    """The last run of `launch` in this process, also if it has failed."""
    if _last is None:
        raise UsageError("there is no run: paceline.launch was not called in this process, or did not record its run")
    return _last


@dataclasses.dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


class _Launched:
    """One run of a function."""

    def __init__(
        self, memory: CallMemory, options: RunOptions, folder: RunFolder | None, *, all_output: bool, quiet: bool
    ) -> None:
        self._memory, self._quiet = memory, quiet
        self._folder = None if folder is None else folder.path
        self._options = dataclasses.replace(options, record=options.record and folder is not None)
        self._progress = Progress(self._folder, options.workers, all_output=all_output, quiet=quiet)

    def run(self, called: str, live: bool) -> _Outcome:
        """called: the function's name."""
        global _last
        descriptors = self._memory.descriptors
        engine = LocalEngine(
            Job(
                script=_CALL,
                arguments=[str(one) for one in descriptors],
                workers=self._options.workers,
                servers=self._options.server_processes,
                inherited=descriptors,
            )
        )
        config = self._options.config(function=called, on=LocalEngine.NAME)
        wanted = self._options.logging if self._options.record else None
        record = RunRecord(self._progress, config, wanted, live=live and self._options.record)
        statuses: list[ExitStatus] = []
        stopped = 0
        with record:
            try:
                launch = self._options.launch(None if self._folder is None else str(self._folder.resolve()))
                statuses = record.run(engine, launch)
            except Interrupted as stop:
                stopped = stop.number
                self._progress.note(f"stopped by {signal.Signals(stopped).name}; all workers have ended")
        recorded = self._options.record and not self._progress.unrecorded
        _last = Run(self._folder) if self._folder is not None and recorded else None
        if stopped:
            signal.raise_signal(stopped)  # now that nothing is left: a KeyboardInterrupt, or the end of this process
            return _Outcome(error=TeamError(f"the run was stopped by {signal.Signals(stopped).name}"))
        for sentence in warnings(statuses):
            self._progress.note(sentence)
        outcome = self._outcome(statuses)
        if outcome.error is None and not self._quiet:
            display = self._progress.display
            if isinstance(display, NotebookLine) and _last is not None:
                display.replace(_last)
            else:
                self._progress.close(record.summary, done=True)
        return outcome

    def _outcome(self, statuses: list[ExitStatus]) -> _Outcome:
        failure = Failure.of(statuses)
        if failure is not None:
            return _Outcome(error=self._error(failure))
        given = self._memory.answer(0)
        if given is not None:
            return _Outcome(given[1])
        lead = next(one for one in statuses if one.rank == 0)
        how = "rank 0 ended inside the function" if lead.code == 0 else lead.description
        return _Outcome(error=WorkerLost(f"{how}, so there is no result{self._progress.hint(0)}", [0]))

    def _error(self, failure: Failure) -> BaseException:
        """The exception of the worker that failed first; what became of the others is in its notes."""
        rank, report = failure.cause.rank, failure.cause.exit_report
        if report is None:
            text = failure.cause.description + self._progress.hint(rank)
            return WorkerLost(text, [rank]) if rank >= 0 else ServerLost(text)
        if report.usage:
            return UsageError(_as_arguments(report.message))
        error = self._raised(rank) or TeamError(f"{report.kind}: {report.message}", [rank])
        if not report.consequence:
            error.__cause__ = WorkerTraceback(rank, report.traceback)
        for sentence in [f"on rank {rank} of {self._options.workers}{self._progress.hint(rank)}", *failure.notes]:
            error.add_note(sentence)
        return error

    def _raised(self, rank: int) -> BaseException | None:
        """The exception of a worker; None if it cannot be copied."""
        with contextlib.suppress(Exception):
            given = self._memory.answer(rank)
            if given is not None and not given[0] and isinstance(given[1], BaseException):
                return given[1]
        return None


def _check(function: Callable[..., Any], strategy: str | Strategy | None) -> None:
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"launch takes a plain function first; it got {function!r}")
    if Launch.VARIABLE in os.environ or detected_engine() is not None:
        raise UsageError(
            "paceline.launch is called in a worker of a team, which cannot start another one; call paceline.join() "
            "to train with this team, or start the script with plain python"
        )
    if str(strategy).startswith("__main__:"):
        raise UsageError(
            f"strategy '{strategy}': its class is defined in the notebook or script itself, where the server cannot "
            "find it; put it into a module, as a file beside it, and import it"
        )


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return re.sub(r"[^\w.+-]", "", getattr(function, "__name__", type(function).__name__))


def _several(values: str | Sequence[str]) -> list[str]:
    return [values] if isinstance(values, str) else list(values)


def _as_arguments(sentence: str) -> str:
    """Options of `paceline run` as the arguments of `launch`: `workers` for `--workers`."""
    return re.sub(r"(?<!run )--([a-z]+(?:-[a-z]+)*)", lambda found: found[1].replace("-", "_"), sentence)
