"""The events of a team on several machines, on their way to the run's folder where rank 0 is.

Every worker records on its own machine. Now and then the machine's lead sends what was written home, over the wire on
which it meets the other leads; what is left goes when its workers have ended. In an elastic team, where any of them may
be lost, each worker sends its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from paceline.cluster.membership import Members
from paceline.server.streams import Streams
from paceline.transport import SpreadMeeting, StarMeeting
from paceline.transport.wires import Kind

_INTERVAL = 0.5
"""Seconds between two letters home."""
HOME = 0


class Lines(msgspec.Struct, frozen=True, array_like=True):
    """More of one worker's stream."""

    name: str
    text: bytes


class _Places(msgspec.Struct, frozen=True):
    folder: str | None
    machine: int
    ranks: list[list[int]]
    peers: list[str]


class Homeward:
    """One's part in it who has wires."""

    def __init__(self, members: Members, folder: Path) -> None:
        self._members = members
        self._home = members.machine == HOME
        self._alone = isinstance(members.meeting, StarMeeting)
        """Whether each worker sends its own events, on a wire of its own."""
        places = _Places(str(folder), members.machine, members.machines, members.hosts)
        self._streams = Streams(places, self._home, [members.rank] if self._alone else None)
        self._next = time.monotonic() + _INTERVAL
        assert members.wires is not None
        assert isinstance(members.meeting, SpreadMeeting)
        if self._home:
            members.wires.heard = self._take
        else:
            members.meeting.idle = self._now_and_then
        members.farewell = self._finish

    def _take(self, number: int, payload: bytes) -> None:
        machine = number
        if self._alone:
            machine = next(index for index, ranks in enumerate(self._members.machines) if number in ranks)
        lines = msgspec.msgpack.decode(payload, type=Lines)
        self._streams.take(machine, lines.name, lines.text)

    def _now_and_then(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            self._send()

    def _send(self) -> None:
        wires = self._members.wires
        assert wires is not None
        for name, text in self._streams.more(self._members.ahead):
            wires.wires[HOME].send(Kind.STREAM, msgspec.msgpack.encode(Lines(name, text)))

    def _finish(self) -> None:
        """This script has ended: what a lead's machine still has to say goes home, once all there have ended."""
        if self._home:
            return
        if not self._alone:
            self._members.local.wait_until_left()
        self._send()
        if self._members.wires is not None:
            self._members.wires.settle(5.0)
        self._streams.remove()
