"""An MPI program: OpenMPI's all-reduce at several sizes; rank 0 writes the times. Needs mpi4py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI


def main() -> None:
    # A plain dictionary: this runs under mpirun, where only mpi4py and numpy are sure to be there.
    task = json.loads(sys.argv[1])
    world = MPI.COMM_WORLD
    seconds = {}
    for size in task["sizes"]:
        array = numpy.zeros(max(1, size // 4), dtype=numpy.float32)
        for _ in range(2):
            world.Allreduce(MPI.IN_PLACE, array)
        start = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, array)
        once = world.bcast(time.perf_counter() - start)
        count = max(3, min(5000, int(task["seconds"] / once)))
        world.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            world.Allreduce(MPI.IN_PLACE, array)
        seconds[str(size)] = (time.perf_counter() - start) / count
    if world.rank == 0:
        Path(task["output"]).write_text(json.dumps(seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
