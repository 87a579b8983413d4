"""What snapshots cost. One command: `python benchmarks/snapshots.py`.

Two workers train `mlp25m`, by all-reduce and under async with one server. With and without are compared inside one run:
in every other stretch of 5 s one snapshot is taken. Each stretch is compared with the mean of its two neighbours:
minibatches per second, and the CPU time of all processes. On a machine that has other work to do a stretch has few
minibatches, so that one snapshot is a larger part of it; the CPU seconds of a snapshot, as a part of those that all
cores have in 5 s, say what it costs a machine that has not.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from harness.runs import train

SCRIPT = """
import json
import os
import sys
import time
from pathlib import Path

import paceline
from paceline.bench.contestants import Paceline
from paceline.bench.tasks import TrainTask
from paceline.bench.workloads import WORKLOADS

output, model, optimizer = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
stretch, count = float(sys.argv[4]), int(sys.argv[5])
team = paceline.join()
work = WORKLOADS[model]
task = TrainTask(model=work.name, contestants=[], batch=work.batch, optimizer=optimizer)
step = Paceline(work, task, team).step


def cpu_seconds():
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getppid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


for _ in range(20):
    step()
snapshots = team._training.snapshots
for _ in range(4):  # the first ones get their memory from the system
    snapshots._due = 0.0
    for _ in range(20):
        step()
    if snapshots._writer is not None:
        snapshots._writer.join()
    step()
begin = int(time.perf_counter() / stretch) + 1
team.barrier()
steps, cpu, last = {}, {}, begin - 1
while (at := int(time.perf_counter() / stretch)) <= begin + count:
    if at > last and team.is_lead:
        cpu[at] = cpu_seconds()
        if at % 2 == 0:
            snapshots._due = 0.0
    last = at
    step()
    steps[at] = steps.get(at, 0) + 1
(output / f"{team.rank}.json").write_text(json.dumps([steps, cpu]))
"""


class Cost(NamedTuple):
    """What snapshots cost in one run, as medians over its stretches."""

    pace: float
    """Minibatches per second, with to without."""
    seconds: float
    """CPU seconds of one snapshot, of all processes."""
    size: int
    """Bytes of one."""


def measure(strategy: str, model: str, optimizer: str, stretch: float, count: int) -> Cost:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        options = ["--workers", "2", "--strategy", strategy, "--snapshot", "10h"]
        run = train(SCRIPT, Path(folder), *options, arguments=[folder, model, optimizer, str(stretch), str(count)])
        size = max(path.stat().st_size for path in (run / "snapshots").iterdir())
        steps: dict[int, int] = {}
        cpu: dict[int, float] = {}
        for rank in range(2):
            own, told = json.loads((Path(folder) / f"{rank}.json").read_text())
            for at, number in own.items():
                steps[int(at)] = steps.get(int(at), 0) + number
            cpu |= {int(at): float(seconds) for at, seconds in told.items()}
    whole = sorted(cpu)[:-1]
    costs = {at: (cpu[at + 1] - cpu[at]) / steps[at] for at in whole if at + 1 in cpu and steps.get(at)}
    pace, seconds = [], []
    for at in whole[1:-1]:
        if at % 2 == 0 and all(near in costs for near in (at - 1, at, at + 1)):
            pace.append(2 * steps[at] / (steps[at - 1] + steps[at + 1]))
            seconds.append(steps[at] * (costs[at] - (costs[at - 1] + costs[at + 1]) / 2))
    return Cost(statistics.median(pace), statistics.median(seconds), size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mlp25m")
    parser.add_argument("--optimizer", action="append", help="sgd and adamw by default")
    parser.add_argument("--strategy", action="append", help="all-reduce and async by default")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a stretch with or without a snapshot")
    parser.add_argument("--stretches", type=int, default=21)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    columns = f"{'minibatches/s':>14} {'CPU of one':>11} {'of all cores':>13}"
    print(f"{'strategy':<12} {'optimizer':<10} {'snapshot':>10} {columns}")
    for strategy in options.strategy or ["all-reduce", "async"]:
        for optimizer in options.optimizer or ["sgd", "adamw"]:
            cost = measure(strategy, options.model, optimizer, options.seconds, options.stretches)
            told = f"{strategy:<12} {optimizer:<10} {cost.size / 1e6:>7.0f} MB {100 * (cost.pace - 1):>+12.1f} %"
            part = cost.seconds / (cores * options.seconds)
            print(f"{told} {cost.seconds:>+9.3f} s {100 * part:>+11.1f} %", flush=True)


if __name__ == "__main__":
    main()
