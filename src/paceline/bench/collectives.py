"""The script of a worker of `paceline bench collectives`: contestants in turns; the lead writes the times."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed

from paceline import collectives
from paceline.bench.tasks import CollectiveTask, CollectiveTimes
from paceline.cluster.process import keep_freed_memory

Step = Callable[[], object]


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=CollectiveTask)
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("paceline")
    rank, gloo = distributed.get_rank(), None
    if "gloo" in task.contestants:
        gloo = distributed.new_group(backend="gloo")
    seconds: CollectiveTimes = {name: {} for name in task.contestants}
    gc.disable()
    for number in range(task.rounds):
        for size in task.sizes:
            for name in task.contestants:
                step = contestant(name, task, size, gloo)
                times = seconds[name].setdefault(str(size), [])
                times.append(_time(step, task.seconds))
            gc.collect()
        if rank == 0:
            print(f"round {number + 1} of {task.rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        Path(task.output).write_bytes(msgspec.json.encode(seconds))
    distributed.destroy_process_group()


def contestant(name: str, task: CollectiveTask, size: int, gloo: Any) -> Step:
    """One operation on so many bytes of float32."""
    count = max(1, size // 4)
    if name == "copy":
        source, target = torch.ones(count), torch.empty(count)
        return lambda: target.copy_(source)
    make = collectives.empty if name == "in place" else torch.empty
    workers = distributed.get_world_size()
    count = -(-count // workers) * workers
    whole, part = make(count).zero_(), make(count // workers).zero_()  # sums stay finite
    if name == "collectives":
        return _direct(task, whole, part)
    group = gloo if name == "gloo" else None
    steps: dict[str, Step] = {
        "all_reduce": lambda: distributed.all_reduce(whole, group=group),
        "broadcast": lambda: distributed.broadcast(whole, 0, group=group),
        "all_gather": lambda: distributed.all_gather(list(whole.chunk(workers)), part, group=group),
        "reduce_scatter": lambda: distributed.reduce_scatter(part, list(whole.chunk(workers)), group=group),
        "all_to_all": lambda: distributed.all_to_all_single(whole, whole.clone(), group=group),
    }
    return steps[task.operation]


def _direct(task: CollectiveTask, whole: torch.Tensor, part: torch.Tensor) -> Step:
    """The same through `paceline.collectives`, in the topology asked for."""
    tensor = part if task.operation == "all_gather" else whole
    return partial(getattr(collectives, task.operation), tensor, topology=task.topology)


def _time(step: Step, seconds: float) -> float:
    """Seconds per operation. All members do the same number of operations, that of the lead."""
    for _ in range(2):
        step()
    distributed.barrier()
    start = time.perf_counter()
    step()
    once = [time.perf_counter() - start]
    distributed.broadcast_object_list(once, 0)
    count = max(3, min(5000, int(seconds / once[0])))
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()
