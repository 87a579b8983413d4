"""Forwards the events of an all-reduce team on several machines over the connections of its barriers.

Every half second, at a barrier, the lead of a machine sends new events to rank 0's machine; the rest follows when its
workers have ended. In an elastic team, where any worker may be lost, each sends its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from paceline.cluster.membership import Members
from paceline.events.forwarding import FIRST_MACHINE, StreamForwarder
from paceline.transport import ElasticBarrier, MachinesBarrier
from paceline.transport.peer_connections import FrameKind

_INTERVAL = 0.5
"""Seconds between two sends."""


class EventForwarding:
    """One worker's part in it; of a worker that has connections to other machines."""

    def __init__(self, members: Members, folder: Path) -> None:
        self._members = members
        self._elastic = isinstance(members.barrier, ElasticBarrier)
        only = [members.rank] if self._elastic else None
        self._streams = StreamForwarder(str(folder), members.machine, members.machines, only)
        self._next = time.monotonic() + _INTERVAL
        assert members.connections is not None
        assert isinstance(members.barrier, MachinesBarrier)
        if members.machine == FIRST_MACHINE:
            members.connections.heard = self._append
        else:
            members.barrier.idle = self._send_when_due
        members.exit_report = self._finish

    def _append(self, peer: int, payload: memoryview) -> None:
        """peer: the number of a machine; in an elastic team, a rank."""
        machine = peer
        if self._elastic:
            machine = next(index for index, ranks in enumerate(self._members.machines) if peer in ranks)
        name, text = msgspec.msgpack.decode(payload, type=tuple[str, bytes])
        self._streams.append(machine, name, text)

    def _send_when_due(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            self._send()

    def _send(self) -> None:
        connections = self._members.connections
        assert connections is not None
        for lines in self._streams.new_lines(self._members.ahead):
            connections.connections[FIRST_MACHINE].send(FrameKind.STREAM, msgspec.msgpack.encode(lines))

    def _finish(self) -> None:
        """Sends the last events, once all workers that this one sends for have ended."""
        if self._members.machine == FIRST_MACHINE:
            return
        if not self._elastic:
            self._members.local.wait_until_left()
        self._send()
        if self._members.connections is not None:
            self._members.connections.settle(5.0)
        self._streams.remove()
