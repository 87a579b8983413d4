"""A machine's relay, and the process that keeps it: started with its address on this machine and seconds to wait."""

from __future__ import annotations

import gc
import os
import sys
import time

import msgspec

from paceline.cluster.process import keep_freed_memory
from paceline.errors import JoinError
from paceline.relay.keeper import keep
from paceline.relay.messages import RelayBind, RelayConfig
from paceline.relay.sockets import RelaySockets
from paceline.server.memory import MEMORIES, RunMemory
from paceline.server.messages import MessagePart, Ready
from paceline.server.parts import receive_parts
from paceline.transport.unix_connection import Closed, Listener


def run_relay(address: str, patience: float) -> None:
    """Runs the relay of this machine until the run is over. patience: seconds until its first worker must have come."""
    listener = Listener(address)
    until = time.monotonic() + patience
    lead = listener.accept(RelayBind | MessagePart, patience)
    if lead is None:
        raise JoinError(f"no worker has connected to the relay within {patience:g} s")
    bind, descriptors = lead.receive_with_descriptors(MEMORIES)
    sockets = RelaySockets(bind, listener)
    lead.send(sockets.bound)
    text = receive_parts(lead, max(0.0, until - time.monotonic()))
    if text is None:
        raise JoinError(f"the first worker of machine {bind.machine} has not sent the addresses of the other relays")

    def opened() -> None:
        lead.send(Ready())
        lead.close()

    def say(text: str) -> None:
        print(f"paceline: machine {bind.machine}: {text}", file=sys.stderr, flush=True)

    config = msgspec.msgpack.decode(text, type=RelayConfig)
    keep(bind, config, sockets, RunMemory.inherited(descriptors), say, opened)


if __name__ == "__main__":
    gc.freeze()
    keep_freed_memory()  # of chunks, which come and go
    try:
        run_relay(sys.argv[1], float(sys.argv[2]))
    except Closed:
        pass  # its first worker is gone
    finally:
        sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and shared memory need not be unmapped piece by piece
