"""TCP connections between the leads of two machines each, for short messages that must be quick.

A frame is a header (what it is, its length, a checksum) and bytes. A connection that is cut carries what was sent
once it is whole again: the kernel sees to that. One whose other end has died is closed, and its reader is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from paceline.errors import JoinError, TeamError

_HEADER = struct.Struct("!4sIQI")  # mark, kind, length, checksum
_MARK = b"pl07"
_HELLO = struct.Struct("!4sI32s")
_LIMIT = 1 << 32
"""No frame is that long: whoever says so speaks another language."""
_SLICE = 0.1
_CLOCK = struct.Struct("!d")
_TICKS = 5
"""Seconds between looks at the clock while nothing comes."""


class FrameKind(IntEnum):
    """What a frame is."""

    NOTES = 1
    """Of one machine's workers, at one barrier."""
    FAILURE = 2
    """This machine can not go on."""
    BYE = 3
    """The lead's script has ended."""
    STREAM = 4
    """Events, for the run's folder."""
    END = 5
    """Nothing comes any more."""
    CLOCK = 6
    """The time of its sender."""
    TABLE = 7
    """The notes of all, at one barrier."""


class TcpConnection:
    """One connection, to the lead of another machine."""

    def __init__(self, connection: socket.socket, host: str, patience: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A host that is gone without a word is noticed by then, also by one who has nothing to send.
        limit = max(5, int(patience))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(10, limit))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(10, limit))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * limit + 2000)
        self.socket, self.host = connection, host
        self.open = True
        self.left = False
        """Its script has ended."""
        self.ended = False
        """Nothing comes any more."""
        self.frames: deque[tuple[FrameKind, bytes]] = deque()
        """What has come and was not taken yet."""
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        """Begin to send a frame; `push` sends what does not go at once."""
        if not self.open:
            return
        length, checksum = 0, 0
        for part in parts:
            length += len(part)
            checksum = zlib.crc32(part, checksum)
        header = _HEADER.pack(_MARK, kind, length, checksum)
        if length <= 1 << 16:
            self._outgoing.append(memoryview(header + b"".join(parts)))
        else:
            self._outgoing.append(memoryview(header))
            self._outgoing.extend(memoryview(bytes(part)) for part in parts)
        self.push()

    def push(self) -> None:
        """Send what the connection takes without waiting."""
        while self._outgoing and self.open:
            try:
                sent = self.socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            if sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][sent:]

    def pull(self) -> None:
        """Take what has come."""
        while self.open:
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._lose()
                break
            self._incoming += data
            if len(data) < 1 << 18:
                break
        self._cut()

    def _cut(self) -> None:
        """Make frames of what has come."""
        start, size = 0, _HEADER.size
        while len(self._incoming) - start >= size:
            mark, kind, length, checksum = _HEADER.unpack_from(self._incoming, start)
            if mark != _MARK or length > _LIMIT or kind not in FrameKind._value2member_map_:
                raise TeamError(f"what came from {self.host} is not a frame of this team")
            if len(self._incoming) - start < size + length:
                break
            payload = bytes(self._incoming[start + size : start + size + length])
            if zlib.crc32(payload) != checksum:
                raise TeamError(f"a frame from {self.host} was damaged on its way")
            start += size + length
            self._take(FrameKind(kind), payload)
        del self._incoming[:start]

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.BYE:
            self.left = True
        elif kind is FrameKind.END:
            self.left = self.ended = True
        else:
            self.frames.append((kind, payload))

    def _lose(self) -> None:
        self.open, self.ended = False, True
        self._outgoing.clear()

    def close(self) -> None:
        self._lose()
        with contextlib.suppress(OSError):
            self.socket.close()


class TcpConnections:
    """All connections of one machine's lead, by the number of the machine."""

    def __init__(self, connections: dict[int, TcpConnection]) -> None:
        self.connections = connections
        self.heard: Callable[[int, bytes], None] | None = None
        """Takes the events that come."""

    def send_all(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        for connection in self.connections.values():
            connection.send(kind, *parts)

    def move(self, seconds: float = 0.0) -> None:
        """Send and take what can be, waiting at most so long for anything to happen."""
        poll = select.poll()
        by_descriptor = {}
        for connection in self.connections.values():
            if connection.open:
                descriptor = connection.socket.fileno()
                poll.register(descriptor, select.POLLIN | (select.POLLOUT if connection.pending else 0))
                by_descriptor[descriptor] = connection
        if not by_descriptor:
            time.sleep(min(seconds, 0.01))
            return
        for descriptor, event in poll.poll(1000 * seconds):
            connection = by_descriptor[descriptor]
            if event & select.POLLOUT:
                connection.push()
            if event & ~select.POLLOUT:
                connection.pull()
        if self.heard is not None:
            for machine, connection in self.connections.items():
                self._hear(machine, connection)

    def _hear(self, machine: int, connection: TcpConnection) -> None:
        assert self.heard is not None
        for _ in range(len(connection.frames)):
            kind, payload = connection.frames.popleft()
            if kind is FrameKind.STREAM:
                self.heard(machine, payload)
            else:
                connection.frames.append((kind, payload))

    def settle(self, seconds: float) -> None:
        """Until all is sent, but not for longer."""
        until = time.monotonic() + seconds
        while any(connection.pending for connection in self.connections.values()) and time.monotonic() < until:
            self.move(_SLICE)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def connect(
    index: int,
    hosts: list[str],
    token: bytes,
    publish: Callable[[int, int], None],
    find: Callable[[int], int],
    patience: tuple[float, float],
) -> TcpConnections:
    """Wires to all other machines: this one calls those before it and is called by those behind it.

    publish, find: leave the port of this machine's lead for the others; find that of another machine's.
    patience: how long to wait until all are there, and later for a word.
    """
    until = time.monotonic() + patience[0]
    connections: dict[int, TcpConnection] = {}
    with _listening(hosts[index], len(hosts)) as server:
        publish(index, server.getsockname()[1])
        for other in range(index):
            connection = _call(hosts[other], find(other), index, token, until)
            connections[other] = TcpConnection(connection, hosts[other], patience[1])
        _hear_callers(
            server, connections, {other: hosts[other] for other in range(index + 1, len(hosts))}, token, patience
        )
    return TcpConnections(dict(sorted(connections.items())))


def connect_to_first(
    rank: int,
    hosts: list[str],
    token: bytes,
    publish: Callable[[int, int], None],
    find: Callable[[int], int],
    patience: tuple[float, float],
) -> TcpConnections:
    """Wires from every member to rank 0: `hosts` says by rank where each is. The rest is as of `connect`."""
    until = time.monotonic() + patience[0]
    if rank:
        return TcpConnections({0: TcpConnection(_call(hosts[0], find(0), rank, token, until), hosts[0], patience[1])})
    connections: dict[int, TcpConnection] = {}
    with _listening(hosts[0], len(hosts)) as server:
        publish(0, server.getsockname()[1])
        _hear_callers(server, connections, dict(list(enumerate(hosts))[1:]), token, patience)
    return TcpConnections(dict(sorted(connections.items())))


def _listening(host: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def _hear_callers(
    server: socket.socket,
    connections: dict[int, TcpConnection],
    callers: dict[int, str],
    token: bytes,
    patience: tuple[float, float],
) -> None:
    """Until all of them have called. callers: by their numbers, where they are."""
    until = time.monotonic() + patience[0]
    while missing := {number: host for number, host in callers.items() if number not in connections}:
        server.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            raise JoinError(
                f"{', '.join(dict.fromkeys(missing.values()))} did not call {server.getsockname()[0]} in "
                f"{patience[0]:g} s; are all ports open between the machines?"
            ) from None
        caller = _answer(connection, token, until)
        if caller is None or caller not in missing:
            connection.close()  # a stranger
            continue
        connections[caller] = TcpConnection(connection, callers[caller], patience[1])


def with_key(token: bytes, key: str | None) -> bytes:
    """What the members prove to each other that they know: also the run's key, if it has one."""
    return token if key is None else hashlib.blake2b(token, key=bytes.fromhex(key), digest_size=32).digest()


def compare_clocks(connections: TcpConnections, index: int, patience: float) -> float:
    """By how much the first machine's clock is ahead of this one's; all machines do this at the same time."""
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


def _time_of(connections: TcpConnections, machine: int, until: float) -> float:
    """What the clock of a machine says."""
    connection = connections.connections[machine]
    while not connection.frames:
        if not connection.open or time.monotonic() > until:
            raise JoinError(f"{connection.host} has not said what time it is")
        connections.move(_SLICE)
    kind, payload = connection.frames.popleft()
    if kind is not FrameKind.CLOCK:
        raise JoinError(f"{connection.host} has failed while the team came together")
    return float(_CLOCK.unpack(payload)[0])


def _call(host: str, port: int, index: int, token: bytes, until: float) -> socket.socket:
    error: OSError | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=left)
            nonce = _exactly(connection, 16)
            connection.sendall(_HELLO.pack(_MARK, index, _proof(token, nonce, index)))
            _exactly(connection, len(_MARK))
            return connection
        except OSError as failed:
            error = failed
            time.sleep(0.2)
    raise JoinError(f"cannot reach {host} on port {port}: {error}; are all ports open between the machines?")


def _answer(connection: socket.socket, token: bytes, until: float) -> int | None:
    """Who calls, if it can prove that it belongs to the team."""
    try:
        # A stranger that says nothing must not keep the members waiting.
        connection.settimeout(min(5.0, max(0.01, until - time.monotonic())))
        nonce = os.urandom(16)
        connection.sendall(nonce)
        mark, caller, proof = _HELLO.unpack(_exactly(connection, _HELLO.size))
        if mark != _MARK or not hmac.compare_digest(proof, _proof(token, nonce, caller)):
            return None
        connection.sendall(_MARK)
        return int(caller)
    except OSError:
        return None


def _proof(token: bytes, nonce: bytes, index: int) -> bytes:
    return hmac.new(token, nonce + index.to_bytes(4, "big"), hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data
