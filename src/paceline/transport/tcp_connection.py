"""The one kind of connection between machines: TCP that carries whole, numbered, checked frames of members.

A frame is a list of parts: a typed header (run, sender, number, length, checksum), a message, and for bulk a payload.
On the network a mark, the number of parts and their lengths come first. `handshake` has proven both ends before, and
encrypts everything if the run has a key. The kernel keeps the order, and repeats what a cable lost; a dead peer closes
the connection, a silent one is found by keep-alive.

Barriers use a connection as it is: its end is the peer's death (`peer_connections`). Relays add acknowledgements,
a window, and reconnection (`links`).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from paceline.errors import TeamError
from paceline.transport.poller import READ, WRITE, Poller

_MARK = b"pl08"
_PARTS = 8
"""Parts of a frame, at most."""
_PREFIX = struct.Struct("!4sI")  # mark, number of parts
_PREFIXES = [struct.Struct(f"!4sI{count}I") for count in range(_PARTS + 1)]
"""By number of parts, the prefix with their lengths."""
_INFO = struct.Struct("=52xII")
"""Of TCP_INFO, the milliseconds since data and since an acknowledgement came."""
_READ = 1 << 16
"""Bytes that are read at once; the rest of a longer frame is read where it stays."""
_JOINED = 1 << 14
"""Bytes up to which the parts of a frame are joined: one TLS record."""
_TURN = 4 << 20
"""Bytes that are read before other connections have their turn."""


class FrameHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first part of every frame."""

    run: str
    sender: int
    """The number of a machine; on the connections of an elastic barrier, a rank."""
    number: int
    """Counts the frames of a sender, from 1."""
    size: int
    """Bytes of message and payload."""
    check: int
    """crc32 of the message xor that of the payload."""


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FrameHeader).decode


def make_frame(
    run: str, sender: int, number: int, message: bytes, payload: Any = None, check: int | None = None
) -> list[Any]:
    """The parts of a frame. check: the payload's crc32, if it is known."""
    if payload is None:
        return [encode(FrameHeader(run, sender, number, len(message), zlib.crc32(message))), message]
    check = zlib.crc32(message) ^ (zlib.crc32(payload) if check is None else check)
    header = FrameHeader(run, sender, number, len(message) + len(payload), check)
    return [encode(header), message, payload]


def read_header(parts: Sequence[Any]) -> FrameHeader:
    """The header of a frame; ValueError says why it has none."""
    if len(parts) not in (2, 3):
        raise ValueError("not a frame")
    try:
        return _decode(parts[0])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ValueError("no head") from None


def damage(header: FrameHeader, parts: Sequence[Any]) -> str:
    """Why a frame is not what its header says; empty if it is."""
    size, check = len(parts[1]), zlib.crc32(parts[1])
    if len(parts) == 3:
        size += len(parts[2])
        check ^= zlib.crc32(parts[2])
    if size != header.size:
        return "not as long as it says"
    return "" if check == header.check else "damaged"


class TcpConnection:
    """One proven connection; reads and writes when its poller finds it ready."""

    def __init__(
        self,
        poller: Poller,
        connection: socket.socket,
        host: str,
        patience: float,
        largest: int,
        deliver: Callable[[list[Any]], None],
        closed: Callable[[TeamError | None], None],
    ) -> None:
        """patience: seconds of silence after which keep-alive gives the host up. largest: bytes of a frame.

        deliver: is given the parts of each frame. closed: is told once that the connection has ended, by itself, and
        why if what came was no frame.
        """
        keep_alive(connection, patience)
        self.socket, self.host = connection, host
        self.open = True
        self._poller, self._largest, self._deliver, self._closed = poller, largest, deliver, closed
        self._descriptor, self._encrypted = connection.fileno(), isinstance(connection, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(_READ))
        self._incoming = b""
        self._lengths: Sequence[int] = ()
        """Of the parts of the frame that is coming."""
        self._body: memoryview | None = None
        """All of its parts, if it is long and some of them are still to come."""
        self._filled = 0
        self._outgoing: deque[memoryview] = deque()
        self._writes = False
        poller.watch(self._descriptor, self._ready)

    @property
    def pending(self) -> bool:
        """True if something waits to be sent."""
        return bool(self._outgoing)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self.push()
        if events != WRITE:
            self.pull()

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Any]) -> None:
        """Begins to send a frame; long parts must not change until they have gone."""
        if not self.open:
            return
        lengths = [len(part) for part in parts]
        prefix = _PREFIXES[len(parts)].pack(_MARK, len(parts), *lengths)
        if sum(lengths) <= _JOINED:
            self._outgoing.append(memoryview(b"".join([prefix, *parts])))
        else:
            short = sum(lengths[:-1]) <= _JOINED
            if short:
                prefix += b"".join(parts[:-1])
            self._outgoing.append(memoryview(prefix))
            self._outgoing.extend(memoryview(part).cast("B") for part in (parts[-1:] if short else parts) if len(part))
        if not self._writes:
            self.push()

    def push(self) -> None:
        """Sends what the kernel takes without waiting."""
        outgoing = self._outgoing
        while outgoing and self.open:
            try:
                sent = self.socket.send(outgoing[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            except OSError:
                outgoing.clear()
                self.pull()  # its last words may have come before its end
                if self.open:
                    self._end(None)
                return
            if sent == len(outgoing[0]):
                outgoing.popleft()
            else:
                outgoing[0] = outgoing[0][sent:]
        if self.open and self._writes != bool(outgoing):
            self._writes = bool(outgoing)
            self._poller.change(self._descriptor, READ | WRITE if self._writes else READ)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Takes what has come, and delivers whole frames."""
        left = _TURN
        while self.open:
            try:
                count = self._read()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                count = 0
            if not count:
                self._end(None)
                return
            try:
                self._cut()
            except TeamError as error:
                self._end(error)
                return
            left -= count
            # The poller reports what is left in the kernel, but not what TLS has decrypted.
            if (left <= 0 or count < _READ >> 2) and not (self._encrypted and self.socket.pending()):  # type: ignore[attr-defined]
                return

    def _read(self) -> int:
        if self._body is not None:
            count = self.socket.recv_into(self._body[self._filled :])
            self._filled += count
            return count
        count = self.socket.recv_into(self._buffer)
        self._incoming += bytes(self._buffer[:count])
        return count

    def _cut(self) -> None:
        """Makes frames of what has come."""
        if self._body is not None:
            if self._filled < len(self._body):
                return
            body, self._body = self._body, None
            self._deliver(_parts(body, self._lengths))
        data, start = self._incoming, 0
        view = memoryview(data)
        while self.open and (begin := self._read_prefix(data, start)):
            have, whole = len(data) - begin, sum(self._lengths)
            if have < whole:
                if whole > _READ:  # the rest is read into its place
                    self._body = memoryview(bytearray(whole))
                    self._body[:have] = view[begin:]
                    self._filled, start = have, len(data)
                break
            start = begin + whole
            self._deliver(_parts(view[begin:start], self._lengths))
        self._incoming = data[start:]

    def _read_prefix(self, data: bytes, start: int) -> int:
        """Reads the lengths of the next frame; returns where its parts begin, or 0 if not all has come."""
        have = len(data) - start
        if have < _PREFIX.size:
            return 0
        mark, count = _PREFIX.unpack_from(data, start)
        if mark != _MARK or not 0 < count <= _PARTS:
            raise TeamError(f"what came from {self.host} is not a frame of this team")
        prefix = _PREFIXES[count]
        if have < prefix.size:
            return 0
        lengths = prefix.unpack_from(data, start)[2:]
        if sum(lengths) > self._largest:
            raise TeamError(f"{self.host} has sent a frame of {sum(lengths)} bytes; {self._largest} are allowed")
        self._lengths = lengths
        return int(start + prefix.size)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self, error: TeamError | None) -> None:
        self.close()
        self._closed(error)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._outgoing.clear()
            self._poller.unwatch(self._descriptor)
            with contextlib.suppress(OSError):
                self.socket.close()


def _parts(body: memoryview, lengths: Sequence[int]) -> list[Any]:
    """The parts of a frame, one after the other."""
    return [body[stop - length : stop] for length, stop in zip(lengths, accumulate(lengths), strict=True)]


def silence(connection: socket.socket) -> float:
    """Seconds since the host was last heard of: its kernel answers, whatever its process does."""
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    return 1e-3 * float(min(_INFO.unpack(found)))


def keep_alive(connection: socket.socket, patience: float) -> None:
    """Lets the kernel give up a host that has been silent for so many seconds, also if nothing is to be sent."""
    limit = max(5, int(patience))
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    between = min(10, limit // 5)  # the end is noticed at a probe
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * limit + 2000)
