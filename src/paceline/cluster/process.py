"""How a worker's process is set up."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let the C library keep large blocks that were freed, instead of giving them back to the system.

    A backward pass makes and frees all gradients, every step. By default glibc maps each large one anew, and the
    system zeroes its pages one by one: on a CPU that can take as long as the computing itself.
    """
    with contextlib.suppress(OSError, AttributeError):
        tune = ctypes.CDLL(None).mallopt
        tune(_M_MMAP_THRESHOLD, 1 << 30)
        tune(_M_TRIM_THRESHOLD, (1 << 31) - 1)
