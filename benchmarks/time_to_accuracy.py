"""How long it takes to a test accuracy on Fashion-MNIST, with one of four workers four times slower.

One command: `python benchmarks/time_to_accuracy.py`; it installs Debian's dataset-fashion-mnist where it may.
DistributedDataParallel on gloo and policies of the parameter server take turns, with the same network, batch size,
number of epochs, and learning rate per gradient in an update; tests do not count. What counts is the ratio of seconds
until the accuracy is reached, between the tests after two epochs on a straight line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path("/usr/share/datasets/fashion-mnist")
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_fashion.py"
WAYS = ("ddp", "k-batch-async:k=2", "async", "k-batch-sync:k=4")
FACTOR = 4


def fetch() -> None:
    """Have the data here."""
    if DATA.exists():
        return
    print("installing dataset-fashion-mnist with apt-get", file=sys.stderr, flush=True)
    done = subprocess.run(["apt-get", "install", "-y", "-qq", "dataset-fashion-mnist"], stdout=2, check=False)
    if done.returncode:
        sys.exit("please install Debian's dataset-fashion-mnist; this user may not")


def train(way: str, epochs: int) -> list[tuple[float, float]]:
    """Seconds of training and test accuracy, after every epoch."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "scores.json"
        command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), "--workers", "4", "--quiet"]
        command += [] if way == "ddp" else ["--strategy", way, "--slow", f"3:{FACTOR}"]
        command += ["--", "--epochs", str(epochs), "--output", str(output)]
        command += ["--ddp", str(FACTOR)] if way == "ddp" else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        return [(seconds, accuracy) for seconds, accuracy in json.loads(output.read_text())]


def reached(scores: list[tuple[float, float]], wanted: float) -> float:
    """The seconds until an accuracy, between two tests on a straight line."""
    before = (0.0, 0.1)  # ten classes, by chance
    for seconds, accuracy in scores:
        if accuracy >= wanted:
            return before[0] + (seconds - before[0]) * (wanted - before[1]) / (accuracy - before[1])
        before = (seconds, accuracy)
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accuracy", type=float, default=0.88)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    fetch()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    finals: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            print(f"round {number + 1} of {options.rounds}: {way}", file=sys.stderr, flush=True)
            scores = train(way, options.epochs)
            times[way].append(reached(scores, options.accuracy))
            finals[way].append(scores[-1][1])
    for way in WAYS:
        ratio = statistics.median(times["ddp"]) / statistics.median(times[way])
        print(
            f"{way:18} {ratio:5.2f} times as fast as ddp to {options.accuracy:.1%}; "
            f"after {options.epochs} epochs {statistics.median(finals[way]):.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
