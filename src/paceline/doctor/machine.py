"""Checks of one machine. Each one does the operation that a run needs, and reports the result."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.doctor import libraries, sharing
from paceline.doctor.findings import Finding, Machine, cannot, limits, ok

_FEW_FILES = 1024
_LITTLE = 1 << 30


def system() -> Finding:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return cannot("system", found, "several workers need Linux; one worker runs anywhere")
    return ok("system", found)


def cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    quota = _allowed("cpu")
    found = f"{usable} usable of {os.cpu_count()}"
    if quota is not None and quota < usable:
        return limits(
            "cores", f"{found}, but a quota of {quota:g}", f"start at most {max(1, int(quota))} workers, or raise it"
        )
    return ok("cores", found)


def memory() -> Finding:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(facts[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    bound = _allowed("memory")
    found = f"{_size(total)}, {_size(free)} of it available"
    if bound is not None and bound < total:
        found += f"; this container may use {_size(bound)}"
    if min(free, bound or free) < _LITTLE:
        return limits("memory", found, "each worker takes about 300 MB before its model; free some, or start few")
    return ok("memory", found)


def loader_memory() -> Finding:
    """Checks /dev/shm: the parameters are not there, but the batches of a DataLoader's processes are."""
    size = shutil.disk_usage("/dev/shm").total
    if size < 256 << 20:
        return limits(
            "/dev/shm",
            f"{_size(size)}; Paceline does without, a DataLoader with num_workers does not",
            "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm",
        )
    return ok("/dev/shm", _size(size))


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return limits("open files", f"at most {soft}", f"ulimit -n 4096 (up to {most} are allowed here)")
    return ok("open files", f"at most {_limit(soft)}")


def processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < 256:
        return limits("processes", f"at most {soft}", "ulimit -u 4096: each worker has some threads, which count")
    return ok("processes", f"at most {_limit(soft)}")


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"at most {_size(soft)}"
    return ok("locked memory", f"{found}; only accelerators and InfiniBand need it")


def ports() -> Finding:
    """Checks that a port of the loopback can be listened on and connected to."""
    try:
        with socket.socket() as server:
            server.settimeout(5.0)
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), 5.0), server.accept()[0]:
                pass
    except OSError as error:
        return cannot("ports", f"the loopback cannot be reached: {error.strerror or error}", "ip link set lo up")
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return ok("ports", f"loopback works, {int(high) - int(low):,} ports to choose from")


def name() -> Finding:
    host = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        return limits(
            "host name",
            f"'{host}' has no address: {error.strerror}",
            f"add '127.0.1.1 {host}' to /etc/hosts, or set GLOO_SOCKET_IFNAME, before using gloo",
        )
    return ok("host name", f"{host} is {', '.join(found[:3])}")


def folder() -> Finding:
    """Checks the current folder, in which runs make `runs/`."""
    here = Path.cwd()
    if not os.access(here, os.W_OK):
        return cannot("folder", f"{here} cannot be written to", "go to a folder of yours: runs leave runs/NAME there")
    free = shutil.disk_usage(here).free
    if free < _LITTLE:
        return limits("folder", f"{_size(free)} free", "events and checkpoints are written there; make room")
    return ok("folder", f"{_size(free)} free")


def _allowed(what: str) -> float | None:
    """How much the control group may use: cores of `cpu`, bytes of `memory`."""
    try:
        amount, *period = Path(f"/sys/fs/cgroup/{what}.max").read_text().split()
        return int(amount) / int(period[0] if period else 1)
    except (OSError, ValueError):  # there is no file, or the amount is "max"
        return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TB"


Check = Callable[[], Finding]
Tick = Callable[[str], None]
CHECKS: tuple[Check, ...] = (
    system,
    cores,
    memory,
    libraries.devices,
    sharing.shared_memory,
    sharing.siblings,
    sharing.direct_reads,
    sharing.waking,
    sharing.huge_pages,
    loader_memory,
    open_files,
    processes,
    locked_memory,
    libraries.torch_itself,
    libraries.bfloat16,
    libraries.gloo,
    libraries.encryption,
    libraries.ray,
    ports,
    name,
    folder,
)


def examine(checks: Sequence[Check] = CHECKS, tick: Tick = lambda _words: None) -> Machine:
    """Run all checks. An unexpected error of a check is a finding as well.

    tick: is told what is checked.
    """
    findings = []
    for check in checks:
        what = check.__name__.replace("_", " ")
        tick(f"checking {what}")
        try:
            findings.append(check())
        except Exception as error:
            findings.append(limits(what, f"the check failed: {type(error).__name__}: {error}", "see the message"))
    return Machine(host=socket.gethostname(), findings=findings)
