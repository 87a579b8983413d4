"""The parent process of a test session: ends whatever the session leaves behind, and records how busy the machine is.

Tests fork teams, start Ray and Chromium and make network namespaces. An interrupted session ends none of them.
So `pytest` forks at its start: the child is the session, and the parent (the guard) adopts every orphan of it
(PR_SET_CHILD_SUBREAPER), passes signals on, and kills all that is left once the session has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
GRACE = 3.0
"""Seconds that processes have to end by themselves after the session."""
PREFIX = "paceline"
"""Network namespaces of tests are called paceline-<process id>-…."""

VARIABLE = "PACELINE_TEST_LOAD"
"""Names the file in which the guard records the load."""
PERIOD = 0.1
"""Seconds between two records."""
RECORDS = 6000
"""Records kept: ten minutes."""
SLOT = struct.Struct("dd")
"""One record: the time on the steady clock, and the runnable tasks per core."""


def start() -> None:
    """Forks a session off. Returns in the child; the parent never returns, and exits as the session does."""
    descriptor = os.memfd_create("load")
    os.ftruncate(descriptor, RECORDS * SLOT.size)
    parent = os.getpid()
    os.environ[VARIABLE] = f"/proc/{parent}/fd/{descriptor}"
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    session = os.fork()
    if session:
        _watch(session, mmap.mmap(descriptor, 0))
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    signal.signal(signal.SIGINT, _interrupts)
    os.register_at_fork(after_in_child=_reset_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_PASSED_ON, signal.SIGCHLD})


def _reset_signals() -> None:
    """Gives a process that a test forks the signal handlers of any Python process."""
    if signal.getsignal(signal.SIGINT) is _interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _terminated:
            signal.signal(number, signal.SIG_DFL)


class _Interrupts:
    """Raises KeyboardInterrupt once: a signal to the process group comes a second time through the guard."""

    def __init__(self) -> None:
        self._last = -1.0

    def __call__(self, *_: object) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before > 1.0:
            raise KeyboardInterrupt


_interrupts = _Interrupts()


def _terminated(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the session at once
    raise KeyboardInterrupt(signal.Signals(number).name)


def _watch(session: int, load: mmap.mmap) -> None:
    """Records the load until the session has ended, and ends what is left of it."""
    code = 1
    try:
        code = _record_until_end(session, load)
        left = _end_all()
        if left:
            os.write(2, f"the session left processes behind, which were ended: {', '.join(left)}\n".encode())
        remove_namespaces()
    finally:
        os._exit(code)


def _record_until_end(session: int, load: mmap.mmap) -> int:
    number, due = 0, time.monotonic()
    cores = len(os.sched_getaffinity(0))
    while True:
        due += PERIOD
        while (rest := due - time.monotonic()) > 0:
            received = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, rest)
            if received is None:
                continue
            if received.si_signo != signal.SIGCHLD:
                # SI_KERNEL: the terminal has sent it to the session, too.
                if received.si_code != 0x80:
                    os.kill(session, received.si_signo)
                continue
            for pid, status in _reaped():
                if pid == session:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
        SLOT.pack_into(load, number % RECORDS * SLOT.size, time.monotonic(), _runnable() / cores)
        number += 1
        due = max(due, time.monotonic())


def _runnable() -> int:
    """Tasks that run or could run now; this one is not counted."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("procs_running"):
            return int(line.split()[1]) - 1
    return 0


def _reaped() -> list[tuple[int, int]]:
    """Children that have ended, with their status."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _end_all() -> list[str]:
    """Ends all descendants (orphans become children); returns the names of those that it had to kill."""
    until = time.monotonic() + GRACE
    while children() and time.monotonic() < until:
        time.sleep(0.02)
        _reaped()
    names = []
    while pids := children():
        for pid in pids:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                names.append(f"{pid} ({words[:80].strip()})")
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return names


def children(parent: int | None = None) -> list[int]:
    """Direct children of a process, by default this one; zombies are not counted."""
    parent = parent or os.getpid()
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return found


def remove_namespaces() -> None:
    """Removes network namespaces of tests whose process is gone."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{PREFIX}-*") if folder.exists() else ():
        pid = next(word for word in path.name.split("-")[1:] if word.isdecimal())
        if not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)
