"""What it costs to record events. One command: `python benchmarks/recording.py`.

Two workers and one server train the small network under async. Three busy processes on two cores differ from one run to
the next, by which of them share a core, far more than recording costs. So with and without are compared inside one run:
all three processes record in every other stretch of time, and in those between they do what `--no-record` does. What
counts is the ratio of minibatches per second, each stretch against the mean of its two neighbours.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from harness.runs import ENVIRONMENT, train

# Python runs a module of this name in every process before anything else.
SWITCH = """
import time

from paceline.events.recorder import Recorder

add = Recorder.add


def switched(self, event):
    if int(time.perf_counter() / STRETCH) % 2 == 0:
        add(self, event)


Recorder.add = switched
"""
SCRIPT = """
import json
import sys
import time
from collections import Counter
from pathlib import Path

import paceline
from paceline.bench.contestants import Paceline
from paceline.bench.tasks import TrainTask
from paceline.bench.workloads import WORKLOADS

output, stretch, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
team = paceline.join()
work = WORKLOADS["small"]
task = TrainTask(model=work.name, contestants=[], batch=work.batch, optimizer="sgd")
step = Paceline(work, task, team).step
for _ in range(200):
    step()
begin = int(time.perf_counter() / stretch) + 1
team.barrier()
steps = Counter()
while (at := int(time.perf_counter() / stretch) - begin) <= count:
    step()
    steps[at] += 1
Path(output, f"{team.rank}.json").write_text(json.dumps([begin, [steps[at] for at in range(1, count + 1)]]))
"""


def stretches(seconds: float, count: int) -> dict[int, int]:
    """Minibatches of both workers in each stretch of time; it was recorded in those of even number."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SWITCH.replace("STRETCH", repr(seconds)))
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        options = ["--workers", "2", "--strategy", "async"]
        arguments = [folder, str(seconds), str(count)]
        train(SCRIPT, Path(folder), *options, arguments=arguments, environment={**ENVIRONMENT, "PYTHONPATH": path})
        total: dict[int, int] = {}
        for rank in range(2):
            begin, counts = json.loads((Path(folder) / f"{rank}.json").read_text())
            for at, steps in enumerate(counts, begin + 1):
                total[at] = total.get(at, 0) + steps
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a stretch with or without recording")
    parser.add_argument("--count", type=int, default=121, help="how many such stretches")
    options = parser.parse_args()
    print(f"training for {options.seconds * options.count:.0f} s", file=sys.stderr, flush=True)
    steps = stretches(options.seconds, options.count)
    inner = sorted(steps)[1:-1]
    ratios = []
    for at in inner:
        beside = (steps[at - 1] + steps[at + 1]) / 2
        ratios.append(steps[at] / beside if at % 2 == 0 else beside / steps[at])
    middle = statistics.median(ratios)
    mean = statistics.fmean(ratios)
    error = statistics.stdev(ratios) / (len(ratios) / 2) ** 0.5  # neighbours share their stretches
    print(
        f"with recording {middle:.4f} times as many minibatches per second as without (median of {len(ratios)} "
        f"stretches; mean {mean:.4f}, standard error {error:.4f})"
    )


if __name__ == "__main__":
    main()
