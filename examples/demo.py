"""Trains a network on four workers, one of them four times slower, in every way there is, and compares them.

Started by `make demo`; leaves `runs/demo.html`, a report with pictures.
"""

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.report.page import write_report
from paceline.report.source import open_run

SCRIPT = Path(__file__).with_name("train_paceline.py")
SLOW = ["--slow", "3:4"]
SINGLE = ["--rate", "0.0125"]
"""Where every gradient is an update of its own, there are four times as many, and each may go a fourth as far."""
WAYS = {
    "all-reduce, nobody slow": ([], []),
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


def train(name: str, way: str) -> int:
    options, arguments = WAYS[way]
    command = [sys.executable, "-m", "paceline", "run", os.path.relpath(SCRIPT), "--workers", "4", "--name", name]
    command += ["--strategy", way.partition(", ")[0] if way.startswith("all-reduce") else way]
    return subprocess.run([*command, *options, "--", *arguments], check=False).returncode


def main() -> int:
    facts = []
    for number, way in enumerate(WAYS, start=1):
        print(f"\n{number} of {len(WAYS)}: {way}", flush=True)
        name = f"demo-{number}"
        code = train(name, way)
        if code:
            return code
        facts.append(open_run(Path("runs") / name, 100_000 // len(WAYS)).facts(name=way))
    page = Path("runs") / "demo.html"
    write_report(page, "Paceline: four workers, one of them slow", facts)
    table = Table("strategy", box=None)
    for head in ("samples/s", "× all-reduce", "waiting", "staleness", "accuracy"):
        table.add_column(head, justify="right")
    base = next(run for run in facts if run["name"] == "all-reduce")["samples_per_second"]
    for run in facts:
        table.add_row(
            run["name"],
            f"{run['samples_per_second']:,.0f}",
            f"{run['samples_per_second'] / base:.2f}",
            f"{run['bubbles']:.0%}",
            f"{run['staleness']['mean']:.2f}" if run["served"] else "–",
            f"{run['last']['accuracy']:.1%}",
        )
    Console().print(table)
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
