"""What a worker of a benchmark of collectives runs: contestants in turns; the lead writes down the times."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed

from paceline import collectives
from paceline.bench.tasks import Heat, Laps
from paceline.cluster.process import keep_freed_memory

Step = Callable[[], object]


def main() -> None:
    heat = msgspec.json.decode(sys.argv[1], type=Heat)
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("paceline")
    rank, gloo = distributed.get_rank(), None
    if "gloo" in heat.contestants:
        gloo = distributed.new_group(backend="gloo")
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in heat.contestants}
    gc.disable()
    for number in range(heat.rounds):
        for size in heat.sizes:
            for name in heat.contestants:
                step = contestant(name, heat, size, gloo)
                times = seconds[name].setdefault(str(size), [])
                times.append(_time(step, heat.seconds))
            gc.collect()
        if rank == 0:
            print(f"round {number + 1} of {heat.rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        Path(heat.output).write_bytes(msgspec.json.encode(Laps(seconds)))
    distributed.destroy_process_group()


def contestant(name: str, heat: Heat, size: int, gloo: Any) -> Step:
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
        return _direct(heat, whole, part, workers)
    group = gloo if name == "gloo" else None
    steps: dict[str, Step] = {
        "all_reduce": lambda: distributed.all_reduce(whole, group=group),
        "broadcast": lambda: distributed.broadcast(whole, 0, group=group),
        "all_gather": lambda: distributed.all_gather(list(whole.chunk(workers)), part, group=group),
        "reduce_scatter": lambda: distributed.reduce_scatter(part, list(whole.chunk(workers)), group=group),
        "all_to_all": lambda: distributed.all_to_all_single(whole, whole.clone(), group=group),
    }
    return steps[heat.operation]


def _direct(heat: Heat, whole: torch.Tensor, part: torch.Tensor, workers: int) -> Step:
    """The same through `paceline.collectives`, in the topology asked for."""
    topology = heat.topology
    steps: dict[str, Step] = {
        "all_reduce": lambda: collectives.all_reduce(whole, topology=topology),
        "broadcast": lambda: collectives.broadcast(whole, topology=topology),
        "all_gather": lambda: collectives.all_gather(part, topology=topology),
        "reduce_scatter": lambda: collectives.reduce_scatter(whole, topology=topology),
        "all_to_all": lambda: collectives.all_to_all(whole, topology=topology),
    }
    return steps[heat.operation]


def _time(step: Step, seconds: float) -> float:
    """Seconds per operation. All must do as many, so the lead's measure counts."""
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
