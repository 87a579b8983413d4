"""Many tiny workers on one parameter server: updates per second, and what an update costs the server itself.

`python benchmarks/crowd.py --workers 4,16,64`

Workers share the machine's cores with the server, so that the rate is that of all of them together; the server's own
CPU time and memory say what it could do, and whether that depends on the number of workers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

UPDATES = 6400
_TICK = os.sysconf("SC_CLK_TCK")


def server_of_run() -> Path:
    """The server's folder in /proc: it has the same parent as this worker."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        if parent == os.getppid() and any(one.endswith(b"server/main.py") for one in arguments):
            return folder
    raise SystemExit("no server was found: run this under a strategy with a server process")


def cost(server: Path) -> tuple[float, float]:
    """CPU seconds and megabytes of a process."""
    fields = (server / "stat").read_text().rpartition(")")[2].split()
    resident = re.search(r"VmRSS:\s+(\d+)", (server / "status").read_text())
    assert resident is not None
    return (int(fields[11]) + int(fields[12])) / _TICK, int(resident[1]) / 1024


def work() -> None:
    import paceline

    torch.set_num_threads(1)
    team = paceline.join()
    workers = team.world_size
    model: Any = torch.nn.Linear(8, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(UPDATES, 8), torch.randn(UPDATES, 2))
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(data, workers, shuffle=True))
    server = server_of_run() if team.rank == 0 else None
    for epoch in range(2):  # the first warms up
        team.barrier()
        before, start = cost(server) if server else (0.0, 0.0), time.perf_counter()
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        team.barrier()
        if server and epoch:
            seconds, after = time.perf_counter() - start, cost(server)
            print(
                f"{workers:>3} workers: {UPDATES / seconds:.0f} updates/s; the server: "
                f"{1e6 * (after[0] - before[0]) / UPDATES:.0f} us of CPU per update, {after[1]:.0f} MB "
                f"({after[1] - before[1]:+.1f} MB in {UPDATES} updates)",
                flush=True,
            )


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1] == "work":
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,16,64")
    parser.add_argument("--strategy", default="async")
    options = parser.parse_args()
    for workers in options.workers.split(","):
        command = [sys.executable, "-m", "paceline", "run", __file__, "--workers", workers, "--no-record"]
        subprocess.run([*command, "--strategy", options.strategy, "--", "work"], check=True)


if __name__ == "__main__":
    main()
