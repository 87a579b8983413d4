"""Keeps a machine's relay alive: holds its sockets and memory, and starts it again if it is killed.

The relay is a fork of this process, so that it is there at once, and ends with it, however that ends. Callers that come
while there is none wait in the sockets' queues.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline import failpoints
from paceline.cluster.process import killed_in_fork
from paceline.cluster.run_state import Restarts, RunState
from paceline.relay.messages import RelayBind, RelayConfig
from paceline.relay.record import RelayRecord
from paceline.relay.relay import Relay
from paceline.relay.sockets import RelaySockets
from paceline.server.memory import RunMemory
from paceline.transport.unix_connection import Closed


def keep(
    bind: RelayBind,
    config: RelayConfig,
    sockets: RelaySockets,
    memory: RunMemory,
    say: Callable[[str], None],
    opened: Callable[[], None],
) -> None:
    """Runs the relay until the run is over; opened: called once it takes messages."""
    state, record, restarts = RunState(memory.record), RelayRecord(), Restarts()
    state.relayed = False
    life = 0
    while killed := killed_in_fork(lambda: _serve(bind, config, sockets, memory, record, life, say, opened)):  # noqa: B023
        if not (state.relayed and restarts.allowed()):
            state.relayed = False
            return
        life += 1
        say(f"its relay was {killed}; it is started again, and goes on where it was")


def _serve(
    bind: RelayBind,
    config: RelayConfig,
    sockets: RelaySockets,
    memory: RunMemory,
    record: RelayRecord,
    life: int,
    say: Callable[[str], None],
    opened: Callable[[], None],
) -> None:
    failpoints.enter(f"relay{bind.machine}")
    record.read()
    relay = Relay(bind, sockets, say, life)
    relay.open(config, memory, record)
    try:
        if not life:
            opened()
        relay.run()
    except Closed:
        return  # its first worker is gone
    finally:
        relay.close()
