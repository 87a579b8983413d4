"""Does `paceline plan` pick what real runs confirm? One command: `python benchmarks/planning.py`.

Seven clusters are made of slowness put on with --slow; on two of them momentum makes stale gradients hurt. For each of
them `paceline plan` profiles the script and picks a strategy for the quickest way to a loss on data that is not trained
on; then that one and all the others here are run until they reach it, with other draws than the profile had. A run that
takes much longer than the best is ended; those that come near it are run again, in turns, and their medians count.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.events import Metric, Update, read

WORKERS = 4
SMOOTHED = 8
"""Losses whose mean must be at the goal."""
FAR, NEAR = 1.5, 1.2
"""Times the best, beyond which a run is ended, and up to which it is run again."""
CLUSTERS = {
    "even": ["all:0.03+exp(0.002)"],
    "one straggler": ["all:0.03+exp(0.002)", "2:0.15+exp(0.01)"],
    "heavy jitter": ["all:0.01+exp(0.04)"],
    "slow link": ["all:0.03+exp(0.005)@link"],
    "half at half speed": ["all:0.03+exp(0.002)", "0:0.06+exp(0.004)", "1:0.06+exp(0.004)"],
    "even, momentum": ["all:0.03+exp(0.002)"],
    "jitter, momentum": ["all:0.02+exp(0.01)"],
}
MOMENTUM = 0.9
"""Of the clusters that are called so: with it, and the same step length, stale gradients hurt."""
OTHERS = (
    "all-reduce",
    "sync",
    "k-sync:k=2",
    "k-sync:k=3",
    "k-batch-sync:k=2",
    "k-batch-sync:k=4",
    "async",
    "k-async:k=2",
    "k-batch-async:k=2",
    "ssp:s=3",
    "groups:size=2",
)
SCRIPT = """
import sys

import paceline
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
torch.manual_seed(0)
source = torch.Generator().manual_seed(1)
teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
x = torch.randn(40_000, 32, generator=source)
with torch.no_grad():
    y = (3 * teacher(x) + 0.3 * torch.randn(40_000, 8, generator=source)).argmax(1)
held = (x[:1000], y[:1000])
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
loader = DataLoader(TensorDataset(x[1000:], y[1000:]), batch_size=16 * team.world_size, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
seen = 0
for _ in range(50):
    for inputs, targets in loader:
        with team.step():
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen += 1
        if team.rank == WITNESS and seen % 4 == 0:
            with torch.no_grad():
                team.report(loss=cross_entropy(model(held[0]), held[1]).item())
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *words]


def slow(cluster: str) -> list[str]:
    return [word for spec in CLUSTERS[cluster] for word in ("--slow", spec)]


Interval = tuple[float, float, float]
"""Predicted seconds to the loss, and their 95 % interval."""


def planned(cluster: str, goal: float, folder: Path, seconds: float) -> tuple[str, dict[str, Interval]]:
    """What plan picks, and what it predicts for all; infinite for a loss that is never reached."""
    words = [
        "plan",
        "train.py",
        "--workers",
        str(WORKERS),
        "--goal",
        f"loss={goal}",
        "--seconds",
        str(seconds),
        "--json",
    ]
    told = subprocess.run(
        command(*words, *slow(cluster), "--seed", "11", "--json"),
        check=True,
        cwd=folder,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    answer = json.loads(told.stdout)
    found = {}
    for one in answer["choices"]:
        if not one["balance"]:
            score, low, high = (math.inf if one[key] is None else float(one[key]) for key in ("score", "low", "high"))
            found[str(one["strategy"])] = score, low, high
    return str(answer["strategy"]), found


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def measured(cluster: str, goal: float, strategy: str, seed: int, folder: Path, limit: float) -> float:
    """Seconds from the beginning of training until the loss is reached; infinite if it is not within the limit."""
    words = ["run", "train.py", "--workers", str(WORKERS), "--strategy", strategy, "--quiet", "--name", "real"]
    with subprocess.Popen(
        command(*words, *slow(cluster), "--seed", str(seed)), cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL
    ) as process:
        try:
            return _watch(process, goal, folder / "runs" / "real", limit)
        finally:
            process.terminate()
            process.wait()


def _watch(process: "subprocess.Popen[bytes]", goal: float, run: Path, limit: float) -> float:
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() - begin < limit + 30:
        time.sleep(0.5)
        trained, reached = _reached(run, goal)
        if reached is not None or trained > limit:
            return math.inf if reached is None else reached
    return math.inf


def _reached(run: Path, goal: float) -> tuple[float, float | None]:
    """How long it has trained, and when the mean of the last losses reached the goal."""
    first, last = math.inf, -math.inf
    losses: list[tuple[float, float]] = []
    for stream in (run / "streams").glob("*.jsonl"):
        for event in read(stream):
            if isinstance(event, Update):
                first, last = min(first, event.start), max(last, event.start)
            elif isinstance(event, Metric):
                losses.append((event.start, event.values.get("loss") or math.inf))
    for end in range(SMOOTHED, len(losses) + 1):
        part = losses[end - SMOOTHED : end]
        if statistics.fmean(loss for _, loss in part) <= goal:
            return last - first, part[-1][0] - first
    return max(0.0, last - first), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each of a plan's two profile runs")
    parser.add_argument("--goal", type=float, help="the loss; by default 0.76, and 0.95 with momentum")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a run has not reached the loss")
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="only these")
    options = parser.parse_args()
    worst, inside, judged = 1.0, 0, 0
    for cluster in options.cluster or CLUSTERS:
        momentum = MOMENTUM if cluster.endswith("momentum") else 0.0
        goal = options.goal or (0.95 if momentum else 0.76)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # Of uneven workers a fast one looks at the loss.
            values = {"WITNESS": 3, "RATE": 0.08, "MOMENTUM": momentum}
            script = SCRIPT
            for name_of, value in values.items():
                script = script.replace(name_of, f"{value:g}")
            (folder / "train.py").write_text(script)
            print(f"{cluster}: planning", file=sys.stderr, flush=True)
            pick, told = planned(cluster, goal, folder, options.seconds)
            times: dict[str, list[float]] = {}
            for strategy in dict.fromkeys((pick, *OTHERS)):
                print(f"{cluster}: {strategy}", file=sys.stderr, flush=True)
                best = min((values[0] for values in times.values()), default=math.inf)
                times[strategy] = [measured(cluster, goal, strategy, 20, folder, min(options.limit, FAR * best))]
            best = min(values[0] for values in times.values())
            close = [strategy for strategy, values in times.items() if values[0] <= NEAR * best or strategy == pick]
            for number in range(1, options.rounds):
                for strategy in close:
                    print(f"{cluster}: round {number + 1}: {strategy}", file=sys.stderr, flush=True)
                    times[strategy].append(measured(cluster, goal, strategy, 20 + number, folder, options.limit))
        middle = {strategy: statistics.median(values) for strategy, values in times.items()}
        first = min(close, key=middle.__getitem__)
        ratio = middle[pick] / middle[first]
        worst = max(worst, ratio)
        print(f"{cluster}: plan picks {pick}, {ratio:.2f} times the best ({first})")
        for strategy in sorted(middle, key=middle.__getitem__):
            predicted = ""
            if strategy in told:
                score, low, high = told[strategy]
                predicted = f", predicted {score / told[first][0]:.2f}; {score:.1f} s, from {low:.1f} to {high:.1f}"
                if math.isfinite(middle[strategy]):
                    judged, inside = judged + 1, inside + (low <= middle[strategy] <= high)
            real = f"{middle[strategy] / middle[first]:.2f} ({middle[strategy]:.1f} s)"
            print(f"    {strategy:18} {real}{predicted}", flush=True)
    print(
        f"the worst pick takes {worst:.2f} times as long as the best; {inside} of {judged} times are in their intervals"
    )


if __name__ == "__main__":
    main()
