"""A relay as a process of its own: started with its address on this machine and the seconds to wait."""

from __future__ import annotations

import gc
import os
import sys

from paceline.cluster.process import keep_freed_memory
from paceline.relay.relay import run_relay
from paceline.transport.unix_connection import Closed


def main() -> None:
    address, patience = sys.argv[1], float(sys.argv[2])
    gc.freeze()
    keep_freed_memory()  # of chunks, which come and go
    try:
        run_relay(address, patience, lambda message: print(f"paceline: {message}", file=sys.stderr, flush=True))
    except Closed:
        pass  # its first worker is gone
    finally:
        sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and shared memory need not be unmapped piece by piece


if __name__ == "__main__":
    main()
