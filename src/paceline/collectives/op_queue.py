"""The queue of a group's collectives: one runs at a time, in the order in which they were begun.

A collective that is waited for runs in the waiting thread. Others run in a background thread, which is started when it
is first needed.
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
    """Runs the operations of a queue."""

    spin: bool
    """True to poll before sleeping; False in a background thread."""


class QueuedOp:
    """An operation that was begun."""

    __slots__ = ("done", "error", "on_done", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.done = False
        self.error: BaseException | None = None
        self.on_done: Callable[[], None] | None = None
        """Called once it is done, in the thread that ran it."""


class OpQueue:
    """Runs the operations of one group in order."""

    def __init__(self, executor: OpExecutor, fail: Callable[[str], None]) -> None:
        self._executor, self._fail_group = executor, fail
        self._lock = threading.Lock()
        self._queue: deque[QueuedOp] = deque()
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._count_lock = threading.Lock()
        self._workers = self._notifying = 0
        """Background threads, and how many of them are in callbacks."""
        self._threads: list[threading.Thread] = []
        self._broken: str | None = None
        """Why the group is unusable, if it is."""

    def run(self, run: Callable[[], None]) -> None:
        """Runs an operation in this thread, after all that were begun before."""
        if not self._queue and self._lock.acquire(blocking=False):
            try:
                if not self._queue:
                    if self._broken is not None:
                        raise self._closed_error()
                    self._executor.spin = True
                    run()
                    return
            except (Mismatch, UsageError):
                raise
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._lock.release()
        op = QueuedOp(run)
        self._queue.append(op)
        self.wait(op)

    def submit(self, run: Callable[[], None]) -> QueuedOp:
        """Begins an operation: it runs in the background, or in a thread that waits for it or for a later one."""
        op = QueuedOp(run)
        self._queue.append(op)
        if not self._workers:
            self._start_thread()
        self._signals.put(True)
        return op

    def wait(self, op: QueuedOp, timeout: float | None = None) -> None:
        """Waits until an operation is done; raises its error."""
        if timeout is None:
            while not op.done:
                self._advance(op, spin=True)
        else:
            until = time.monotonic() + timeout
            while not op.done:
                left = until - time.monotonic()
                if left <= 0:
                    raise TeamTimeout(f"an operation was not done after {timeout:g} s")
                # A thread that runs an operation cannot stop in its middle, so this one only polls.
                time.sleep(min(left, 0.001))
        if op.error is not None:
            raise op.error

    def close(self, seconds: float = 0.0) -> None:
        """Ends the background threads, and waits for them so long. Operations not done by then never run."""
        self._broken = self._broken or "the group was closed"
        for _ in range(self._workers):
            self._signals.put(False)
        until = time.monotonic() + seconds
        for thread in self._threads:
            if seconds and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while self._signals.get():  # one for each operation
            self._advance(None, spin=False)

    def _advance(self, until: QueuedOp | None, spin: bool) -> None:
        """Runs the queued operations, up to this one, in one thread at a time."""
        finished: list[Callable[[], None]] = []
        try:
            with self._lock:
                self._executor.spin = spin
                while self._queue and not (until is not None and until.done):
                    op = self._queue.popleft()
                    self._do(op, finished)
                    if finished and until is None:
                        break  # a callback may want to use the group at once
        finally:
            if finished:
                self._notify(finished)

    def _do(self, op: QueuedOp, finished: list[Callable[[], None]]) -> None:
        try:
            if self._broken is not None:
                raise self._closed_error()
            op.run()
        except (Mismatch, UsageError) as error:
            op.error = error
        except BaseException as error:
            self._fail(error)
            op.error = error
            if not isinstance(error, Exception):  # this thread was interrupted
                raise
        finally:
            op.done = True
            if op.on_done is not None:
                finished.append(op.on_done)

    def _notify(self, finished: list[Callable[[], None]]) -> None:
        """Runs callbacks. One may wait for another operation, so another thread must be free to run it."""
        with self._count_lock:
            self._notifying += 1
            alone = self._notifying >= self._workers
        if alone:
            self._start_thread()
        try:
            for on_done in finished:
                on_done()
        finally:
            with self._count_lock:
                self._notifying -= 1

    def _start_thread(self) -> None:
        with self._count_lock:
            self._workers += 1
        thread = threading.Thread(target=self._work, name="paceline-collectives", daemon=True)
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]
        thread.start()

    def _fail(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = (str(error) or type(error).__name__).splitlines()[0]
            self._fail_group(self._broken)

    def _closed_error(self) -> TeamError:
        return TeamError(f"this group can do nothing more, since an operation failed: {self._broken}")
