"""Runs a script for a short time under two strategies, to calibrate a plan."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import PacelineError, UsageError

STRATEGIES = ("async", "sync")
"""The first shows every worker's own pace, since none waits; both together show the cost of staleness."""
_START = 180.0
"""Seconds within which the first events must be recorded."""


def profile(
    script: Path,
    arguments: Sequence[str],
    workers: int,
    options: Sequence[str],
    seconds: float,
    folder: Path,
    tick: Callable[[str, float], None] = lambda _what, _share: None,
) -> list[Path]:
    """Trains for `seconds` under each strategy; returns the folders of the recorded runs."""
    runs: list[Path] = []
    for strategy in STRATEGIES:
        where = folder / strategy
        where.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "paceline", "run", str(script.resolve()), "--workers", str(workers), "--quiet"]
        command += ["--strategy", strategy, "--name", "profile", *options, "--", *arguments]
        with (
            (where / "output.txt").open("wb") as output,
            subprocess.Popen(
                command, cwd=where, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
        ):
            try:
                _watch(process, where / "runs" / "profile", strategy, seconds, tick)
            finally:
                _stop(process)
        if process.returncode not in (0, 130):
            lines = (where / "output.txt").read_text(errors="replace").strip().splitlines()
            said = [line for line in lines if line.startswith("paceline: ")] or lines[-1:]
            why = next((line for line in said if " failed: " in line), said[-1] if said else "")
            why = why.removeprefix("paceline: ") or f"it ended with code {process.returncode}"
            raise UsageError(f"the script could not be profiled under {strategy}: {why}")
        runs.append(where / "runs" / "profile")
    return runs


def _watch(
    process: subprocess.Popen[bytes], run: Path, strategy: str, seconds: float, tick: Callable[[str, float], None]
) -> None:
    """Waits for `seconds` from the start of training, or until the process ends."""
    begin, trained = time.monotonic(), None
    while process.poll() is None:
        now = time.monotonic()
        if trained is None:
            if any(file.stat().st_size > 4096 for file in (run / "streams").glob("*.jsonl")):
                trained = now
            elif now - begin > _START:
                raise PacelineError(f"the script did not begin to train under {strategy} within {_START:g} s")
        elif now - trained >= seconds:
            return
        tick(strategy, 0.0 if trained is None else min(1.0, (now - trained) / seconds))
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stops the run like Ctrl-C, after which its events are merged."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
