"""Settings of a worker's process: its memory allocator; and its use of memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_DYING = 2.0
"""Seconds in which a killed process ends, unless the kernel itself waits for something."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_BFLOAT16 = """
import torch
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.nn.Linear(64, 64)(torch.randn(64, 64)).sum().backward()
"""
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""Environment variables for workers where `bfloat16_dies`."""


def bfloat16_dies() -> bool:
    """True if computing in bfloat16 kills torch here: some virtual machines announce AMX but cannot run it."""
    if WITHOUT_AMX.keys() & os.environ.keys():
        return False
    return (
        subprocess.run([sys.executable, "-c", _BFLOAT16], check=False, capture_output=True).returncode == -signal.SIGILL
    )


def keep_freed_memory() -> None:
    """Lets the C library keep large blocks that were freed, instead of returning them to the system.

    A backward pass makes and frees all gradients, every step. By default glibc maps each large one anew, and the
    system zeroes its pages one by one: on a CPU that can take as long as the computing itself.
    """
    _tune(1 << 30, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Undoes `keep_freed_memory`: sets the limits that glibc itself reaches once a program has freed a large block."""
    _tune(32 << 20, 64 << 20)
    release_freed_memory()


def release_freed_memory() -> None:
    """Returns memory that was freed until now to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def proportional_memory(*addresses: int) -> int:
    """Bytes of this process, shared ones divided by the number of sharers (PSS); or only at these addresses."""
    if not addresses:
        return _pss(Path("/proc/self/smaps_rollup").read_text())
    total = 0
    # Each entry begins with its address range.
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, _, stop = entry.split(maxsplit=1)[0].partition("-")
        if any(int(start, 16) <= address < int(stop, 16) for address in addresses):
            total += _pss(entry)
    return total


def end_process(descriptor: int, patience: float = 0.0) -> bool:
    """Kills a process, also one that is stopped, by its pidfd; False if that is not allowed.

    From then on it runs none of its own code, even if the kernel cannot end it yet: one that waits for a device or a
    file system dies before its next instruction.

    patience: seconds in which it may end by itself.
    """
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    if waiting.poll(patience * 1e3):
        return True
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    waiting.poll(_DYING * 1e3)
    return True


def killed_in_fork(work: Callable[[], None]) -> str:
    """Runs this in a fork, which ends with this process, however that ends; how it was killed, empty if it was not."""
    own = os.getpid()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() == own:
                work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # nothing is left to do, and shared memory need not be unmapped piece by piece
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code > 0:
        sys.exit(code)
    return f"killed by signal {-code} ({signal.Signals(-code).name})" if code else ""


def is_stopped(pid: int) -> bool:
    """True if a process, or one that it has started, was stopped by a signal, so that it cannot even end by itself."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return True
        return any(map(is_stopped, map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())))
    return False


def _tune(map_from: int, trim_from: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        tune = ctypes.CDLL(None).mallopt
        if not tune(_M_MMAP_THRESHOLD, map_from):  # older C libraries take no more than this
            tune(_M_MMAP_THRESHOLD, 32 << 20)
        tune(_M_TRIM_THRESHOLD, trim_from)


def _pss(entry: str) -> int:
    return next(1024 * int(line.split()[1]) for line in entry.splitlines() if line.startswith("Pss:"))


def is_alive(pid: int) -> bool:
    """True if a process has not ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        waiting = select.poll()  # a process may have more files open than select() can tell apart
        waiting.register(descriptor, select.POLLIN)
        return not waiting.poll(0)
    finally:
        os.close(descriptor)


def started_at(pid: int) -> float:
    """When a process was started, in seconds since the epoch; infinity if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return float("inf")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
