"""The engine for one machine: starts the workers, relays what they say, and sees to it that all end when one must.

Nothing of a run outlives it. Workers die with the launcher (the kernel sees to that, see `bootstrap`), shared memory
has no name, and the port is only held, not listened on. So even `kill -9` of the launcher leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.cluster.crew import Crew
from paceline.cluster.servers import Start, command
from paceline.cluster.supervision import Ending, Interrupted, Relay, Supervision, interruptible
from paceline.config import Launch
from paceline.transport.meeting import Meeting
from paceline.transport.memory import Memory

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_TICK = 0.2
"""Seconds between looks at the clock while nothing happens."""


class LocalEngine:
    """Runs a script on several workers of this machine."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        workers: int,
        launch: Launch,
        *,
        relay: Relay,
        tick: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._script, self._arguments, self._workers = script, list(arguments), workers
        self._launch = launch
        self._tick = tick
        self._environment = dict(environment if environment is not None else os.environ)
        self._folder = Path(launch.folder or ".") / "farewells"
        self._crew = Crew(self._folder, relay)
        self._supervision = Supervision(workers, launch.timeouts)
        self._holder: socket.socket | None = None
        self._starter, self._asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(self) -> list[Ending]:
        """Start all, wait for all; returns how they ended, in that order. Raises Interrupted when told to stop."""
        supervision, crew = self._supervision, self._crew
        self._folder.mkdir(parents=True, exist_ok=True)
        with interruptible(_interrupt) as deaf:
            try:
                self._start()
                while not supervision.over(crew.size):
                    for gone in crew.turn(_TICK):
                        supervision.record(gone)
                    for number in supervision.due:
                        crew.signal(number)
                    self._tick()
            finally:
                deaf()
                self._stop()
        return supervision.endings

    def _start(self) -> None:
        control = Memory.create(Meeting.memory_size(self._workers))
        launch = msgspec.structs.replace(self._launch, control=control.descriptor, starter=self._starter.fileno())
        self._crew.listen(self._asked.fileno(), self._hear_lead)
        # Bound but not listening: nobody else is given this port, yet rank 0 may still listen on it.
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            self._holder = holder.dup()
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._holder.getsockname()[1]),
            "WORLD_SIZE": str(self._workers),
            "LOCAL_WORLD_SIZE": str(self._workers),
            "GROUP_RANK": "0",
            "PYTHONUNBUFFERED": "1",
            # One thread each, as torchrun does it: more only get into each other's way.
            "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1"),
            **launch.to_environment(),
        }
        for rank in range(self._workers):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            farewell = str(self._crew.farewell_of(rank))
            words = [sys.executable, str(_BOOTSTRAP), str(os.getpid()), farewell, str(self._script), *self._arguments]
            environment = {**self._environment, **shared, **own}
            self._crew.spawn(rank, words, environment, (control.descriptor, self._starter.fileno()))
        self._starter.close()
        control.close_descriptor()

    def _hear_lead(self) -> None:
        request = self._asked.recv(1 << 17)
        if request:
            self._start_servers(msgspec.msgpack.decode(request, type=Start))
        else:  # all workers have ended
            self._crew.unlisten(self._asked.fileno())

    def _start_servers(self, start: Start) -> None:
        """The lead has asked for servers."""
        self._supervision.spare = start.spare
        environment = {**self._environment, "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1")}
        for index in range(start.servers):
            rank = -1 - index
            self._crew.spawn(rank, command(start, index, os.getpid(), self._crew.farewell_of(rank)), environment)

    def _stop(self) -> None:
        """End whatever still runs."""
        self._crew.stop()
        self._asked.close()
        self._starter.close()
        if self._holder is not None:
            self._holder.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _interrupt(number: int) -> None:
    raise Interrupted(number)
