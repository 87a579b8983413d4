"""The servers and the relay that a worker starts on its machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from torch.optim import Optimizer

from paceline.cluster.process import is_stopped
from paceline.cluster.servers import StartServers, start_servers
from paceline.config import RunSpec, parse_servers
from paceline.errors import UsageError
from paceline.policies import Policy
from paceline.relay.launch import open_relay
from paceline.relay.messages import TransferLayout
from paceline.server.process import serve_in_thread
from paceline.strategies.base import TrainerContext
from paceline.strategies.worker_memory import WorkerMemory

_RELAY_ENDS = 5.0
"""Seconds in which a relay has forwarded the last events."""


class LocalServers:
    """Server processes, a server thread and a relay, as far as this worker has started them."""

    def __init__(self, context: TrainerContext, policy: Policy) -> None:
        self._policy = policy
        self._members, self._launch, self._say = context.members, context.launch, context.say
        self._timeouts = context.members.barrier.timeouts
        self.where = str(parse_servers(context.launch.servers or str(policy.servers)))
        """The number of server processes, "lead" or "all"."""
        self.relay_addresses: Sequence[str] = ()
        """Per machine, the address at which its workers reach the server, if there are several machines."""
        self._relay: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def open_relay(self, memory: WorkerMemory, coordinator: str) -> None:
        """Open the relays of all machines; all workers call it."""
        compressed = None if memory.feedback is None else memory.gradient_size
        layout = TransferLayout.of(memory.layout, compressed, [shard.owned() for shard in memory.shards])
        self.relay_addresses, self._relay = open_relay(
            self._members, memory.spec, layout, memory.run, coordinator, self._launch.key
        )

    def start(self, spec: RunSpec, rank: int, optimizer: Optimizer, address: str, *, spare: bool) -> None:
        """Start the servers of this machine, as processes or in threads of workers.

        rank: this worker's, to the server; address: the coordinator's, or on other machines that of the relay;
        spare: True if the run survives the loss of a worker.
        """
        patience, relays = self._timeouts.join, list(self.relay_addresses)
        if self.where in ("lead", "all"):
            # The run cannot survive the loss of a worker that holds a shard.
            if rank == 0 or self.where == "all":
                self._thread = serve_in_thread(address, rank, patience, self._say)
            if rank == 0:
                start_servers(self._launch, StartServers(0, address, patience, [], False, relay_addresses=relays))
            return
        for what, kind in (("optimizer", type(optimizer)), ("policy", type(self._policy))):
            if kind.__module__ == "__main__":
                raise UsageError(
                    f"the {what} {kind.__name__} is defined in the script itself, where a server process cannot find "
                    "it; move it to a module, or hold the parameters in the lead with --servers lead"
                )
        servers = spec.servers_on(self._members.machine)
        if self._members.local.rank == 0 and servers:
            paths = [path for path in sys.path if path]
            start = StartServers(len(servers), address, patience, paths, spare, servers.start, relays)
            self._processes = start_servers(self._launch, start)

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
