"""Checks that processes of this machine can share memory, read each other's, and wake each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from paceline.doctor.findings import Finding, cannot, limits, ok
from paceline.transport.futex import FutexArray
from paceline.transport.memory import Memory

_TRY = 64 << 20
"""Bytes of shared memory that the check allocates."""

_OWNER = """
import ctypes, os, sys
descriptor = os.memfd_create("try")
os.write(descriptor, b"paceline")
content = ctypes.create_string_buffer(b"paceline")
print(os.getpid(), descriptor, ctypes.addressof(content), flush=True)
sys.stdin.read()
"""
_OPENER = """
import sys
print(open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", "r+b", buffering=0).read(8).decode())
"""
_READER = """
import ctypes, os, sys
class Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))
library, here = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(8)
ours, theirs = Span(ctypes.addressof(here), 8), Span(int(sys.argv[3]), 8)
if library.process_vm_readv(int(sys.argv[1]), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) != 8:
    sys.exit(os.strerror(ctypes.get_errno()))
print(here.raw.decode())
"""


def shared_memory() -> Finding:
    """Checks memfd, which has no name and so leaves nothing behind, for parameters and gradients."""
    try:
        memory = Memory.create(_TRY)
    except OSError as error:
        return cannot("shared memory", f"memfd_create: {error.strerror}", "allow memfd_create in the sandbox")
    view = memory.bytes(_TRY - 8, 8)
    view[:] = b"paceline"
    view.release()
    memory.close_descriptor()
    return ok("shared memory", "memfd works, of any size that the memory allows")


def siblings() -> Finding:
    """Checks that a process can open shared memory of another."""
    trouble = _between_children(_OPENER)
    if trouble:
        return cannot(
            "memory of others",
            f"a process cannot open another's descriptor in /proc: {trouble}",
            "start all workers as one user, in one pid namespace, with /proc mounted without hidepid",
        )
    return ok("memory of others", "processes open each other's shared memory")


def direct_reads() -> Finding:
    """Checks process_vm_readv, by which collectives read tensors of other workers in place."""
    trouble = _between_children(_READER)
    if trouble:
        return limits(
            "direct reads",
            f"process_vm_readv: {trouble}; collectives copy through shared memory instead",
            "sysctl kernel.yama.ptrace_scope=0, or --cap-add SYS_PTRACE for a container",
        )
    return ok("direct reads", "process_vm_readv works between processes")


def waking() -> Finding:
    """Checks the futex by which a process sleeps until another wakes it, and pidfds."""
    memory = Memory.create(FutexArray.STRIDE)
    words = FutexArray(memory.bytes(0, FutexArray.STRIDE), 1)
    waker = threading.Timer(0.05, words.write, (0, 1))
    start = time.monotonic()
    waker.start()
    while words.values[0] == 0 and time.monotonic() - start < 2.0:
        words.sleep(0, 0, 2.0)
    took = time.monotonic() - start
    waker.join()
    memory.close_descriptor()
    if took >= 1.5:
        return cannot("waking", f"a sleeper was woken after {took:.1f} s only", "allow the futex call in the sandbox")
    os.close(os.pidfd_open(os.getpid()))  # by which workers detect that one has died
    return ok("waking", "futex and pidfd work")


def huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not path.exists():
        return limits("huge pages", "this kernel has none for shared memory", "nothing: large models go a bit slower")
    chosen = path.read_text().partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        return limits("huge pages", f"'{chosen}' for shared memory", f"echo advise > {path} (large models go faster)")
    return ok("huge pages", f"'{chosen}' for shared memory")


def _between_children(source: str) -> str:
    """The error when one child process does this to another; empty if it works."""
    owner = subprocess.Popen(
        [sys.executable, "-S", "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        where = owner.stdout.readline().split()
        done = subprocess.run(
            [sys.executable, "-S", "-c", source, *where], capture_output=True, text=True, timeout=20, check=False
        )
        owner.kill()
    if done.returncode == 0 and done.stdout.strip() == "paceline":
        return ""
    return (done.stderr.strip().splitlines() or ["the content differs"])[-1]
