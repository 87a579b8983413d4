"""A real Ray cluster of two nodes, in a network of its own that has a loopback and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.guard import PREFIX
from helpers.support import PACELINE, Outcome, Run, environment, started
from paceline.cluster.process import WITHOUT_AMX

RAY = str(Path(sys.executable).with_name("ray"))
PORT = "6379"  # nobody else is in that network
CORES = 3
"""Of each node, as Ray counts them."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
"""Lets Ray report nothing, and start no Python workers before somebody needs them."""

NODE = ["--num-cpus", str(CORES), "--object-store-memory", "80000000", "--disable-usage-stats"]
NODE += ["--include-log-monitor=false", "--no-monitor"]
"""Options of `ray start` for any node: no process for the driver's copy of logs, which a run does not ask for, and
none that would add nodes."""
HEAD = ["--head", "--port", PORT, "--include-dashboard=false"]


class RayNetwork:
    """Where the cluster is, and how to run something in it."""

    def __init__(self) -> None:
        self.name = f"{PREFIX}-ray-{os.getpid()}"
        self.scratch = tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)  # sockets need short names

    @property
    def variables(self) -> dict[str, str]:
        return {
            "RAY_ADDRESS": f"127.0.0.1:{PORT}",
            "RAY_TMPDIR": self.scratch.name,
            **QUIET,
            **WITHOUT_AMX,  # spares the doctor a look for it, which takes another process
            "TMPDIR": self.scratch.name,
        }

    def inside(self, *words: str | Path) -> list[str | Path]:
        return ["ip", "netns", "exec", self.name, *words]

    def up(self) -> None:
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        subprocess.run(self.inside("ip", "link", "set", "lo", "up"), check=True)
        for own in ([*HEAD, "--temp-dir", self.scratch.name], ["--address", self.variables["RAY_ADDRESS"]]):
            variables = environment(**{**self.variables, "RAY_ADDRESS": ""})
            words = self.inside(RAY, "start", *own, *NODE)
            done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=180, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

    def down(self) -> None:
        until = time.monotonic() + 20
        while pids := self.pids():
            assert time.monotonic() < until, f"still in the network: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        subprocess.run(["ip", "netns", "del", self.name], check=True)
        self.scratch.cleanup()

    def pids(self) -> list[int]:
        """Of all processes in this network."""
        done = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    def agents(self) -> list[int]:
        """Of Ray's processes that are ours."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if b"ray::Agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def folders(self) -> list[str]:
        """That runs keep on the nodes, and what is in them."""
        scratch = Path(self.scratch.name)
        return [str(path) for pattern in ("paceline-*", "paceline-*/**/*") for path in scratch.glob(pattern)]

    @contextlib.contextmanager
    def run(self, cwd: Path, *words: str | Path, **extra: str) -> Iterator[Run]:
        """`paceline …` in this network; its scripts can leave notes."""
        with started(self.inside(PACELINE, *words), cwd, **{**self.variables, **extra}) as run:
            yield run

    def finished(self, cwd: Path, *words: str | Path, seconds: float = 180.0, **extra: Any) -> Outcome:
        with self.run(cwd, *words, **extra) as run:
            return run.finish(seconds)


@contextlib.contextmanager
def ray_network() -> Iterator[RayNetwork]:
    network = RayNetwork()
    try:
        network.up()
        yield network
    finally:
        network.down()
