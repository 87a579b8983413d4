"""What it costs to record events. One command: `python benchmarks/recording.py`.

Two workers and one server train the small network under async, with and without recording in turns; what counts is the
ratio of minibatches per second, the best of several turns: three busy processes on two cores are disturbed by whatever
else runs, and by which of them share a core, far more than by recording.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from parameter_server import SCRIPT


def rate(options: list[str], seconds: float) -> float:
    """Minibatches per second of both workers."""
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder) / "train.py", Path(folder) / "result.json"
        script.write_text(SCRIPT)
        task = {"model": "small", "contestant": "paceline", "seconds": seconds / 5, "rounds": 5, "output": str(output)}
        command = [sys.executable, "-m", "paceline", "run", str(script), "--workers", "2", "--strategy", "async"]
        command += ["--quiet", *options, "--", json.dumps(task)]
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rates: list[float] = json.loads(output.read_text())["minibatches_per_second"]
        return statistics.median(rates)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    options = options.parse_args()
    rates: dict[str, list[float]] = {"--record": [], "--no-record": []}
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        # Who goes first changes, so that a machine that gets slower or faster favours neither.
        for way in sorted(rates, reverse=number % 2 == 1):
            rates[way].append(rate([way], options.seconds))
    ratio = max(rates["--record"]) / max(rates["--no-record"])
    middle = statistics.median(rates["--record"]) / statistics.median(rates["--no-record"])
    print(f"with recording {ratio:.3f} times as many minibatches per second as without (of the medians {middle:.3f})")


if __name__ == "__main__":
    main()
