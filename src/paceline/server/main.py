"""Main module of a server process: takes the address, the server's number, seconds to wait, and import paths.

Of a server that is started again, it also takes the descriptors of the run's memory, before the paths; else "-". With
"keep:" before them, it keeps the memory, and starts the server as a fork, again if that is killed.
"""

from __future__ import annotations

import gc
import sys

import torch

from paceline.cluster.compiler import import_compiler_late
from paceline.cluster.process import keep_freed_memory, killed_in_fork
from paceline.cluster.run_state import KeptMemory
from paceline.server.process import serve


def main() -> None:
    address, index, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    memory = sys.argv[4].removeprefix("keep:")
    descriptors = [] if memory == "-" else list(map(int, memory.split(",")))
    sys.path.extend(sys.argv[5:])  # where the workers find the optimizer's class
    torch.set_num_threads(1)
    import_compiler_late()
    keep_freed_memory()
    gc.freeze()  # imported objects never become garbage, so collections can skip them
    if memory == sys.argv[4]:
        serve(address, index, patience, say, descriptors)
    else:
        keep(address, index, patience, descriptors)


def keep(address: str, index: int, patience: float, descriptors: list[int]) -> None:
    """Runs a server in a fork until the run is over, and starts it again if it is killed."""
    memory = KeptMemory()
    memory.keep(descriptors)
    killed = killed_in_fork(lambda: serve(address, index, patience, say))
    while killed and memory.may_restart():
        say(f"server {index} was {killed}; it is started again, and goes on where it was")
        killed = killed_in_fork(lambda: serve(address, index, patience, say, memory.descriptors))


def say(message: str) -> None:
    print(f"paceline: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
