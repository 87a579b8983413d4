"""The servers and the relay that a worker starts on its machine."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.cluster.process import is_stopped
from paceline.cluster.servers import StartServers, start_servers
from paceline.config import RunSpec, parse_servers
from paceline.errors import JoinError, Mismatch, ServerLost, UsageError
from paceline.parameters.joint import parts_of
from paceline.policies import Policy
from paceline.relay.launch import JoiningPlan, open_joining_relay, open_relay
from paceline.relay.messages import TransferLayout
from paceline.server.process import serve_in_thread
from paceline.strategies.context import TrainerContext
from paceline.strategies.worker_memory import WorkerMemory
from paceline.transport import BarrierKind
from paceline.transport.unix_connection import new_address

_RELAY_ENDS = 5.0
"""Seconds in which a relay has forwarded the last events."""
_DESCRIPTORS = 64
"""Open files (`ulimit -n`) that a process must be allowed for the launcher to keep the run's memory."""


class LocalServers:
    """Server processes, a server thread and a relay, as far as this worker has started them."""

    def __init__(self, context: TrainerContext, policy: Policy, *, everywhere: bool = False) -> None:
        """everywhere: True if by default every machine has a server, since none shall have the whole model."""
        self._policy = policy
        self._members, self._launch, self._say = context.members, context.launch, context.say
        self._timeouts = context.members.barrier.timeouts
        usual = "each" if everywhere and policy.servers == Policy.servers else str(policy.servers)
        self.where = str(parse_servers(context.launch.servers or usual))
        """The number of server processes, "lead" or "all"."""
        self.relay_addresses: Sequence[str] = ()
        """Per machine, the address at which its workers reach the server, if there are several machines."""
        self._relay: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def open(self, memory: WorkerMemory, rank: int | None, optimizer: Optimizer, *, spare: bool) -> str:
        """Open the relays, if there are several machines, and start the servers; all workers call it.

        Returns the address at which the workers of this machine reach the server. rank: this worker's, to the server;
        None if another worker of its replica speaks with the server. spare: True if the run survives the loss of a
        worker.
        """
        members, spec = self._members, memory.spec
        address = coordinator = members.gather(new_address().encode(), BarrierKind.ALLOCATE)[0].decode()
        if len(spec.machines) > 1:
            self._open_relay(memory, coordinator)
            address = self.relay_addresses[members.machine]
        if rank is not None or members.local.rank == 0:
            few = resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _DESCRIPTORS
            kept = () if few else memory.run.descriptors
            self._start(spec, rank, optimizer, coordinator if members.machine == 0 else address, kept, spare=spare)
        return address

    def _open_relay(self, memory: WorkerMemory, coordinator: str) -> None:
        """Open the relays of all machines; all workers call it."""
        compressed = None if memory.feedback is None else memory.gradient_size
        state = [shard.owned() for shard in memory.shards]
        kept = [memory.kept.spans(memory.layout, server, spans) for server, spans in enumerate(state)]
        layout = TransferLayout.of(memory.layout, compressed, state, kept)
        self.relay_addresses, self._relay = open_relay(
            self._members, memory.spec, layout, memory.run, coordinator, self._launch
        )

    def join_with_machine(self, own: RunSpec, make: Callable[[RunSpec], WorkerMemory]) -> None:
        """Open the relay of a machine that joins a running team, or wait until its first worker has opened it.

        own: as this worker would describe the run; make: returns new memory for the run.
        """
        if self._launch.plan is None:
            return
        rank, path = self._members.rank, Path(self._launch.plan)
        plan = msgspec.msgpack.decode(path.read_bytes(), type=JoiningPlan)
        spec, opened = plan.places.config.spec, path.with_suffix(".open")
        check_model(rank, own, spec)
        if rank == plan.places.ranks[0]:
            self._relay = open_joining_relay(self._launch, plan, make(spec).run)
            opened.touch()
        until = time.monotonic() + own.timeouts.join
        while not opened.exists():
            if time.monotonic() >= until:
                raise JoinError(f"rank {rank} cannot join: its machine's relay did not open in {own.timeouts.join:g} s")
            time.sleep(0.02)

    def _start(
        self, spec: RunSpec, rank: int | None, optimizer: Optimizer, address: str, kept: Sequence[int], *, spare: bool
    ) -> None:
        """Start the servers of this machine, as processes or in threads of workers.

        address: the coordinator's, or on other machines that of the relay. kept: descriptors of the run's memory, with
        which server processes can be started again.
        """
        patience, relays = self._timeouts.join, list(self.relay_addresses)
        if self.where in ("lead", "all"):
            if rank is not None and (rank == 0 or self.where == "all"):
                self._thread = serve_in_thread(address, rank, patience, self._say)
            if rank == 0:
                spare = spare and self.where == "lead"  # the run cannot survive the loss of a worker with a shard
                start = StartServers(0, address, patience, [], spare, needs_lead=True, relay_addresses=relays)
                start_servers(self._launch, start)
            return
        kinds = [("optimizer", type(part)) for part in parts_of(optimizer)]
        for what, kind in (*kinds, ("policy", type(self._policy))):
            if kind.__module__ == "__main__":
                raise UsageError(
                    f"the {what} {kind.__name__} is defined in the script itself, where a server process cannot find "
                    "it; move it to a module, or hold the parameters in the lead with --servers lead"
                )
        servers = spec.servers_on(self._members.machine)
        if self._members.local.rank == 0 and servers:
            paths = [path for path in sys.path if path]
            start = StartServers(
                len(servers), address, patience, paths, spare, first=servers.start, relay_addresses=relays
            )
            self._processes = start_servers(self._launch, start, kept)

    @property
    def holds(self) -> bool:
        """True if a server is a thread of this worker."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait until the servers that end with this process are no longer needed."""
        until = time.monotonic() + self._timeouts.barrier
        if self._thread is not None:
            self._thread.join(self._timeouts.barrier)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def wait_for_relay(self) -> None:
        """Wait until the relay that this worker has started has forwarded the last events."""
        if self._relay is None:
            return
        try:
            self._relay.wait(_RELAY_ENDS)
        except subprocess.TimeoutExpired:
            if is_stopped(self._relay.pid):  # other workers may still need a running one; a stopped one serves none
                self._relay.kill()


def check_model(rank: int, own: RunSpec, spec: RunSpec) -> None:
    """Refuses a worker that joins a run with another model or optimizer."""
    if spec.model != own.model:
        raise Mismatch(f"rank {rank} cannot join: its model or optimizer is not the one that the run trains", [rank])


def check_lead(members: Members) -> None:
    """Without the lead, which sends the spec, no server begins."""
    if members.machine == 0 and members.rank != 0 and (how := members.local.barrier.gone(0)) is not None:
        raise ServerLost(f"rank 0 {how} before it had told the server what to train", [0])
