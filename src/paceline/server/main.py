"""A server as a process of its own: started with the address, the number of the server and the seconds to wait."""

from __future__ import annotations

import gc
import sys

import torch

from paceline.cluster.process import import_compiler_late, keep_freed_memory
from paceline.server.process import serve


def main() -> None:
    address, index, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    sys.path.extend(sys.argv[4:])  # where the workers find the optimizer's class
    torch.set_num_threads(1)
    import_compiler_late()
    keep_freed_memory()
    gc.freeze()  # what was imported is never garbage, and no collection need look at it
    serve(address, index, patience, lambda message: print(f"paceline: {message}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
