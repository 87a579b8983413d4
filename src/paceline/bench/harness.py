"""Starts the workers of a benchmark and brings back what they measured."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from paceline.bench import worker
from paceline.bench.worker import Result, Task
from paceline.cluster.local import LocalEngine
from paceline.config import Launch
from paceline.errors import PacelineError


def measure(task: Task, workers: int, strategy: str | None = None, label: str = "") -> Result:
    """Run a task on so many workers; shows its progress on stderr."""

    def relay(rank: int, stream: str, line: bytes) -> None:
        if rank == 0 and line.startswith(b"round") and sys.stderr.isatty():
            print(f"\r\033[K{label} {line.decode()}", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        output = Path(folder) / "result.json"
        asked = msgspec.structs.replace(task, output=str(output))
        launch = Launch(strategy=strategy, folder=folder)
        engine = LocalEngine(Path(worker.__file__), [msgspec.json.encode(asked).decode()], workers, launch, relay=relay)
        endings = engine.run()
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        for ending in endings:
            if ending.failed:
                reason = ending.farewell.traceback if ending.farewell else ending.spoken
                raise PacelineError(f"the benchmark failed: {reason}")
        return msgspec.json.decode(output.read_bytes(), type=Result)
