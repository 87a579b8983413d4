"""Trains a network on four workers, one of them four times slower, under twelve strategies, and compares them.

Started by `make demo`; leaves `runs/demo.html`, a report with the timeline of every run.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.events import Metric, Update, read
from paceline.report.page import write_report
from paceline.report.source import open_run

SCRIPT = Path(__file__).with_name("train_paceline.py")
PAGE = Path("runs") / "demo.html"
SLOWNESS = 4
SLOW = ["--slow", f"3:{SLOWNESS}"]
SINGLE = ["--rate", "0.0125"]
"""Where every gradient is an update of its own, there are four times as many, and each may go a fourth as far."""
EVEN = "all-reduce, nobody slow"
WAYS = {
    EVEN: ([], []),
    "all-reduce": (SLOW, []),
    "all-reduce, balanced": (SLOW, ["--balance"]),
    "sync": (SLOW, []),
    "k-sync:k=3": (SLOW, []),
    "k-batch-sync:k=4": (SLOW, []),
    "async": (SLOW, SINGLE),
    "k-async:k=2": (SLOW, []),
    "k-batch-async:k=4": (SLOW, []),
    "ssp:s=3": (SLOW, SINGLE),
    "groups:size=2,between=async": (SLOW, []),
    "adaptive:of=k-async,start=2": (SLOW, []),
}
GOAL = 0.95
"""The accuracy on the test set that all are compared by. It is measured after every epoch."""


def train(name: str, way: str) -> int:
    options, arguments = WAYS[way]
    command = [sys.executable, "-m", "paceline", "run", os.path.relpath(SCRIPT), "--workers", "4", "--name", name]
    command += ["--strategy", way.partition(", ")[0] if way.startswith("all-reduce") else way, "--quiet"]
    done = subprocess.run([*command, *options, "--", *arguments], check=False, stdout=subprocess.PIPE)
    if done.returncode:
        sys.stdout.buffer.write(done.stdout)
    return done.returncode


def seconds_to_goal(run: Path) -> float | None:
    """Seconds of training until the goal was first measured; None if it was not."""
    events = list(read(run / "events.jsonl"))
    begin = min(event.start for event in events if isinstance(event, Update))
    reached = [
        event.start for event in events if isinstance(event, Metric) and (event.values.get("accuracy") or 0.0) >= GOAL
    ]
    return min(reached) - begin if reached else None


def told(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f}"


def show(runs: list[dict[str, Any]]) -> None:
    by = {run["name"]: run for run in runs}
    base = by["all-reduce"]["samples_per_second"]
    table = Table("strategy", box=None, header_style="bold")
    for head in ("samples/s", "× all-reduce", "waiting", "staleness", "accuracy", f"s to {GOAL:.0%}"):
        table.add_column(head, justify="right")
    for run in runs:
        table.add_row(
            run["name"],
            f"{run['samples_per_second']:,.0f}",
            f"{run['samples_per_second'] / base:.2f}",
            f"{run['bubbles']:.0%}",
            f"{run['staleness']['mean']:.2f}" if run["served"] else "–",
            f"{run['last']['accuracy']:.1%}",
            told(run["seconds_to_goal"]),
        )
    console = Console(highlight=False)
    console.width = max(console.width, 90)
    console.print(table)


def story(runs: list[dict[str, Any]]) -> list[str]:
    """What the slow worker cost, which strategy was first, where to look."""
    speed = {run["name"]: run["samples_per_second"] for run in runs}
    goal = {run["name"]: run["seconds_to_goal"] for run in runs}
    arrived = {way: seconds for way, seconds in goal.items() if way != EVEN and seconds is not None}
    lines = [
        f"A worker that is {SLOWNESS} times slower costs all-reduce {1 - speed['all-reduce'] / speed[EVEN]:.0%} of its "
        f"speed: {speed['all-reduce']:,.0f} samples/s instead of {speed[EVEN]:,.0f}."
    ]
    if arrived:
        first = min(arrived, key=arrived.__getitem__)
        lines.append(
            f"First at {GOAL:.0%} accuracy with that worker: {first}, after {told(goal[first])} s; "
            f"all-reduce: {told(goal['all-reduce'])} s, and {told(goal[EVEN])} s with four equal workers."
        )
    else:
        lines.append(f"No strategy has reached {GOAL:.0%} accuracy with that worker.")
    lines.append(f"Every step of every worker: {PAGE}. For a script of your own: paceline plan train.py --workers 4")
    return lines


def main() -> int:
    begin, runs = time.monotonic(), []
    print(f"Trains a small network on 1,500 digits, on four workers, under {len(WAYS)} strategies; one to two minutes.")
    for number, way in enumerate(WAYS, start=1):
        print(f"{number:2} of {len(WAYS)}: {way}", flush=True)
        name = f"demo-{number}"
        code = train(name, way)
        if code:
            return code
        run = Path("runs") / name
        facts = open_run(run, 100_000 // len(WAYS)).facts(name=way)
        runs.append({**facts, "seconds_to_goal": seconds_to_goal(run)})
    write_report(PAGE, "Paceline: four workers, one of them slow", runs)
    print(f"done in {time.monotonic() - begin:.0f} s\n")
    show(runs)
    print("\n" + "\n".join(story(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
