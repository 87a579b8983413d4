"""Handles of begun operations, as torch.distributed expects them."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from paceline.collectives.op_queue import OpQueue, QueuedOp
from paceline.collectives.profiling import Record
from paceline.observation.operations import Operation
from paceline.transport.mailbox import Transfer

_UNOBSERVED: contextlib.nullcontext[None] = contextlib.nullcontext()


class PacelineWork(Work):
    """Handle of an operation; `outputs` are the tensors that it fills."""

    operation: Operation | None = None
    """Of an observed process."""

    def __init__(self, outputs: Any = ()) -> None:
        super().__init__()
        self._outputs = outputs
        self._future: Future[Any] | None = None

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        if not self.is_completed():
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        return self._outputs

    def get_future(self) -> Future[Any]:
        if self._future is None:
            if self.operation is not None:
                self.operation.future = True
            self._future = Future()
            self._watch(self._complete)
        return self._future

    def _source_rank(self) -> int:
        raise RuntimeError("only a receive has a source")

    def source_rank(self) -> int:
        return self._source_rank()

    def _watch(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the operation is done."""
        callback()

    def _complete(self) -> None:
        future = self._future
        if future is None or future.done():
            return
        error = self.exception()
        with contextlib.suppress(RuntimeError):  # another thread was quicker
            if error is None:
                future.set_result(self._outputs)
            else:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


DONE = PacelineWork()
"""Handle of an operation that was done before its call returned."""


class QueuedWork(PacelineWork):
    """Handle of a collective in the group's queue."""

    def __init__(self, queue: OpQueue, run: Callable[[], None], outputs: Any) -> None:
        super().__init__(outputs)
        self._queue = queue
        self._op: QueuedOp = queue.submit(run)

    def is_completed(self) -> bool:
        return self._op.done

    def exception(self) -> BaseException | None:
        return self._op.error

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self.operation or _UNOBSERVED:
            self._queue.wait(self._op, _seconds(timeout))
        return True

    def _watch(self, callback: Callable[[], None]) -> None:
        self._op.on_done = callback
        if self._op.done:  # otherwise the queue calls it
            callback()


class P2PWork(PacelineWork):
    """Handle of a message that is sent or received."""

    def __init__(
        self,
        transfer: Transfer,
        outputs: list[torch.Tensor],
        back: Callable[[], None] | None = None,
        record: Record | None = None,
    ) -> None:
        """back: copies back what was received. record: ends with the transfer."""
        super().__init__(outputs)
        self._transfer, self._back, self._record = transfer, back, record
        self._lock = threading.Lock()
        if back is not None or record is not None:
            transfer.told = self._complete
            if transfer.done:
                self._complete()

    def is_completed(self) -> bool:
        if not self._transfer.done:
            self._transfer.look()
        if self._transfer.done:
            self._complete()
        return self._transfer.done

    def exception(self) -> BaseException | None:
        return self._transfer.error

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self.operation or _UNOBSERVED:
            self._transfer.wait(_seconds(timeout))
        self._complete()
        return True

    def _watch(self, callback: Callable[[], None]) -> None:
        self._transfer.told = self._complete
        if self._transfer.done:
            self._complete()

    def _complete(self) -> None:
        with self._lock:  # the second thread waits until the first has filled the tensor
            back, self._back = self._back, None
            if back is not None and self._transfer.error is None:
                back()
            if self._record is not None:
                self._record.end()
        super()._complete()

    def _source_rank(self) -> int:
        return self._transfer.peer


class GlooWork(PacelineWork):
    """Handle of a message that gloo receives from another machine."""

    def __init__(self, work: Work, back: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._back = work, back

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = _seconds(timeout)
        self._work.wait(datetime.timedelta(seconds=seconds)) if seconds else self._work.wait()
        self._back()
        return True

    def get_future(self) -> Future[Any]:
        return self._work.get_future()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


def _seconds(timeout: datetime.timedelta | None) -> float | None:
    """The timeout in seconds; None where there is none, which torch gives as zero or less."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None
