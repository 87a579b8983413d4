"""Simulated against real seconds per update. One command: `python benchmarks/prediction.py`.

Four clusters are made of slowness put on with --slow: even steps with jitter, one persistent straggler, heavy tails,
and half of the workers at half the speed. Of each one run is recorded (`async`, four workers) and learned from; then
other strategies, on two to six workers, are predicted from that alone, and run. What is compared was not learned from.
Chance is the standard deviation of the error of a perfect prediction: of runs as short as these, learned and real. With
--folder runs are kept, and with --budget no run begins after so many seconds: the same command then goes on.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness.runs import MINIBATCHES, train

from paceline.simulate.calibrate import calibrate
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import simulate

LEARNED = ("async", 4)
SPEEDS = ("0.08+exp(0.02)", "0.04+exp(0.01)")
CLUSTERS = {
    "jitter": lambda workers: ["all:0.03+exp(0.03)"],
    "straggler": lambda workers: ["all:0.04+exp(0.01)", "0:0.16+exp(0.04)"],
    "heavy tails": lambda workers: ["all:pareto(0.03,2.2)"],
    "two speeds": lambda workers: [f"{rank}:{SPEEDS[rank % 2]}" for rank in range(workers)],
}
QUESTIONS = [
    ("jitter", "sync", 4),
    ("jitter", "k-sync:k=4", 6),
    ("jitter", "all-reduce", 2),
    ("straggler", "sync", 3),
    ("straggler", "k-sync:k=2", 3),
    ("straggler", "k-batch-sync:k=4", 5),
    ("heavy tails", "k-async:k=3", 4),
    ("heavy tails", "ssp:s=2", 5),
    ("heavy tails", "k-batch-async:k=4", 6),
    ("two speeds", "async", 6),
    ("two speeds", "groups:size=2", 4),
    ("two speeds", "k-batch-sync:k=3", 4),
]


class Budget:
    """Ends the program before a run when its time is over."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def spend(self, what: str) -> None:
        if time.monotonic() > self._until:
            sys.exit(f"the time is over before '{what}'; the same command goes on there")


def run(cluster: str, strategy: str, workers: int, minibatches: int, seed: int, folder: Path, budget: Budget) -> Path:
    """Train so, unless the folder has such a run, and leave the run there."""
    where = folder / "runs" / "run"
    if (where / "summary.json").exists():
        return where
    budget.spend(f"{cluster}, {strategy}")
    folder.mkdir(parents=True, exist_ok=True)
    slow = [word for spec in CLUSTERS[cluster](workers) for word in ("--slow", spec)]
    options = ["--workers", str(workers), "--strategy", strategy, "--seed", str(seed), *slow]
    return train(MINIBATCHES, folder, *options, arguments=[str(minibatches)])


def chance(strategy: str, learned: SimulatedCluster, updates: int) -> float:
    """The standard deviation of the error if one run of so many updates is predicted from another that is as long."""
    times = [simulate(strategy, learned, updates=updates, seed=seed)[0].seconds_per_update for seed in range(12)]
    return 2**0.5 * statistics.stdev(times) / statistics.fmean(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minibatches", type=int, default=1600, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="only these")
    parser.add_argument("--folder", type=Path, help="keeps the runs")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no run begins")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        compare(options, options.folder or Path(parent), options.cluster or list(CLUSTERS), Budget(options.budget))


def compare(options: argparse.Namespace, parent: Path, clusters: list[str], budget: Budget) -> None:
    errors: list[float] = []
    by_cluster: dict[str, list[tuple[float, float, str]]] = {}
    learned = {}
    for cluster in clusters:
        print(f"learning from '{cluster}'", file=sys.stderr, flush=True)
        folder = parent / f"learned-{list(CLUSTERS).index(cluster)}"
        learned[cluster] = calibrate(run(cluster, *LEARNED, options.minibatches, options.seed, folder, budget))
    print("cluster      strategy            workers   predicted   measured     error    chance")
    for number, (cluster, strategy, workers) in enumerate(QUESTIONS):
        if cluster not in clusters:
            continue
        like = learned[cluster].for_workers(workers)
        told, _ = simulate(strategy, like, updates=20_000, seed=7)
        folder = parent / f"run-{number}"
        where = run(cluster, strategy, workers, options.minibatches, options.seed + 1, folder, budget)
        summary = json.loads((where / "summary.json").read_text())
        measured = summary["seconds_per_update"]
        error = told.seconds_per_update / measured - 1
        errors.append(abs(error))
        by_cluster.setdefault(cluster, []).append((told.seconds_per_update, measured, strategy))
        print(
            f"{cluster:12} {strategy:19} {workers:7} {1e3 * told.seconds_per_update:8.2f} ms "
            f"{1e3 * measured:7.2f} ms {error:+8.1%} {chance(strategy, like, summary['updates']):9.1%}",
            flush=True,
        )
    ordered = sorted(errors)
    ninth = ordered[max(0, -(-9 * len(ordered) // 10) - 1)]
    print(f"error: median {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}, largest {ordered[-1]:.1%}")
    wrong = [
        f"{one[2]} and {other[2]} on '{cluster}'"
        for cluster, found in by_cluster.items()
        for place, one in enumerate(found)
        for other in found[place + 1 :]
        if (one[0] - other[0]) * (one[1] - other[1]) < 0
    ]
    print(f"in the wrong order: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
