"""A group of workers on several machines: messages go through memory inside a machine, and over the network between."""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.cluster.membership import Members
from paceline.cluster.rendezvous import exchange_ports
from paceline.collectives.group import Group
from paceline.collectives.links import LinkMatrix, measure
from paceline.collectives.operation import DTYPES
from paceline.errors import WorkerLost
from paceline.transport.control_block import ControlBlock
from paceline.transport.machines_mailbox import MachinesMailbox, MailboxPart
from paceline.transport.mailbox import SendTransfer
from paceline.transport.network_mailbox import NetworkMailbox
from paceline.transport.peer_connections import connect_sockets
from paceline.transport.poller import Poller

_CLOCK = struct.Struct("=d")
_PROBE = -1
"""Tag of the messages by which links are measured."""


class MachinesGroup:
    """One worker of a team on several machines; has the surface of `Group` that a pipeline needs."""

    def __init__(self, members: Members, say: Callable[[str], None]) -> None:
        """All workers of the team call it."""
        self._members = members
        self.rank, self.size = members.rank, members.size
        here = members.machines[members.machine]

        def exchange(payload: bytes) -> list[bytes]:
            payloads = members.gather(payload)
            return [payloads[rank] for rank in here]

        self.local = Group(members.local.rank, members.local.size, exchange, members.barrier.timeouts, say)
        self.control = self.local.control
        self.control.ranks = [members.barrier.ranks[rank] for rank in here]
        machine_of = {rank: machine for machine, ranks in enumerate(members.machines) for rank in ranks}
        hosts = [members.hosts[machine_of[rank]] for rank in range(members.size)]
        self.network = NetworkMailbox(
            self.rank, _connect(members, hosts), hosts, members.barrier.ranks, members.barrier.timeouts, DTYPES
        )
        self.network.look_around = self._check_local
        aheads = members.gather(_CLOCK.pack(members.ahead))  # of which the leads know their machines'
        self.network.ahead = _CLOCK.unpack(aheads[here[0]])[0]
        self.mailbox: MachinesMailbox | MailboxPart = MachinesMailbox(self.local.mailbox, here, self.network)
        self._end = weakref.finalize(self, _end, self.network, self.local, os.getpid())

    def measure_links(self) -> LinkMatrix:
        """The links between the machines; all workers call it."""
        leads = [ranks[0] for ranks in self._members.machines]
        own = measure(_Leads(self.network, leads)).encode() if self.rank in leads else b""
        rows = self._members.gather(own)
        return LinkMatrix.of([rows[lead] for lead in leads])

    def watch_all(self, control: ControlBlock | None = None) -> None:
        """Lets a wait for a worker of this machine end if one on another machine is lost, too.

        control: of another group of workers of this machine.
        """
        control = control or self.control
        before = control.look

        def look() -> None:
            before()
            self.network.check()

        control.look = look

    def part(self, ranks: Sequence[int]) -> MachinesGroup:
        """Some of the workers, renumbered; one worker sends to another in one part only."""
        return _GroupPart(self, ranks)

    def _check_local(self) -> None:
        """Raises an error for a lost worker of any machine: none can go on without it."""
        for place in range(self.local.size):
            if place != self.local.rank and (how := self.control.gone(place)) is not None:
                who = self.control.ranks[place]
                raise WorkerLost(f"{self.control.called([place])} {how}; rank {self.rank} needs it", [who])

    def close(self) -> None:
        """Leaves the group."""
        self._end()
        self.local.close()


class _GroupPart(MachinesGroup):
    """Some workers of a group, which stays open when they leave their part."""

    def __init__(self, whole: MachinesGroup, ranks: Sequence[int]) -> None:
        assert isinstance(whole.mailbox, MachinesMailbox)
        self._whole, self._members, self._ranks = whole, whole._members, ranks
        self.local, self.control, self.network = whole.local, whole.control, whole.network
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.mailbox = MailboxPart(whole.mailbox, ranks)

    def measure_links(self) -> LinkMatrix:
        return self._whole.measure_links()

    def part(self, ranks: Sequence[int]) -> MachinesGroup:
        return self._whole.part([self._ranks[rank] for rank in ranks])

    def close(self) -> None:
        """The whole group is left by its owner."""


class _Leads:
    """A channel between the first workers of the machines."""

    def __init__(self, network: NetworkMailbox, ranks: list[int]) -> None:
        self.rank, self.size = ranks.index(network.rank), len(ranks)
        self._network, self._ranks = network, ranks

    def send(self, peer: int, tensor: torch.Tensor) -> SendTransfer:
        return self._network.send(self._ranks[peer], tensor, _PROBE)

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        self._network.receive(self._ranks[peer], tensor, _PROBE).wait()


def _end(network: NetworkMailbox, local: Group, process: int) -> None:
    if os.getpid() == process:  # a fork of a member is not a member
        network.close()


def _connect(members: Members, hosts: list[str]) -> dict[int, socket.socket]:
    """Proven connections to all other workers."""
    assert members.store is not None and members.secret is not None
    timeouts, sockets = members.barrier.timeouts, dict[int, socket.socket]()
    store = PrefixStore(f"mail/{next(members.numbers)}", members.store)
    connect_sockets(
        Poller(),
        members.rank,
        hosts,
        members.secret,
        *exchange_ports(store, timeouts),
        timeouts.join,
        range(members.rank),
        range(members.rank + 1, members.size),
        sockets.__setitem__,
    )
    return sockets
