"""The order of a group's collectives: one at a time, as they were begun, by whichever thread has time.

A collective that is waited for is done by whoever waits. One that is not, is done by a thread in the background, which
is started when it is first needed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from paceline.errors import Mismatch, TeamError, TeamTimeout, UsageError


class OpExecutor(Protocol):
    """Whoever does the work."""

    spin: bool
    """Whether to wait by looking for a while; not from a thread in the background."""


class QueuedOp:
    """Something that was begun."""

    __slots__ = ("done", "error", "run", "told")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.done = False
        self.error: BaseException | None = None
        self.told: Callable[[], None] | None = None
        """Called once it is done, from whatever thread did it."""


class OpQueue:
    """Does the jobs of one group in their order."""

    def __init__(self, engine: OpExecutor, give_up: Callable[[str], None]) -> None:
        self._engine, self._give_up = engine, give_up
        self._turn = threading.Lock()
        self._queue: deque[QueuedOp] = deque()
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._staff = threading.Lock()
        self._workers = self._telling = 0
        """Threads in the background, and how many of them are telling somebody that a job is done."""
        self._threads: list[threading.Thread] = []
        self._broken: str | None = None
        """Why the group can do nothing more: it was left in the middle of something."""

    def now(self, run: Callable[[], None]) -> None:
        """Do it in this thread, after all that was begun before."""
        if not self._queue and self._turn.acquire(blocking=False):
            try:
                if not self._queue:
                    if self._broken is not None:
                        raise self._refusal()
                    self._engine.spin = True
                    run()
                    return
            except (Mismatch, UsageError):
                raise
            except BaseException as error:
                self._break(error)
                raise
            finally:
                self._turn.release()
        job = QueuedOp(run)
        self._queue.append(job)
        self.wait(job)

    def later(self, run: Callable[[], None]) -> QueuedOp:
        """Begin it: it will be done in the background, or by whoever waits for it or for a later one."""
        job = QueuedOp(run)
        self._queue.append(job)
        if not self._workers:
            self._hire()
        self._signals.put(True)
        return job

    def wait(self, job: QueuedOp, timeout: float | None = None) -> None:
        """Until it is done; raises what went wrong."""
        if timeout is None:
            while not job.done:
                self._advance(job, spin=True)
        else:
            until = time.monotonic() + timeout
            while not job.done:
                left = until - time.monotonic()
                if left <= 0:
                    raise TeamTimeout(f"an operation was not done after {timeout:g} s")
                # Whoever does the job can not leave it half done, so this thread only looks.
                time.sleep(min(left, 0.001))
        if job.error is not None:
            raise job.error

    def close(self, seconds: float = 0.0) -> None:
        """End the threads in the background; wait for them so long. What is not done by then never will be."""
        self._broken = self._broken or "the group was closed"
        for _ in range(self._workers):
            self._signals.put(False)
        until = time.monotonic() + seconds
        for thread in self._threads:
            if seconds and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while self._signals.get():  # one for each job
            self._advance(None, spin=False)

    def _advance(self, until: QueuedOp | None, spin: bool) -> None:
        """Do what is in the queue, up to this job, one thread at a time."""
        finished: list[Callable[[], None]] = []
        try:
            with self._turn:
                self._engine.spin = spin
                while self._queue and not (until is not None and until.done):
                    job = self._queue.popleft()
                    self._do(job, finished)
                    if finished and until is None:
                        break  # whoever is told may want to go on with the group at once
        finally:
            if finished:
                self._tell(finished)

    def _do(self, job: QueuedOp, finished: list[Callable[[], None]]) -> None:
        try:
            if self._broken is not None:
                raise self._refusal()
            job.run()
        except (Mismatch, UsageError) as error:
            job.error = error
        except BaseException as error:
            self._break(error)
            job.error = error
            if not isinstance(error, Exception):  # it is this thread that was interrupted
                raise
        finally:
            job.done = True
            if job.told is not None:
                finished.append(job.told)

    def _tell(self, finished: list[Callable[[], None]]) -> None:
        """Whoever is told may well wait for another operation, so somebody must be free to do it."""
        with self._staff:
            self._telling += 1
            alone = self._telling >= self._workers
        if alone:
            self._hire()
        try:
            for told in finished:
                told()
        finally:
            with self._staff:
                self._telling -= 1

    def _hire(self) -> None:
        with self._staff:
            self._workers += 1
        thread = threading.Thread(target=self._work, name="paceline-collectives", daemon=True)
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]
        thread.start()

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = _first_line(error)
            self._give_up(self._broken)

    def _refusal(self) -> TeamError:
        return TeamError(f"this group can do nothing more, since an operation failed: {self._broken}")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
