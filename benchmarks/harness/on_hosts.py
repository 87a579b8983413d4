"""Starts the workers of a benchmark on several hosts, which are network namespaces on a bridge (as root)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from helpers.hosts import Host, hosts

__all__ = ["hosts", "run_workers"]

_SECONDS = 600


def run_workers(hosts: Sequence[Host], workers: int, port: int, more: Mapping[str, str] | None = None) -> Any:
    """Run this program again as every worker, `workers` on each host; returns the last line of rank 0, a JSON value."""
    processes = []
    for number, host in enumerate(hosts):
        for local in range(workers):
            place = {
                "RANK": str(number * workers + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(len(hosts) * workers),
                "LOCAL_WORLD_SIZE": str(workers),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(port),
                "TP_SOCKET_IFNAME": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "HOST": host.address,
            }
            out = subprocess.PIPE if number == local == 0 else subprocess.DEVNULL
            environment = {**os.environ, **place, **(more or {})}
            processes.append(host.popen([sys.executable, *sys.argv], env=environment, stdout=out, text=True))
    printed, _ = processes[0].communicate(timeout=_SECONDS)
    codes = [process.wait(60) for process in processes]
    if any(codes):
        sys.exit(f"the workers ended with {codes}")
    return json.loads(printed.splitlines()[-1])
