"""Starts the workers of a benchmark and brings back what they measured."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.bench import memory, worker
from paceline.cluster.local import LocalEngine
from paceline.config import Launch
from paceline.errors import PacelineError

Result = TypeVar("Result")


def measure(task: worker.Task, workers: int, strategy: str | None = None, label: str = "") -> worker.Result:
    """Let contestants take turns on so many workers."""
    return _run(
        worker.__file__,
        lambda output: msgspec.structs.replace(task, output=output),
        worker.Result,
        workers,
        strategy,
        label,
    )


def weigh(task: memory.Task, workers: int, label: str = "") -> memory.Result:
    """Find out how much memory one contestant takes on so many workers."""
    return _run(
        memory.__file__,
        lambda output: msgspec.structs.replace(task, output=output),
        memory.Result,
        workers,
        None,
        label,
    )


def _run(
    script: str,
    task: Callable[[str], msgspec.Struct],
    result: type[Result],
    workers: int,
    strategy: str | None,
    label: str,
) -> Result:
    say = _say if sys.stderr.isatty() else lambda _line: None

    def relay(rank: int, _stream: str, line: bytes) -> None:
        if rank == 0 and line.startswith(b"round"):
            say(f"{label} {line.decode()}")

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        output = Path(folder) / "result.json"
        arguments = [msgspec.json.encode(task(str(output))).decode()]
        say(f"{label} starting")
        endings = LocalEngine(
            Path(script), arguments, workers, Launch(strategy=strategy, folder=folder), relay=relay
        ).run()
        say("")
        for ending in endings:
            if ending.failed:
                reason = ending.farewell.traceback if ending.farewell else ending.spoken
                raise PacelineError(f"the benchmark failed: {reason}")
        return msgspec.json.decode(output.read_bytes(), type=result)


def _say(line: str) -> None:
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
