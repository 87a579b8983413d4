"""The events of a team on several machines, on their way to the run's folder where rank 0 is.

Every worker records on its own machine. Every half second the machine's lead forwards new events to
rank 0's machine over its connection; the rest follows when its workers have ended. In an elastic team, where any may
be lost, each worker sends its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from paceline.cluster.membership import Members
from paceline.relay.event_streams import EventStreams
from paceline.transport import ElasticBarrier, MachinesBarrier
from paceline.transport.tcp_connection import FrameKind

_INTERVAL = 0.5
"""Seconds between two letters home."""
HOME = 0


class ForwardedLines(msgspec.Struct, frozen=True, array_like=True):
    """More of one worker's stream."""

    name: str
    text: bytes


class _StreamOffsets(msgspec.Struct, frozen=True):
    folder: str | None
    machine: int
    ranks: list[list[int]]
    peers: list[str]


class EventForwarding:
    """One's part in it who has connections."""

    def __init__(self, members: Members, folder: Path) -> None:
        self._members = members
        self._home = members.machine == HOME
        self._alone = isinstance(members.barrier, ElasticBarrier)
        """Whether each worker sends its own events, on a connection of its own."""
        places = _StreamOffsets(str(folder), members.machine, members.machines, members.hosts)
        self._streams = EventStreams(places, self._home, [members.rank] if self._alone else None)
        self._next = time.monotonic() + _INTERVAL
        assert members.connections is not None
        assert isinstance(members.barrier, MachinesBarrier)
        if self._home:
            members.connections.heard = self._take
        else:
            members.barrier.idle = self._now_and_then
        members.exit_report = self._finish

    def _take(self, number: int, payload: bytes) -> None:
        machine = number
        if self._alone:
            machine = next(index for index, ranks in enumerate(self._members.machines) if number in ranks)
        lines = msgspec.msgpack.decode(payload, type=ForwardedLines)
        self._streams.take(machine, lines.name, lines.text)

    def _now_and_then(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            self._send()

    def _send(self) -> None:
        connections = self._members.connections
        assert connections is not None
        for name, text in self._streams.more(self._members.ahead):
            connections.connections[HOME].send(FrameKind.STREAM, msgspec.msgpack.encode(ForwardedLines(name, text)))

    def _finish(self) -> None:
        """This script has ended: what a lead's machine still has to say goes home, once all there have ended."""
        if self._home:
            return
        if not self._alone:
            self._members.local.wait_until_left()
        self._send()
        if self._members.connections is not None:
            self._members.connections.settle(5.0)
        self._streams.remove()
