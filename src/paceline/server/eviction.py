"""Ends workers that are silent for too long, so that the others can go on without them.

The process itself is ended, not only its session: one that was stopped could wake up while it writes a gradient
into memory that another worker of its rank has by then.
"""

from __future__ import annotations

import os
from typing import Protocol

from paceline.cluster.process import end_process


class _Connection(Protocol):
    @property
    def open(self) -> bool: ...


def end_connected(pid: int, connection: _Connection) -> bool:
    """Ends a process of this machine that has the other end of a connection; False if that cannot be."""
    if pid == os.getpid():  # a server in a thread of this worker
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # As long as its connection is open, no other process has its id.
        return not connection.open or end_process(descriptor)
    finally:
        os.close(descriptor)
