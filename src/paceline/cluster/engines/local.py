"""The engine for one machine: starts workers and servers as processes of the launcher.

No part of a run outlives it. Workers die with the launcher (the kernel ends them, see `bootstrap`), shared memory has
no name, and the port is only held, not listened on. So even `kill -9` of the launcher leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from paceline.cluster.control import ScaleReply, ScaleRequest, announce, withdraw
from paceline.cluster.engines.base import TICK, Engine, EngineCallbacks, Job, SupervisedRun
from paceline.cluster.process_set import ProcessEnd, ProcessSet
from paceline.cluster.run_state import KeptMemory
from paceline.cluster.servers import BOOTSTRAP, SERVER, Dismiss, StartServers
from paceline.cluster.supervision import ExitStatus, Interrupted
from paceline.config import Launch, capacity
from paceline.errors import JoinError, names
from paceline.transport.barrier import Barrier
from paceline.transport.memory import Memory
from paceline.transport.unix_connection import Closed, Listener, connect, new_address, receive_descriptors

_MOST_DESCRIPTORS = 16
"""Descriptors that come with a request of the lead."""
_SPARE_AFTER = 5.0
"""Seconds after training has begun, or after the last spare was used, until one is started."""


class LocalEngine(Engine):
    """Runs a script on several workers of this machine."""

    NAME = "local"
    SELECTORS = ("local",)
    PLACE = "on this machine"

    def run(self, launch: Launch, callbacks: EngineCallbacks) -> list[ExitStatus]:
        return LocalRun(self.job, launch, callbacks).run()


class LocalRun(SupervisedRun):
    """One run on this machine. Its launcher answers `paceline scale`."""

    def __init__(self, job: Job, launch: Launch, callbacks: EngineCallbacks) -> None:
        super().__init__(job, launch, callbacks)
        # One thread each, as torchrun does it: more only compete with each other.
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **job.environment}
        self._workers_environment: dict[str, str] = {}
        """That of all workers; those that join later have another Launch in it."""
        self._server_address = ""
        """Where workers can join the run; empty while they cannot."""
        self._peers = False
        """True if they join the other workers, not a server."""
        self._leaving: set[int] = set()
        """Ranks of the workers that were told to leave."""
        self._exit_reports = self._make_exit_reports()
        self._processes = ProcessSet(BOOTSTRAP, self._exit_reports, callbacks.output)
        self._memory = KeptMemory()
        self._servers: StartServers | None = None
        """The lead's last request for servers."""
        self._barriers: Memory | None = None
        """The memory of the workers' barriers."""
        self._spare_due = float("inf")
        """When a spare process is to be started: not while others begin, since importing takes a core."""
        self._control: Listener | None = None
        self._port_holder = socket.socket()
        self._lead_socket, self._own_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self, attempt: int) -> None:
        if attempt:
            self._clear()
        workers = self.job.workers
        self._barriers = control = Memory.create(Barrier.memory_size(capacity(workers)))
        launch = msgspec.structs.replace(self.launch, control=control.descriptor, starter=self._lead_socket.fileno())
        self._processes.listen(self._own_socket.fileno(), self._read_lead)
        # Bound but not listening: no other process is given this port, yet rank 0 may still listen on it.
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        self._workers_environment = {
            **self._environment,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port_holder.getsockname()[1]),
            "GROUP_RANK": "0",
            "PYTHONUNBUFFERED": "1",
            **launch.to_environment(),
        }
        ranks = self.job.ranks or range(workers)
        for place, rank in enumerate(ranks):
            self._start_worker(rank, max(ranks) + 1, (control.descriptor, self._lead_socket.fileno()), place)
        self.supervision.tolerates_loss = bool(self.job.ranks)
        self._lead_socket.close()
        control.close_descriptor()
        if self.launch.folder is not None and self._control is None and not self.job.ranks:
            self._listen()

    def _clear(self) -> None:
        """End what is left of a team that was lost."""
        while self.running:
            self.signal(signal.SIGKILL)
            self.poll(TICK)
        self._server_address = ""
        self._leaving.clear()
        with contextlib.suppress(KeyError):  # it has noticed that all workers have ended
            self._processes.unlisten(self._own_socket.fileno())
        self._own_socket.close()
        self._port_holder.close()
        self._port_holder = socket.socket()
        self._lead_socket, self._own_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def _make_exit_reports(self) -> Path:
        """A folder for the errors of scripts: in the run's, or a temporary one if that cannot be written."""
        if self.launch.folder is not None and not self.job.ranks:
            with contextlib.suppress(OSError):
                path = self.folder / "exit_reports"
                path.mkdir(mode=0o700, exist_ok=True)
                return path
        return Path(tempfile.mkdtemp(prefix="paceline-"))

    def _listen(self) -> None:
        """Take requests of `paceline scale`, which finds the address in the run's folder."""
        listener = Listener(address := new_address())
        try:
            announce(self.folder, address)
        except OSError:  # the run cannot be scaled; that nothing can be written there is said elsewhere
            listener.close()
            return
        self._control = listener
        self._processes.listen(listener.descriptor, lambda: self._answer(listener))

    def _start_worker(
        self, rank: int, world_size: int, inherited: tuple[int, ...] = (), place: int | None = None
    ) -> None:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank if place is None else place)}
        own |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(len(self.job.ranks) or world_size)}
        environment = {**self._workers_environment, **own}
        inherited = (*inherited, *self.job.inherited)
        self._processes.spawn(rank, self.job.script, self.job.arguments, environment, inherited)
        self._plan_spare()

    def restart_worker(self, rank: int) -> None:
        """Start a worker that joins the run; also one that has not been there before."""
        self._start_worker(rank, max(self.job.workers, rank + 1))

    def can_restart(self, status: ExitStatus) -> bool:
        return super().can_restart(status) and (not self._peers or self._has_members())

    def _has_members(self) -> bool:
        """True if a worker runs that is a member of the team, not one that wants to join it."""
        assert self._barriers is not None
        members = Barrier.members(self._barriers, capacity(self.job.workers))
        return any(rank >= 0 and members[rank] == self._processes.pid(rank) for rank in self.running)

    def _read_lead(self) -> None:
        request, descriptors = receive_descriptors(self._own_socket, _MOST_DESCRIPTORS)
        if request:
            if descriptors:
                self._memory.keep(descriptors)
            self.take_request(request)
        else:  # all workers have ended
            self._processes.unlisten(self._own_socket.fileno())

    def start_servers(self, request: StartServers) -> None:
        self._server_address, self._servers = request.address, request
        self._peers = request.peers
        self._plan_spare()
        if not request.address:
            return
        # A run that is open to other machines is joined through this machine's relay.
        launch = msgspec.structs.replace(self.launch, joins=(*request.relay_addresses, request.address)[0])
        self._workers_environment |= launch.to_environment()
        for index in range(request.servers):
            self._processes.spawn(-1 - index, SERVER, request.arguments(index), self._environment)

    def comes_back(self, end: ProcessEnd) -> bool:
        if end.rank >= 0 or not end.code:
            return False
        if end.code < 0 and self._servers is not None and self._memory.may_restart():
            return True
        self._memory.give_up()  # so that no worker waits for it
        return False

    def restart_server(self, index: int) -> None:
        assert self._servers is not None
        kept = self._memory.descriptors
        arguments = self._servers.arguments(index, kept)
        self._processes.spawn(-1 - index, SERVER, arguments, self._environment, kept)
        self._plan_spare()

    def _plan_spare(self) -> None:
        if self.restarts_left and self._server_address:
            self._spare_due = time.monotonic() + _SPARE_AFTER

    # -- while it runs -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> set[int]:
        return self._processes.ranks

    def poll(self, seconds: float) -> list[ProcessEnd]:
        ends = self._processes.poll(seconds)
        for end in ends:
            if 0 <= end.rank < self.job.workers and end.code == 0 and self._barriers is not None:
                # The others may be waiting for it to join, and cannot know of a process that they have never seen.
                Barrier.sign_out_absent(self._barriers, end.rank, capacity(self.job.workers))
        self._leaving -= {end.rank for end in ends}
        if time.monotonic() >= self._spare_due and not self.supervision.ending:
            self._spare_due = float("inf")
            self._processes.prepare(self._workers_environment)
        return ends

    def end_worker(self, rank: int) -> None:
        self._processes.signal(signal.SIGKILL, [rank])

    def signal(self, number: int) -> None:
        self._processes.signal(number)

    def preempt(self) -> None:
        self._processes.preempt()

    def interrupt(self, number: int) -> None:
        super().interrupt(number)
        raise Interrupted(number)  # at once; where Python swallows it, as in a finalizer, the loop raises it again

    def _answer(self, control: Listener) -> None:
        """Answer a request of `paceline scale`."""
        connection = control.accept(ScaleRequest, 0)
        if connection is None:
            return
        # Suppressed: the sender has gone, or is another program.
        with contextlib.suppress(Closed, msgspec.DecodeError), contextlib.closing(connection):
            request = connection.receive_within(1.0)
            if request is not None:
                connection.send(self._scale(request.workers))

    def _scale(self, wanted: int) -> ScaleReply:
        """Start or dismiss workers until there are as many as wanted."""
        here = sorted(rank for rank in self.running if rank >= 0 and rank not in self._leaving)
        room = capacity(self.job.workers)
        if not self._server_address:
            return ScaleReply(
                "only a run with a parameter server, or by all-reduce with --elastic and two workers or more, can be "
                "scaled, once its training has begun",
                True,
            )
        if self.supervision.ending or not here:
            return ScaleReply("the run is about to end", True)
        if not 1 <= wanted <= room:
            return ScaleReply(f"{wanted} workers are asked for; this run has room for 1 to {room}", True)
        free = [rank for rank in range(room) if rank not in self.running]
        if len(here) + len(free) < wanted:
            return ScaleReply("workers that were told to leave have not left yet; try again", True)
        if wanted > len(here) and self.launch.open is not None:  # their ranks may be those of other machines' workers
            return ScaleReply("this run is open to other machines; add workers with `paceline run --join`", True)
        joining, leaving = free[: max(0, wanted - len(here))], here[wanted:]
        for rank in joining:
            self.restart_worker(rank)
        for rank in leaving:
            self._dismiss(rank)
        sentence = f"from {len(here)} to {wanted} workers"
        if joining:
            sentence += f": {names(joining)} will join"
        elif leaving:
            sentence += f": {names(leaving)} will leave"
        self.callbacks.note(sentence)
        return ScaleReply(sentence, False)

    def _dismiss(self, rank: int) -> None:
        self._leaving.add(rank)
        if self._peers:
            self._processes.preempt([rank])
            return
        with contextlib.suppress(JoinError, Closed):  # the server has ended: so will the worker
            connection = connect(self._server_address, ScaleReply, 0.0)
            connection.send(Dismiss(rank))
            connection.close()

    def stop(self) -> None:
        self._processes.stop()
        self._memory.close()
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(OSError):
                withdraw(self.folder)
        for one in (self._own_socket, self._lead_socket, self._port_holder):
            one.close()
        shutil.rmtree(self._exit_reports, ignore_errors=True)
