"""Replays a trace of spot instances against a run: which come, which are told to go, and which are gone at once."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.contestants import ENVIRONMENT, PEERS

TRACE = Path(__file__).resolve().parents[1] / "traces" / "spot.csv"
STRATEGIES = ("all-reduce", "k-batch-async:k=2")
NOTICE = 2.0
"""Minutes of the trace from the notice until the instance is taken away."""
SAMPLES, EACH = 6400, 0.001
"""Samples of an epoch, and seconds of a device for one."""
_COLUMNS = ("seconds", "samples/s", "goodput", "came", "told", "lost", "off", "ended")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, default=TRACE, help="lines of minute, event and instance")
    parser.add_argument(
        "--minute", type=float, default=1.0, help="seconds that a minute of the trace takes (default: 1)"
    )
    parser.add_argument("--strategy", action="append", help=f"repeatable (default: {', '.join(STRATEGIES)})")
    parser.add_argument("--folder", type=Path, help="where to keep the outputs")


@dataclasses.dataclass(frozen=True)
class Trace:
    """What happens to the instances, by minute."""

    events: Sequence[tuple[float, str, str]]
    minutes: float = 120.0

    @classmethod
    def read(cls, path: Path) -> Trace:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        return cls(sorted((float(minute), event, name) for minute, event, name in csv.reader(lines)))

    @property
    def first(self) -> int:
        """Instances at its beginning."""
        return sum(event == "add" and not minute for minute, event, _ in self.events)

    @property
    def mean(self) -> float:
        """Instances that are there, on average."""
        ends = {name: self.minutes for _, event, name in self.events if event == "add"}
        ends |= {name: minute + NOTICE * (event == "notice") for minute, event, name in self.events if event != "add"}
        begins = {name: minute for minute, event, name in self.events if event == "add"}
        return sum(ends[name] - begins[name] for name in begins) / self.minutes


@dataclasses.dataclass
class Replay:
    """What became of a run."""

    seconds: float = 0.0
    rate: float = 0.0
    """Samples per second that count."""
    off: int = 0
    """How often a sample was applied too often or not often enough, in the end."""
    code: int = 0
    struck: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("add", "notice", "lost"), 0))


def spot(options: argparse.Namespace) -> None:
    """Prints two lines per strategy: with the trace, and with as many workers all the time as it has on average."""
    trace = Trace.read(options.trace)
    steady = Trace([(0.0, "add", str(number)) for number in range(round(trace.mean))], trace.minutes)
    print(
        f"{trace.minutes:g} minutes in {trace.minutes * options.minute:g} s, {trace.mean:g} workers on average, a "
        f"notice {NOTICE * options.minute:g} s before; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
        "goodput: samples per second that count, with the trace over without; off: by the parameters, samples that "
        "were not applied once an epoch"
    )
    print(f"{'':<32}" + "".join(f"{column:>11}" for column in _COLUMNS))
    bad = False
    with tempfile.TemporaryDirectory() as scratch:
        for number, strategy in enumerate(options.strategy or STRATEGIES):
            place = (options.folder or Path(scratch)) / str(number)
            calm = _Run(place / "steady", strategy, steady).replay(options.minute)
            hurt = _Run(place / "trace", strategy, trace).replay(options.minute)
            _print(f"{strategy}, {len(steady.events)} workers", calm, calm.rate)
            _print("  the trace", hurt, calm.rate)
            bad = bad or any(one.code or one.off for one in (calm, hurt))
    sys.exit(bad)


class _Run:
    """One run, and the worker of each instance."""

    def __init__(self, folder: Path, strategy: str, trace: Trace) -> None:
        self._folder, self._strategy, self._trace = folder, strategy, trace
        self._ranks: dict[str, int] = {}
        self._gone: list[tuple[float, int]] = []
        """When the processes of instances that were given notice are taken away, and their ids."""
        folder.mkdir(parents=True)

    def replay(self, minute: float) -> Replay:
        """minute: in seconds."""
        found = Replay()
        options = ["--workers", str(self._trace.first), "--strategy", self._strategy, "--elastic", "--name", "run"]
        options += ["--snapshot", "off", "--timeout", "60", "--grace", f"{NOTICE * minute:g}s", "--quiet"]
        words = [str(PEERS / "spot_paceline.py"), *options, "--", str(self._folder), str(SAMPLES), str(EACH)]
        with (self._folder / "paceline.out").open("wb") as out:
            command = [sys.executable, "-m", "paceline", "run", *words]
            process = subprocess.Popen(command, cwd=self._folder, env=ENVIRONMENT, stdout=out, stderr=out)
        try:
            first = [name for at, event, name in self._trace.events if event == "add" and not at]
            self._ranks = {name: rank for rank, name in enumerate(first)}
            self._wait(process, lambda: all(self._lines(rank) for rank in range(len(first))))
            time.sleep(3.0)  # the first steps are slower
            began = time.monotonic()
            for at, event, name in self._trace.events:
                if at:
                    self._sleep(process, began + at * minute)
                    self._happen(event, name, NOTICE * minute)
                    found.struck[event] += 1
            self._sleep(process, began + self._trace.minutes * minute)
            ended = time.monotonic()
            (self._folder / "stop").write_text(str(2 + max(epoch for _, _, epoch in self._all_lines())))
            found.code = process.wait(60.0)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30.0)
        inside = sum(samples for moment, samples, _ in self._all_lines() if began < moment <= ended)
        found.seconds, found.rate = ended - began, inside / (ended - began)
        counts = self._folder / "counts.json"
        epochs, *applied = json.loads(counts.read_text()) if counts.exists() else (1, *[0] * SAMPLES)
        found.off = sum(count != epochs for count in applied)
        return found

    def _happen(self, event: str, name: str, notice: float) -> None:
        if event == "add":
            self._add(name)
            return
        rank = self._ranks.pop(name)
        path = self._folder / f"worker-{rank}.pid"
        pid = int(path.read_text())
        path.unlink()
        os.kill(pid, signal.SIGKILL if event == "lost" else signal.SIGTERM)
        if event == "notice":
            self._gone.append((time.monotonic() + notice, pid))

    def _add(self, name: str) -> None:
        words = [sys.executable, "-m", "paceline", "scale", "run", str(len(self._ranks) + 1), "--json"]
        until = time.monotonic() + 20.0
        while True:
            answer = subprocess.run(
                words, cwd=self._folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
            )
            if not answer.returncode:
                break
            if time.monotonic() > until:
                sys.exit(f"the run does not take instance {name}: {answer.stderr}")
            time.sleep(0.2)
        self._ranks[name] = int(json.loads(answer.stdout)["answer"].partition("rank")[2].split()[0])

    def _sleep(self, process: subprocess.Popen[bytes], until: float) -> None:
        """Takes instances away whose time is over, until then."""
        while (left := until - time.monotonic()) > 0:
            for gone in [one for one in self._gone if one[0] <= time.monotonic()]:
                self._gone.remove(gone)
                if Path(f"/proc/{gone[1]}/status").exists():
                    os.kill(gone[1], signal.SIGKILL)
            if process.poll() is not None:
                sys.exit(f"the run has ended by itself; see {self._folder}/paceline.out")
            time.sleep(min(left, 0.05))

    def _wait(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        until = time.monotonic() + 120.0
        while not ready():
            if time.monotonic() > until or process.poll() is not None:
                sys.exit(f"the run has not begun; see {self._folder}/paceline.out")
            time.sleep(0.1)

    def _lines(self, rank: int) -> list[tuple[float, int, int]]:
        path = self._folder / f"steps-{rank}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line.split() for line in lines if len(line.split()) == 3]
        return [(float(moment), int(samples), int(epoch)) for moment, samples, epoch in whole]

    def _all_lines(self) -> list[tuple[float, int, int]]:
        ranks = range(len(self._trace.events))
        return [line for rank in ranks for line in self._lines(rank)]


def _print(name: str, run: Replay, calm: float) -> None:
    came, told, lost = run.struck.values()
    values = (
        f"{run.seconds:>11.0f}{run.rate:>11,.0f}{run.rate / calm:>11.1%}{came:>11}{told:>11}{lost:>11}{run.off:>11}"
    )
    print(f"{name:<32}{values}{'well' if not run.code else f'code {run.code}':>11}", flush=True)
