"""The connections of one member of a barrier over machines: short frames, at once, and the end of a peer is known.

The lead of each machine has one to the lead of every other; in an elastic team each member has one to every other.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

from paceline.errors import JoinError, TeamError
from paceline.transport.handshake import Handshake, PortListener, begin_call
from paceline.transport.keys import Secret
from paceline.transport.poller import Poller
from paceline.transport.tcp_connection import TcpConnection, damage, make_frame, read_header, silence

_LARGEST = 1 << 31
"""Bytes of a frame: the notes of all members."""
_SLICE = 0.1
"""Seconds between looks at the clock while nothing comes."""
_CLOCK = struct.Struct("!d")
_TICKS = 5
"""Round trips in which two clocks are compared; the quickest counts."""


class FrameKind(IntEnum):
    """The kinds of frames between members of a barrier; the first byte of a frame's message."""

    NOTES = 1
    """The notes of one machine's workers, at one barrier."""
    FAILURE = 2
    """An error that ends the sender's run."""
    BYE = 3
    """The sender's script has ended."""
    STREAM = 4
    """Events, for the run's folder."""
    END = 5
    """The last frame of its sender."""
    CLOCK = 6
    """The time of its sender."""
    TABLE = 7
    """The notes of all members, at one barrier."""
    FOLLOW = 8
    """In an elastic team: the sender has given up the hub before, and takes the receiver for the next one."""
    VALUE = 9
    """A key of the members' store, and its value."""
    WAITING = 10
    """In an elastic team: the hub lives, and waits for others."""


_BYTES = {kind: bytes([kind]) for kind in FrameKind}
_KINDS = {int(kind): kind for kind in FrameKind}


class PeerConnection:
    """The connection to one peer."""

    def __init__(self, poller: Poller, connection: socket.socket, host: str, patience: float, index: int = 0) -> None:
        """index: the number of this member's machine, or its rank in an elastic team."""
        self.host, self._index = host, index
        self.left = False
        """True if the peer's script has ended."""
        self.ended = False
        """True if nothing comes any more."""
        self.frames: deque[tuple[FrameKind, memoryview]] = deque()
        """Frames that have come and were not taken yet."""
        self.takers: dict[FrameKind, Callable[[memoryview], None]] = {}
        """By kind, what takes the frames that are not kept in `frames`."""
        self._sent = self._received = 0
        self._failure: TeamError | None = None
        self._connection = TcpConnection(poller, connection, host, patience, _LARGEST, self._take, self._end)

    @property
    def open(self) -> bool:
        return self._connection.open

    @property
    def pending(self) -> bool:
        """True if something waits to be sent."""
        return self._connection.pending

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        """Begins to send a frame; the parts are copied."""
        self._sent += 1
        message = b"".join([_BYTES[kind], *parts])
        self._connection.send(make_frame("", self._index, self._sent, message))

    @property
    def silence(self) -> float:
        """Seconds since the peer's host was last heard of, however long nothing was sent to it."""
        return silence(self._connection.socket) if self.open else 0.0

    def check(self) -> None:
        """Raises TeamError if what has come is not what a member sends."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _take(self, parts: list[Any]) -> None:
        try:
            header = read_header(parts)
            kind = _KINDS[parts[1][0]]
        except (ValueError, KeyError, IndexError):
            raise TeamError(f"what came from {self.host} is not a frame of this team") from None
        if damage(header, parts):
            raise TeamError(f"a frame from {self.host} was damaged on its way")
        self._received += 1
        if header.number != self._received:
            raise TeamError(f"{self.host} has sent frame {header.number}, but its next one is {self._received}")
        if kind is FrameKind.BYE:
            self.left = True
        elif kind is FrameKind.END:
            self.left = self.ended = True
        elif kind in self.takers:
            self.takers[kind](parts[1][1:])
        else:
            self.frames.append((kind, parts[1][1:]))

    def _end(self, error: TeamError | None) -> None:
        self.ended, self._failure = True, error

    def close(self) -> None:
        self.ended = True
        self._connection.close()


class PeerConnections:
    """All connections of one member, by the number of the peer's machine (in an elastic team, by its rank)."""

    def __init__(self, poller: Poller, connections: dict[int, PeerConnection]) -> None:
        self.connections = connections
        self._poller = poller

    def take(self, kind: FrameKind, taker: Callable[[int, memoryview], None]) -> None:
        """From now on all frames of a kind go to `taker`, with the peer's number."""
        for number, connection in self.connections.items():
            connection.takers[kind] = partial(taker, number)
            for _ in range(len(connection.frames)):
                found, payload = connection.frames.popleft()
                if found is kind:
                    taker(number, payload)
                else:
                    connection.frames.append((found, payload))

    def send_all(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        for connection in self.connections.values():
            connection.send(kind, *parts)

    def move(self, seconds: float = 0.0) -> None:
        """Sends and takes what can be, waiting at most so long for anything to happen."""
        if not len(self._poller):
            time.sleep(min(seconds, 0.01))
        else:
            self._poller.wait(seconds)
        for connection in self.connections.values():
            connection.check()

    def close_silent(self, seconds: float) -> None:
        """Closes connections to hosts that were not heard of for so many seconds.

        The kernel does so, too, but counts anew from a frame that is sent meanwhile.
        """
        for connection in self.connections.values():
            if connection.silence > seconds:
                connection.close()

    def settle(self, seconds: float) -> None:
        """Waits until all is sent, at most so many seconds."""
        until = time.monotonic() + seconds
        while any(connection.pending for connection in self.connections.values()) and time.monotonic() < until:
            self.move(_SLICE)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


Publish = Callable[[int, int], None]
"""Leaves the port of this member for the others."""
Find = Callable[[int], int]
"""Finds the port of another member."""


def connect(
    index: int,
    hosts: list[str],
    secret: Secret,
    publish: Publish,
    find: Find,
    patience: tuple[float, float],
) -> PeerConnections:
    """Connects all members, the leads of the machines: each calls those before it and is called by those behind it.

    patience: seconds until all must be connected, and later of a host's silence. In an elastic team `hosts` gives each
    rank's host.
    """
    poller = Poller()
    connections: dict[int, PeerConnection] = {}

    def add(other: int, connection: socket.socket) -> None:
        connections[other] = PeerConnection(poller, connection, hosts[other], patience[1], index)

    call, expect = range(index), range(index + 1, len(hosts))
    connect_sockets(poller, index, hosts, secret, publish, find, patience[0], call, expect, add)
    return PeerConnections(poller, dict(sorted(connections.items())))


def connect_sockets(
    poller: Poller,
    index: int,
    hosts: Sequence[str],
    secret: Secret,
    publish: Publish,
    find: Find,
    patience: float,
    call: Iterable[int],
    expect: Iterable[int],
    add: Callable[[int, socket.socket], None],
) -> None:
    """Calls some members and waits until others have called, at most `patience` seconds.

    add: is given the number and the proven socket of each.
    """
    until = time.monotonic() + patience
    missing = set(expect)

    def called(name: str, connection: socket.socket) -> None:
        if name.isdecimal() and int(name) in missing:
            missing.discard(int(name))
            add(int(name), connection)
        else:
            connection.close()

    listener = PortListener(poller, hosts[index], secret, called, lambda *_: None) if missing else None
    try:
        if listener is not None:
            publish(index, listener.port)
        for other in call:
            add(other, _call(hosts[other], find(other), secret, str(index), until))
        while listener is not None and missing:
            if time.monotonic() > until:
                names = ", ".join(dict.fromkeys(hosts[other] for other in sorted(missing)))
                raise JoinError(
                    f"{names} did not call {hosts[index]} in {patience:g} s; are all ports open between the machines?"
                )
            poller.wait(min(_SLICE, until - time.monotonic()))
            listener.expire()
    finally:
        if listener is not None:
            listener.close()


def _call(host: str, port: int, secret: Secret, name: str, until: float) -> socket.socket:
    """Calls a listener until it answers with its proof."""
    error: OSError | None = None
    while time.monotonic() < until:
        handshake: Handshake | None = None
        try:
            handshake = begin_call(host, port, secret, name)
            return handshake.complete(until)
        except OSError as failed:
            error = failed
            if handshake is not None:
                handshake.close()
            time.sleep(0.2)
    raise JoinError(f"cannot reach {host} on port {port}: {error}; are all ports open between the machines?")


def compare_clocks(connections: PeerConnections, index: int, patience: float) -> float:
    """By how many seconds the first machine's clock is ahead of this one's; all machines do this at the same time."""
    until = time.monotonic() + patience
    if index == 0:
        for machine in connections.connections:
            for _ in range(_TICKS):
                _time_of(connections, machine, until)
                connections.connections[machine].send(FrameKind.CLOCK, _CLOCK.pack(time.perf_counter()))
        return 0.0
    best, ahead = float("inf"), 0.0
    for _ in range(_TICKS):
        start = time.perf_counter()
        connections.connections[0].send(FrameKind.CLOCK, _CLOCK.pack(start))
        theirs = _time_of(connections, 0, until)
        took = time.perf_counter() - start
        if took < best:
            best, ahead = took, theirs - (start + took / 2)
    return ahead


def _time_of(connections: PeerConnections, machine: int, until: float) -> float:
    """The time that a machine's clock shows."""
    connection = connections.connections[machine]
    while not connection.frames:
        if not connection.open or time.monotonic() > until:
            raise JoinError(f"{connection.host} has not sent its clock's time")
        connections.move(_SLICE)
    kind, payload = connection.frames.popleft()
    if kind is not FrameKind.CLOCK:
        raise JoinError(f"{connection.host} has failed while the team came together")
    return float(_CLOCK.unpack(payload)[0])
