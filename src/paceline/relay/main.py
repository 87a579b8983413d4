"""A relay as a process of its own: started with its address on this machine and the seconds to wait."""

from __future__ import annotations

import gc
import os
import sys
import time

import msgspec

from paceline import failpoints
from paceline.cluster.process import keep_freed_memory
from paceline.errors import JoinError
from paceline.relay.messages import RelayBind, RelayConfig
from paceline.relay.relay import Relay
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
    failpoints.enter(f"relay{bind.machine}")
    relay = Relay(bind, lambda text: print(f"paceline: machine {bind.machine}: {text}", file=sys.stderr, flush=True))
    lead.send(relay.bound)
    text = receive_parts(lead, max(0.0, until - time.monotonic()))
    if text is None:
        raise JoinError(f"the first worker of machine {bind.machine} has not sent the addresses of the other relays")
    relay.open(msgspec.msgpack.decode(text, type=RelayConfig), RunMemory.inherited(descriptors), listener)
    lead.send(Ready())
    lead.close()
    try:
        relay.run()
    finally:
        relay.close()


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
