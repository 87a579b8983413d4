"""SIGTERM to a worker: its script ends between two steps, as by `sys.exit()`, within the grace time.

A script that has a SIGTERM handler of its own decides itself when it ends.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from types import FrameType

PREEMPTED = 128 + signal.SIGTERM
"""The exit code of a worker that has left because of SIGTERM."""

_told = False
"""True if this process is a worker that was told to leave."""
_armed: tuple[int, float] | None = None
"""The worker's rank and its grace time in seconds, once it has joined."""


def arm(rank: int, grace: float) -> None:
    """Lets SIGTERM tell this worker to leave, unless its script handles SIGTERM; grace: in seconds."""
    global _armed
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _armed = rank, grace
        signal.signal(signal.SIGTERM, _notice)


def was_told() -> bool:
    """True if this worker was told to leave."""
    return _told


def leave_if_told() -> None:
    """Ends the script of a worker that was told to leave. Called where no step is begun."""
    if _told:
        raise SystemExit(PREEMPTED)


def _notice(_number: int, _frame: FrameType | None) -> None:
    global _told
    if not _told:
        _told = True
        # Without `threading`, whose locks the interrupted code may hold.
        _thread.start_new_thread(_end_in_time, ())


def _end_in_time() -> None:
    """Ends the process when the grace time is over: to the others its step is then that of a killed worker."""
    rank, grace = _armed or (0, 0.0)
    time.sleep(grace)
    os.write(2, f"paceline: rank {rank} was told to leave (SIGTERM) and has not left within {grace:g} s\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _forked() -> None:
    """A fork of the worker, as a loader process, ends by SIGTERM as any process does."""
    global _told, _armed
    if _armed is not None and signal.getsignal(signal.SIGTERM) is _notice:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _told, _armed = False, None


os.register_at_fork(after_in_child=_forked)
