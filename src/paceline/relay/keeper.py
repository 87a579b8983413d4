"""Keeps a machine's relay alive: holds its sockets and memory, and starts it again if it is killed.

The relay is a fork of this process, so that it is there at once, and ends with it, however that ends. Callers that come
while there is none wait in the sockets' queues.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

from paceline import failpoints
from paceline.cluster.run_state import Restarts, RunState
from paceline.relay.messages import RelayBind, RelayConfig
from paceline.relay.record import RelayRecord
from paceline.relay.relay import Relay
from paceline.relay.sockets import RelaySockets
from paceline.server.memory import RunMemory

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
    while _run(lambda: _serve(bind, config, sockets, memory, record, life, say, opened)):  # noqa: B023
        if not (state.relayed and restarts.allowed()):
            state.relayed = False
            return
        life += 1
        say(f"its relay was killed by signal 9 (SIGKILL); it is started again (attempt {life})")


def _run(work: Callable[[], None]) -> bool:
    """Runs this in a process of its own; True if that was killed."""
    own = os.getpid()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() == own:
                work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # nothing is left to do, and shared memory need not be unmapped piece by piece
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


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
    if not life:
        opened()
    try:
        relay.run()
    finally:
        relay.close()
