"""Shared memory without a name, for processes of one machine.

A named segment in /dev/shm outlives a process that is killed before it cleans up, and is limited by the size of that
file system (64 MB in many containers). A memfd is neither: it lives exactly as long as a process maps it. Another
process of the same user reaches it through `/proc/<pid>/fd/<n>`, or inherits the descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch

_PAGE = mmap.PAGESIZE


class Memory:
    """A mapped region of shared memory; `tensor` and `bytes` are views of it, and keep it alive."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.map = mmap.mmap(descriptor, size)
        # Fewer, larger pages where the system allows them for shared memory; a hint, so a refusal is fine.
        with contextlib.suppress(AttributeError, OSError):
            self.map.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size: int) -> Memory:
        """New zeroed memory. The system provides its pages when they are first written."""
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        size = cls.rounded(size)
        try:
            os.ftruncate(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            if error.errno != errno.EFBIG:
                raise
            raise UsageError(
                f"{size:,} bytes of shared memory are more than the largest file that is allowed (ulimit -f); raise it"
            ) from None
        return cls(descriptor, size)

    @staticmethod
    def rounded(size: int) -> int:
        """Bytes of memory that is created with this size."""
        return max(_PAGE, -(-size // _PAGE) * _PAGE)

    @classmethod
    def inherited(cls, descriptor: int) -> Memory:
        """The memory behind a descriptor that the parent process handed down."""
        return cls(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def of(cls, pid: int, descriptor: int) -> Memory:
        """The memory of another process of this machine."""
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
            own = os.dup(file.fileno())
        return cls(own, os.fstat(own).st_size)

    def close_descriptor(self) -> None:
        """Closes the descriptor, once no other process has to open it; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def bytes(self, offset: int, size: int) -> memoryview:
        return memoryview(self.map)[offset : offset + size]

    def drop(self, start: int, stop: int) -> None:
        """Gives whole pages between these bytes back to the system, for all processes; they read as zeros then."""
        first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
        if first < last:
            self.map.madvise(mmap.MADV_REMOVE, first, last - first)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        import torch  # only here: a launcher that makes memory for others need not load it

        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset)
