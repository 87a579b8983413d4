"""Trains a network on four workers, one of them four times slower, in several ways, and compares them.

Started by `make demo`; leaves `runs/demo.html`.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.events.summary import Summary
from paceline.report.page import HEADS, row, write_page

SCRIPT = Path(__file__).with_name("train_paceline.py")
WAYS = {
    "all-reduce, no slow worker": (["--workers", "4"], []),
    "all-reduce, worker 3 slow": (["--workers", "4", "--slow", "3:4"], []),
    "all-reduce, worker 3 slow, balanced": (["--workers", "4", "--slow", "3:4"], ["--balance"]),
    **{
        f"{spec}, worker 3 slow": (["--workers", "4", "--slow", "3:4", "--strategy", spec], [])
        for spec in ("k-sync:k=3", "k-batch-sync:k=4", "k-async:k=2", "k-batch-async:k=4")
    },
}


def main() -> int:
    runs: dict[str, Path] = {}
    for number, (way, (options, arguments)) in enumerate(WAYS.items(), start=1):
        print(f"\n{number} of {len(WAYS)}: {way}", flush=True)
        name = f"demo-{number}"
        command = [sys.executable, "-m", "paceline", "run", os.path.relpath(SCRIPT), *options, "--name", name]
        code = subprocess.run([*command, "--", *arguments], check=False).returncode
        if code:
            return code
        runs[way] = Path("runs") / name
    table = Table(*HEADS, title="Four workers, the same network, the same batches")
    for way, folder in runs.items():
        table.add_row(*row(way, msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)))
    Console().print(table)
    page = Path("runs") / "demo.html"
    write_page(page, "Paceline: four workers, one of them slow", runs)
    print(f"pictures: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
