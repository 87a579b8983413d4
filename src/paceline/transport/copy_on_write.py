"""A process's own view of shared memory: it reads the shared values, and keeps what it writes to itself.

The memory is mapped a second time, copy-on-write. A page that the process has not written is the shared one, so the
view costs nothing and follows every change of it. A page that it has written is its own, until that is discarded.
"""

from __future__ import annotations

import mmap
import os
import resource
from typing import TYPE_CHECKING

import numpy as np

from paceline.transport.memory import Memory

if TYPE_CHECKING:
    import torch

_PAGE = mmap.PAGESIZE
_ENTRY = 8
"""Bytes of a page's entry in /proc/self/pagemap."""
_OF_FILE, _IN_USE = 1 << 61, 1 << 62 | 1 << 63
"""Bits of an entry: the page is one of the shared file; it is swapped out or in memory."""
_FEW = 64
"""Pages that are looked at more quickly than the process's page faults can be counted."""
_forks = 0
"""Forks between the first process and this one."""
_LOWEST = [int.from_bytes(b"\1\0\0\0\0\0\0\0" * count, "little") for count in range(_FEW + 1)]
"""By number of entries, an integer with the lowest bit of each set."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class CopyOnWriteView:
    """A copy-on-write view of a memory whose descriptor is open."""

    def __init__(self, memory: Memory) -> None:
        import torch

        self._map = mmap.mmap(memory.descriptor, memory.size, flags=mmap.MAP_PRIVATE)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._faults = -1
        """Page faults of this process at the last look."""
        self._clean = b""
        """Entries of pages at an earlier look, none of them written."""
        self._pages: tuple[int, int] | None = None
        """The process, by its number of forks, and its open pagemap."""

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def written(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Which of these bytes are in pages that this process has written since they were last discarded.

        All calls are about the same bytes until `discard`: only what was looked at is known to be clean.
        """
        first = start // _PAGE
        count = -(-stop // _PAGE) - first
        if count <= _FEW:
            entries = self._read_pagemap(first, count)
            if entries == self._clean:  # this is a part of every step
                return []
            if not _any_own(entries):
                self._clean = entries
                return []
        usage = resource.getrusage(resource.RUSAGE_SELF)
        faults = usage.ru_minflt + usage.ru_majflt
        if faults == self._faults:
            return []  # the first write to a page is a fault
        return self._own_pages(first, count, faults)

    def _own_pages(self, first: int, count: int, faults: int) -> list[tuple[int, int]]:
        entries = np.frombuffer(self._read_pagemap(first, count), dtype=np.uint64)
        own = (entries & np.uint64(_IN_USE) != 0) & (entries & np.uint64(_OF_FILE) == 0)
        if not own.any():
            self._faults = faults
            return []
        edges = np.flatnonzero(np.diff(np.concatenate(([0], own.astype(np.int8), [0]))))
        return [(int(one + first) * _PAGE, int(other + first) * _PAGE) for one, other in edges.reshape(-1, 2)]

    def forget(self) -> None:
        """The next look is about other bytes."""
        self._faults = -1

    def _read_pagemap(self, first: int, count: int) -> bytes:
        if self._pages is None or self._pages[0] != _forks:  # a fork has pages of its own
            self._pages = _forks, os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._pages[1], count * _ENTRY, (self._start // _PAGE + first) * _ENTRY)

    def discard(self) -> None:
        """Drop what this process has written: all pages are the shared ones again."""
        self._faults = -1
        self._map.madvise(mmap.MADV_DONTNEED)


def _any_own(entries: bytes) -> bool:
    """True if any of a few pages is the process's own; all at once."""
    bits = int.from_bytes(entries, "little")
    return bool((bits >> 62 | bits >> 63) & ~(bits >> 61) & _LOWEST[len(entries) // _ENTRY])
