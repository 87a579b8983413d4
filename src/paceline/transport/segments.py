"""Tensors in shared memory, which other processes of this machine map instead of copying them."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import mmap
import os
import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch

from paceline.transport.memory import Memory

_HEADER = mmap.PAGESIZE
"""Bytes of a segment's first page, in which a byte is set once its owner has released it."""
_numbers = itertools.count(1)
_lock = threading.Lock()
_starts: list[int] = []
_segments: dict[int, Segment] = {}
_released: deque[Segment] = deque()


class Segment(NamedTuple):
    """The place of a tensor's memory, valid in other processes, too."""

    number: int
    """Never used twice by one process."""
    descriptor: int
    start: int
    size: int


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new zeroed tensor in shared memory; other members read and write it in place."""
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = Memory.create(_HEADER + count * dtype.itemsize)
    flat = memory.tensor(_HEADER, count, dtype)
    segment = Segment(next(_numbers), memory.descriptor, flat.data_ptr(), memory.size - _HEADER)
    with _lock:
        _forget_released()
        bisect.insort(_starts, segment.start)
        _segments[segment.start] = segment
    # The map lives exactly as long as a tensor on it, since only tensors refer to it.
    weakref.finalize(memory.map, _release, segment, os.getpid())
    memory.descriptor = -1  # kept open for processes that map it later
    return flat.view(shape)


def find(tensor: torch.Tensor) -> Segment | None:
    """The segment of this contiguous tensor; None if it is not in one."""
    if not _starts:
        return None
    address = tensor.data_ptr()
    with _lock:
        _forget_released()
        place = bisect.bisect_right(_starts, address) - 1
        if place < 0:
            return None
        segment = _segments[_starts[place]]
    return segment if address + tensor.nbytes <= segment.start + segment.size else None


def _release(segment: Segment, process: int) -> None:
    """Called by the garbage collector, in any thread and at any moment, so it takes no lock."""
    _released.append(segment)
    if os.getpid() != process:  # a fork releases its copy, not the owner's
        return
    with contextlib.suppress(OSError):
        os.pwrite(segment.descriptor, b"\1", 0)
        os.close(segment.descriptor)


def _forget_released() -> None:
    while _released:
        segment = _released.popleft()
        if _segments.get(segment.start) is segment:
            _starts.remove(segment.start)
            del _segments[segment.start]


class Mapped:
    """Segments of other processes that this one has mapped, each until its owner releases it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Memory, torch.Tensor]] = {}

    def tensor(self, pid: int, number: int, descriptor: int) -> torch.Tensor:
        """The bytes of a segment."""
        known = self._known.get((pid, number))
        if known is None:
            for key in [key for key, (memory, _) in self._known.items() if memory.bytes(0, 1)[0]]:
                del self._known[key]  # its owner has released it
            memory = Memory.of(pid, descriptor)
            memory.close_descriptor()
            known = memory, memory.tensor(_HEADER, memory.size - _HEADER, torch.uint8)
            self._known[pid, number] = known
        return known[1]
