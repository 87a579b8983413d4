"""The memory that this process can still have: of its machine, its cgroup, and its own limits."""

from __future__ import annotations

import math
import resource
from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use, in both versions; inside a container these are its own."""


def free_memory(sharing: int = 1) -> float:
    """Bytes; sharing: processes of this machine that divide what it has free."""
    free = _lines("/proc/meminfo").get("MemAvailable", math.inf)
    for limit, used in _CGROUPS:
        most = _number(limit)
        free = min(free, most - min(most, _number(used, 0.0)))
    own = _lines("/proc/self/status")
    limits = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))
    left = [most - own[name] for kind, name in limits if (most := resource.getrlimit(kind)[0]) >= 0 and name in own]
    return max(0.0, min(free / sharing, *left, math.inf))


def _lines(path: str) -> dict[str, float]:
    """The sizes in a file of /proc, in bytes."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines)
    return {words[0].rstrip(":"): float(words[1]) * 1024 for words in parts if len(words) == 3 and words[2] == "kB"}


def _number(path: str, without: float = math.inf) -> float:
    try:
        return float(Path(path).read_text())
    except (OSError, ValueError):  # also "max"
        return without
