"""A mesh whose second replica is slow: k-sync between replicas against all-reduce. `python benchmarks/mesh.py`.

Four workers, two pipelines of two stages; both workers of the second pipeline take four times as long. What counts is
the ratio of updates per second, each from the best of several runs that take turns.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "transformer.py"
ROUNDS = 3
SPLIT = "mesh:data=2,pipeline=2,microbatches=2"
SLOW = ["--slow", "2:4", "--slow", "3:4"]
ARGUMENTS = ["--steps", "30", "--width", "96", "--layers", "4", "--batch", "16"]


def seconds_per_update(strategy: str, folder: str) -> float:
    command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), "--workers", "4", "--strategy", strategy]
    subprocess.run([*command, *SLOW, "--name", "one", "--", *ARGUMENTS], cwd=folder, check=True, stdout=sys.stderr)
    return float(json.loads((Path(folder) / "runs" / "one" / "summary.json").read_bytes())["seconds_per_update"])


def main() -> None:
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for between in ("all-reduce", "k-sync:k=1"):
            with tempfile.TemporaryDirectory() as folder:
                seconds = seconds_per_update(f"{SPLIT},sync={between}", folder)
            best[between] = min(seconds, best.get(between, seconds))
    rates = {between: 1 / seconds for between, seconds in best.items()}
    print(json.dumps({"updates_per_second": rates, "ratio": rates["k-sync:k=1"] / rates["all-reduce"]}))


if __name__ == "__main__":
    main()
