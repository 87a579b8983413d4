"""Collectives in the profiles of torch.profiler, under the names that torch's own backends have there.

A call has two events: that of torch's operator, `c10d::allreduce_`, until the call returns, and that of the operation,
`paceline:all_reduce`, until it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _autograd
from torch.futures import Future

autograd: Any = _autograd
active = autograd._profiler_enabled
"""True while a profiler records this thread."""


class Record:
    """The event of an operation that was begun.

    A profiler sees the end of an event only in its own thread, or by a future, which takes the profiler along.
    """

    def __init__(self, event: str, tensors: Sequence[torch.Tensor]) -> None:
        handle = autograd._record_function_with_args_enter(f"paceline:{event}", *tensors)
        self._end: Future[None] = Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, self._end)
        self._thread = threading.get_ident()
        self._lock, self._ended = threading.Lock(), False

    def end(self) -> None:
        """Ends it, once; in another thread than the one that began it, by which profiles know asynchronous events."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if threading.get_ident() != self._thread:
                self._end.set_result(None)
                return
            other = threading.Thread(target=self._end.set_result, args=(None,))
            other.start()
            other.join()


class _Begun(threading.local):
    record: Record | None = None


_begun = _Begun()


@contextmanager
def recorded(operator: str, event: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Records the call in the block; the operation that it begins takes the event by `take`, and ends it."""
    call = autograd._record_function_with_args_enter(f"c10d::{operator}", *tensors)
    record = _begun.record = Record(event, tensors)
    try:
        yield
    finally:
        if take() is not None:  # nothing was begun
            record.end()
        autograd._record_function_with_args_exit(call)


def take() -> Record | None:
    """The event of the call that this thread is in, for the operation that it begins."""
    record = _begun.record
    if record is not None:
        _begun.record = None
    return record
