"""All-reduce on one machine against DDP and against processes that never talk. One command: `make bench`.

Contestants take turns in the same processes; what counts is the ratio of their best rounds. Nothing else should run
on the machine meanwhile.
"""

import sys

from harness.runs import bench
from rich.console import Console
from rich.table import Table

CASES = [("small", 2), ("small", 4), ("mlp25m", 2), ("mlp25m", 4), ("convnet", 2), ("transformer", 2)]


def main() -> None:
    table = Table("model", "workers", "steps/s, times DDP's", title="Speed: all-reduce against DDP on gloo")
    for model, workers in CASES:
        print(f"{model}, {workers} workers …", file=sys.stderr, flush=True)
        speed = bench("train", "--model", model, "--workers", str(workers), "--against", "ddp")
        table.add_row(model, str(workers), f"{speed['ratio']:.2f}")
    Console().print(table)
    print("memory …", file=sys.stderr, flush=True)
    heads = ("optimizer", "workers", "parameters and state, times DDP's", "everything, times DDP's")
    table = Table(*heads, title="Memory of mlp25m: all-reduce against DDP on gloo")
    for optimizer, workers in (("sgd", 2), ("adamw", 2), ("adamw", 4)):
        memory = bench("memory", "--model", "mlp25m", "--workers", str(workers), "--optimizer", optimizer)
        table.add_row(optimizer, str(workers), f"{memory['ratio']:.2f}", f"{memory['ratio_everything']:.2f}")
    Console().print(table)
    print("scaling …", file=sys.stderr, flush=True)
    scaling = bench("scaling", "--model", "mlp25m", "--workers", "1,2", "--plot", "scaling.html")
    table = Table("workers", "at once", "single", "same allocator", title="Scaling efficiency of mlp25m")
    for point in scaling["points"]:
        keys = ("efficiency", "efficiency_single", "efficiency_same_allocator")
        table.add_row(str(point["workers"]), *(f"{point[key]:.2f}" for key in keys))
    Console().print(table)


if __name__ == "__main__":
    main()
