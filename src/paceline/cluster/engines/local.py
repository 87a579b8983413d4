"""The engine for one machine: starts the workers, relays what they say, and sees to it that all end when one must.

Nothing of a run outlives it. Workers die with the launcher (the kernel sees to that, see `bootstrap`), shared memory
has no name, and the port is only held, not listened on. So even `kill -9` of the launcher leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.cluster.control import Scale, Told, announce, withdraw
from paceline.cluster.process_set import ProcessSet
from paceline.cluster.servers import Dismiss, Start, command
from paceline.cluster.supervision import ExitStatus, Interrupted, Relay, Supervision, interruptible
from paceline.config import Launch, capacity
from paceline.errors import JoinError, names
from paceline.transport.barrier import Barrier
from paceline.transport.memory import Memory
from paceline.transport.unix_connection import Closed, Listener, connect, new_address

_BOOTSTRAP = Path(__file__).parents[1] / "bootstrap.py"
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
        note: Callable[[str], None] = lambda _sentence: None,
        restarts: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._script, self._arguments, self._workers = script, list(arguments), workers
        self._launch = launch
        self._tick, self._note = tick, note
        self._restarts = restarts
        """How many killed workers may still be started again."""
        self._control: Listener | None = None
        self._joining: dict[str, str] = {}
        """The environment of workers who join, once there is something to join."""
        self._leaving: set[int] = set()
        """Who was told to leave."""
        self._environment = dict(environment if environment is not None else os.environ)
        self._home = Path(launch.folder or ".")
        self._folder = self._home / "exit_reports"
        self._processes = ProcessSet(self._folder, relay)
        self._supervision = Supervision(launch.timeouts)
        self._holder: socket.socket | None = None
        self._told: int | None = None
        """The signal that told this launcher to stop."""
        self._starter, self._asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(self) -> list[ExitStatus]:
        """Start all, wait for all; returns how they ended, in that order. Raises Interrupted when told to stop."""
        supervision, processes = self._supervision, self._processes
        self._folder.mkdir(parents=True, exist_ok=True)
        with interruptible(self._interrupt) as deaf:
            try:
                self._start()
                while not supervision.over(processes.ranks):
                    for gone in processes.turn(_TICK):
                        self._leaving.discard(gone.rank)
                        self._replace(supervision.record(gone))
                    for number in supervision.due:
                        processes.signal(number)
                    self._tick()
                    if self._told is not None:
                        raise Interrupted(self._told)
            finally:
                deaf()
                self._stop()
        return supervision.endings

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        control = Memory.create(Barrier.memory_size(self._workers))
        launch = msgspec.structs.replace(self._launch, control=control.descriptor, starter=self._starter.fileno())
        self._processes.listen(self._asked.fileno(), self._hear_lead)
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
        self._shared = {**self._environment, **shared}
        inherited = (control.descriptor, self._starter.fileno())
        for rank in range(self._workers):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.spawn(rank, self._words(rank), {**self._shared, **own}, inherited)
        self._starter.close()
        control.close_descriptor()
        if self._launch.folder is not None:
            self._control = listener = Listener(address := new_address())
            announce(self._home, address)
            self._processes.listen(listener.descriptor, lambda: self._hear_request(listener))

    def _words(self, rank: int) -> list[str]:
        """How a worker is started."""
        exit_report = str(self._processes.exit_report_of(rank))
        return [sys.executable, str(_BOOTSTRAP), str(os.getpid()), exit_report, str(self._script), *self._arguments]

    def _add(self, rank: int) -> None:
        """Start a worker that joins the run."""
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(max(self._workers, rank + 1))}
        own["LOCAL_WORLD_SIZE"] = own["WORLD_SIZE"]
        self._processes.spawn(rank, self._words(rank), {**self._shared, **self._joining, **own})

    def _hear_lead(self) -> None:
        request = self._asked.recv(1 << 17)
        if request:
            self._start_servers(msgspec.msgpack.decode(request, type=Start))
        else:  # all workers have ended
            self._processes.unlisten(self._asked.fileno())

    def _start_servers(self, start: Start) -> None:
        """The lead has asked for servers."""
        self._supervision.spare, self._supervision.joining = start.spare, bool(start.address)
        self._server = start.address
        if not start.address:  # there is nothing to join
            return
        launch = msgspec.structs.replace(self._launch, joins=start.address)
        self._joining = launch.to_environment()
        environment = {**self._environment, "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1")}
        for index in range(start.servers):
            rank = -1 - index
            self._processes.spawn(
                rank, command(start, index, os.getpid(), self._processes.exit_report_of(rank)), environment
            )

    # -- more workers, or fewer --------------------------------------------------------------------------------------

    def _replace(self, ending: ExitStatus) -> None:
        """Start a worker again that was killed, if that is wanted."""
        if ending.rank >= 0 and ending.spared and self._restarts > 0 and self._joining:
            self._restarts -= 1
            ending.replaced = True
            self._note(f"{ending.spoken}; it is started again ({self._restarts} restarts left)")
            self._add(ending.rank)

    def _hear_request(self, control: Listener) -> None:
        connection = control.accept(Scale, 0)
        if connection is None:
            return
        try:
            request = connection.receive_within(1.0)
            if request is not None:
                connection.send(self._scale(request.workers))
        except (Closed, msgspec.DecodeError):
            pass  # whoever it was is gone, or is none of us
        finally:
            connection.close()

    def _scale(self, wanted: int) -> Told:
        """Have so many workers from here on."""
        here = sorted(rank for rank in self._processes.ranks if rank >= 0 and rank not in self._leaving)
        room = capacity(self._workers)
        if not self._joining:
            return Told("only a run with a parameter server, once its training has begun, can have more workers", True)
        if self._supervision.ending or not here:
            return Told("the run is about to end", True)
        if not 1 <= wanted <= room:
            return Told(f"{wanted} workers are asked for; this run has room for 1 to {room}", True)
        free = [rank for rank in range(room) if rank not in self._processes.ranks]
        if len(here) + len(free) < wanted:
            return Told("workers who were told to leave have not left yet; try again", True)
        for rank in free[: max(0, wanted - len(here))]:
            self._add(rank)
        for rank in here[wanted:]:
            self._dismiss(rank)
        sentence = f"from {len(here)} to {wanted} workers"
        if wanted > len(here):
            sentence += f": {names(free[: wanted - len(here)])} will join"
        elif wanted < len(here):
            sentence += f": {names(here[wanted:])} will leave"
        self._note(sentence)
        return Told(sentence, False)

    def _dismiss(self, rank: int) -> None:
        self._leaving.add(rank)
        with contextlib.suppress(JoinError, Closed):  # the server has ended: so will the worker
            connection = connect(self._server, Told, 0.0)
            connection.send(Dismiss(rank))
            connection.close()

    def _stop(self) -> None:
        """End whatever still runs."""
        self._processes.stop()
        if self._control is not None:
            self._control.close()
            withdraw(self._home)
        self._asked.close()
        self._starter.close()
        if self._holder is not None:
            self._holder.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _interrupt(self, number: int) -> None:
        self._told = number  # where Python swallows exceptions, as in a finalizer, the next one is not far
        raise Interrupted(number)
