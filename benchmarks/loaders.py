"""CPU time for a batch of 64 x 64 floats: the team's loaders against torch's own, in turns, between steps of training.

`python benchmarks/loaders.py`
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, ROUNDS, BATCH = 300, 5, 64


def data(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, BATCH), torch.randint(0, 10, (count,)))


def taken(batches: Iterator[Any]) -> tuple[Any, float]:
    """The next batch, and the CPU seconds that it has taken."""
    start = time.thread_time()
    return next(batches, None), time.thread_time() - start


def work(strategy: str) -> None:
    import paceline

    torch.set_num_threads(1)
    team = paceline.join()
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = DataLoader(data(BATCH * 2 * STEPS), BATCH, shuffle=True)  # more, since workers may have unlike numbers
    workers = team.world_size
    model, optimizer, loader = team.setup(
        model, optimizer, DataLoader(data(BATCH * workers * STEPS), BATCH * workers, shuffle=True)
    )
    best = [1.0, 1.0]
    for _ in range(ROUNDS):
        ours, theirs = iter(loader), iter(plain)
        sums, count = [0.0, 0.0], 0
        while True:
            if count % 2:  # the second finds warmer caches
                _, other = taken(theirs)
                batch, own = taken(ours)
            else:
                batch, own = taken(ours)
                _, other = taken(theirs)
            if batch is None:
                break
            sums, count = [sums[0] + own, sums[1] + other], count + 1
            torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        best = [min(known, total / count) for known, total in zip(best, sums, strict=True)]
    if team.rank == 0:
        print(f"{strategy:>12}: {1e3 * best[0]:.3f} ms, torch's own {1e3 * best[1]:.3f} ms: {best[0] / best[1]:.2f}")


def main() -> None:
    if len(sys.argv) > 1:
        work(sys.argv[1])
        return
    for strategy in ("all-reduce", "sync", "async"):
        command = [sys.executable, "-m", "paceline", "run", __file__, "--workers", "2", "--strategy", strategy]
        subprocess.run([*command, "--no-record", "--", strategy], check=True)


if __name__ == "__main__":
    main()
