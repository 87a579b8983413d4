"""What it costs to record an unmodified DDP script. One command: `python benchmarks/recording_ddp.py`.

Two workers train with DistributedDataParallel on the backend `paceline`, in one run, in which every other block of
steps is recorded, and the hooks are removed in those between. What counts is the ratio of a block's seconds per step to
the mean of its two neighbours', by the clock and in CPU time: a busy machine changes the first, and hardly the second.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.workloads import WORKLOADS
from paceline.observation import observer

WORKERS = 2


def train(rank: int, model: str, batch: int, blocks: int, seconds: float, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ[observer.VARIABLE] = str(Path(folder, "run"))
    dist.init_process_group("paceline", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    watching = observer.current()
    assert watching is not None
    work = WORKLOADS[model]
    net = DistributedDataParallel(work.build())
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    x, y = work.batch_of(batch or work.batch, rank)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(net(x), y).backward()
        optimizer.step()

    def run(steps: int) -> tuple[float, float]:
        dist.barrier()
        step()
        cpu, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - clock) / steps, (time.process_time() - cpu) / steps

    run(10)
    steps = torch.tensor(max(5, int(seconds / run(20)[0])))
    dist.broadcast(steps, 0)
    found = []
    for number in range(blocks):
        if number % 2:
            observer._current = watching
            watching.steps._install()
            watching.steps._reset(time.perf_counter())
        else:
            watching.steps.stop()
            observer._current = None
        found.append(run(int(steps)))
    observer._current = watching
    if rank == 0:
        tell(model, len(x), found)
    dist.destroy_process_group()


def tell(model: str, batch: int, found: list[tuple[float, float]]) -> None:
    parts = []
    for place, clock in enumerate(("by the clock", "in CPU time")):
        one = [times[place] for times in found]
        ratios = [one[at] / statistics.fmean((one[at - 1], one[at + 1])) - 1 for at in range(1, len(one) - 1, 2)]
        more = 1e6 * statistics.median(one[at] - (one[at - 1] + one[at + 1]) / 2 for at in range(1, len(one) - 1, 2))
        best = min(one[1::2]) / min(one[::2]) - 1
        parts.append(f"{clock} {statistics.median(ratios):+.1%} ({more:+.0f} µs; best against best {best:+.1%})")
    step = 1e3 * min(times[0] for times in found[::2])
    print(f"{model}, batch {batch}, {step:.2f} ms a step: recording costs {', '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=WORKLOADS, help="only these")
    parser.add_argument("--batch", type=int, default=0, help="samples of a worker's step; by default the model's")
    parser.add_argument("--blocks", type=int, default=41)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a block")
    options = parser.parse_args()
    for model in options.model or WORKLOADS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (model, options.batch, options.blocks, options.seconds, folder)
            spawn(train, arguments, WORKERS)


if __name__ == "__main__":
    main()
