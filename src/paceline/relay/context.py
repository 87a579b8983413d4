"""What all parts of a relay share."""

from __future__ import annotations

import dataclasses

from paceline.cluster.run_state import RunState
from paceline.events.forwarding import FIRST_MACHINE, StreamForwarder
from paceline.parameters.worker_table import WorkerTable
from paceline.relay.messages import RelayConfig
from paceline.relay.record import RelayRecord
from paceline.relay.transfer import TransferManager
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.transport.links import LinkSender
from paceline.transport.poller import Poller


@dataclasses.dataclass(slots=True)
class RelayContext:
    """One relay's run, memory, links and loop."""

    config: RelayConfig
    memory: RunMemory
    poller: Poller
    control: dict[int, LinkSender]
    """By machine, the link for short messages."""
    transfers: TransferManager
    streams: StreamForwarder
    flags: SharedFlags
    machine_of: dict[int, int]
    """By worker, or by -1 - server, its machine."""
    table: WorkerTable
    record: RelayRecord
    state: RunState
    came: bool = False
    """True if any worker or server has come."""

    @property
    def machine(self) -> int:
        return self.config.machine

    @property
    def at_coordinator(self) -> bool:
        """True if the coordinator is on this machine."""
        return self.machine == FIRST_MACHINE

    def adopt(self, who: int, machine: int) -> None:
        """A worker joins on a machine."""
        self.machine_of[who] = self.record.state.moved[who] = machine
        self.streams.assign(who, machine)
        self.record.save()

    def serve(self) -> None:
        """Lets the relay come back if it is killed, and servers, of which the coordinator decides on its machine."""
        if not self.config.spec.places:  # parts of replicas have no session that could go on
            self.state.relayed = True
            if not self.at_coordinator:
                self.state.live = True

    def end(self) -> None:
        """Neither comes back any more, as the run is over."""
        self.state.end_relay()
        if not self.at_coordinator:
            self.state.live = False

    def go_on(self) -> None:
        """Takes up what the record says of a relay before this one that was killed, if there was one."""
        state = self.record.state
        self.streams.bases.update(state.bases)
        self.streams.left.update(state.left)
        state.bases, state.left = self.streams.bases, self.streams.left
        for who, machine in state.moved.items():
            self.machine_of[who] = machine
            self.streams.place(who, machine)
        self.came = bool(state.members or state.gone or state.sessions)
