"""Forwards the events of an all-reduce team on several machines over the connections of its barriers.

Every half second, at a barrier, the lead of a machine sends new events to rank 0's machine; the rest follows when its
workers have ended. In an elastic team, where any worker may be lost, each sends its own, to the hub of the barriers: if
the hub is lost, all streams are sent again, from their beginning, to the next one.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from paceline.cluster.membership import Members
from paceline.events.forwarding import FIRST_MACHINE, StreamForwarder, shifted
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
        self._hub = FIRST_MACHINE
        """The number of the connection to the machine where the run's folder is; in an elastic team, a rank."""
        self._again: set[str] = set()
        """Streams that the hub gets again, from their beginning."""
        assert members.connections is not None
        assert isinstance(members.barrier, MachinesBarrier)
        if members.machine == FIRST_MACHINE or self._elastic:
            members.connections.take(FrameKind.STREAM, self._append)
        if members.machine != FIRST_MACHINE or self._elastic:
            members.barrier.idle = self._send_when_due
        members.exit_report = self._finish

    def _append(self, peer: int, payload: memoryview) -> None:
        """peer: the number of a machine; in an elastic team, a rank."""
        machine = peer
        if self._elastic:
            machine = next(index for index, ranks in enumerate(self._members.machines) if peer in ranks)
            self._follow()
        name, text, again = msgspec.msgpack.decode(payload, type=tuple[str, bytes, bool])
        if self._members.ahead:
            text = shifted(text, -self._members.ahead)  # to the clock of this machine, which was not the first one's
        self._streams.append(machine, name, text, again=again)

    def _send_when_due(self) -> None:
        self._follow()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            self._send()

    def _follow(self) -> None:
        """Sends the streams to another hub, if the last one is lost."""
        barrier = self._members.barrier
        if isinstance(barrier, ElasticBarrier) and barrier.hub != self._hub:
            self._hub = barrier.hub
            self._again = {str(self._members.rank)}
            self._streams.move(barrier.home)

    def _send(self) -> None:
        connections = self._members.connections
        assert connections is not None
        for name, lines, _ in self._streams.new_lines(self._members.ahead):
            message = msgspec.msgpack.encode((name, lines, name in self._again))
            connections.connections[self._hub].send(FrameKind.STREAM, message)
            self._again.discard(name)

    def _finish(self) -> None:
        """Sends the last events, once all workers that this one sends for have ended."""
        connections = self._members.connections
        if self._members.machine == self._members.home or connections is None:
            return
        if not self._elastic:
            self._members.local.wait_until_left()
        self._send()
        connections.settle(5.0)
        if connections.connections[self._hub].open:
            self._streams.remove()
