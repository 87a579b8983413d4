"""A mesh whose second replica is slow: k-sync between replicas against all-reduce. `python benchmarks/mesh.py`.

Four workers, two pipelines of two stages; both workers of the second pipeline take four times as long. What counts is
the ratio of updates per second, each from the best of several runs that take turns.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.events import Leave, Update, read

SCRIPT = Path(__file__).parent.parent / "examples" / "transformer.py"
ROUNDS = 2
SPLIT = "mesh:data=2,pipeline=2,microbatches=2"
SLOW = ["--slow", "2:4", "--slow", "3:4"]
ARGUMENTS = ["--steps", "20", "--width", "96", "--layers", "4", "--batch", "32"]


def updates_per_second(strategy: str, folder: str) -> float:
    """While all replicas are at work: until the first one is done."""
    command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), "--workers", "4", "--strategy", strategy]
    subprocess.run([*command, *SLOW, "--name", "one", "--", *ARGUMENTS], cwd=folder, check=True, stdout=sys.stderr)
    events = list(read(Path(folder) / "runs" / "one" / "events.jsonl"))
    over = min(event.start for event in events if isinstance(event, Leave))
    ends = {event.version: event.start for event in events if isinstance(event, Update) and event.start < over}
    return (len(ends) - 1) / (max(ends.values()) - min(ends.values()))


def main() -> None:
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for between in ("all-reduce", "k-sync:k=1"):
            with tempfile.TemporaryDirectory() as folder:
                rate = updates_per_second(f"{SPLIT},sync={between}", folder)
            best[between] = max(rate, best.get(between, rate))
    print(json.dumps({"updates_per_second": best, "ratio": best["k-sync:k=1"] / best["all-reduce"]}))


if __name__ == "__main__":
    main()
