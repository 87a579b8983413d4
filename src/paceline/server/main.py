"""Main module of a server process: takes the address, the server's number, seconds to wait, and import paths.

Of a server that is started again, it also takes the descriptors of the run's memory, before the paths; else "-".
"""

from __future__ import annotations

import gc
import sys

import torch

from paceline.cluster.compiler import import_compiler_late
from paceline.cluster.process import keep_freed_memory
from paceline.server.process import serve


def main() -> None:
    address, index, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    descriptors = [] if sys.argv[4] == "-" else list(map(int, sys.argv[4].split(",")))
    sys.path.extend(sys.argv[5:])  # where the workers find the optimizer's class
    torch.set_num_threads(1)
    import_compiler_late()
    keep_freed_memory()
    gc.freeze()  # imported objects never become garbage, so collections can skip them
    serve(address, index, patience, say, descriptors)


def say(message: str) -> None:
    print(f"paceline: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
