"""Short typed messages between processes of one machine, over Unix sockets without a file.

The kernel keeps messages whole and in order, and reports at once that the other end has died. Memory is passed as
descriptors beside a message, so that large data need not be sent.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from paceline.errors import JoinError, TeamError

_LARGEST = 1 << 17
"""Bytes of a message; longer ones are sent in parts."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

In = TypeVar("In")


class Closed(TeamError):
    """The other end is gone."""


class UnixConnection(Generic[In]):
    """One end of a connection on which messages of the union `kinds` come in."""

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.descriptor = connection.fileno()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        data = self._encode(message)
        if len(data) > _LARGEST:
            raise TeamError(f"a message of {len(data)} bytes is too long; {_LARGEST} are allowed")
        try:
            if descriptors:
                socket.send_fds(self._socket, [data], list(descriptors))
            else:
                self._socket.send(data)
        except OSError as error:
            raise Closed(f"the other end is gone: {error}") from None

    def receive(self) -> In:
        """The next message; waits for it as long as `patience` allows."""
        return self.decode(self.receive_bytes())

    def decode(self, data: bytes) -> In:
        """A message from its bytes."""
        message: In = self._decode(data)
        return message

    def receive_bytes(self) -> bytes:
        """The bytes of the next message."""
        try:
            data = self._socket.recv(_LARGEST)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as error:
            raise Closed(f"the other end is gone: {error}") from None
        if not data:
            raise Closed("the other end is gone")
        return data

    def linger(self, seconds: float) -> None:
        """Looks for a message for so many seconds, yielding the core in between, before `receive` sleeps for it.

        Sleeping and waking takes longer than most answers do.
        """
        poll, yield_core = self._poll.poll, os.sched_yield
        if poll(0):
            return
        until = time.perf_counter() + seconds
        while not poll(0) and time.perf_counter() < until:
            yield_core()

    def patience(self, seconds: float) -> None:
        """Lets `receive` raise TimeoutError after so many seconds, by the kernel's own clock."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    @property
    def ready(self) -> bool:
        """True if `receive` would return at once."""
        return bool(self._poll.poll(0))

    def patience_to_send(self, seconds: float) -> None:
        """Lets `send` raise Closed after so many seconds if the other end reads nothing."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def receive_within(self, seconds: float) -> In | None:
        """The next message, or None if there is none in time."""
        return self.receive() if self._poll.poll(max(0, int(seconds * 1e3))) else None

    def receive_with_descriptors(self, count: int) -> tuple[In, list[int]]:
        try:
            data, descriptors = receive_descriptors(self._socket, count)
        except OSError as error:
            raise Closed(f"the other end is gone: {error}") from None
        if not data:
            raise Closed("the other end is gone")
        return self._decode(data), descriptors

    @property
    def open(self) -> bool:
        """True if the other end is open, as far as the kernel knows."""
        return not any(events & (select.POLLHUP | select.POLLERR) for _, events in self._poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def receive_descriptors(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """The bytes of the next message, and up to so many descriptors beside it."""
    # Not socket.recv_fds, which ignores its flags: programs started here would inherit the descriptors.
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    data, beside, _, _ = connection.recvmsg(_LARGEST, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    return data, list(descriptors)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))


def deserted(kinds: Any) -> UnixConnection[Any]:
    """A connection whose other end is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    return UnixConnection(ours, kinds)


def new_address() -> str:
    return f"paceline-{secrets.token_hex(12)}"


class Listener:
    """A socket that processes of the same user connect to. Its name is in no file system, and ends with the process."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{address}")
        self._socket.listen(1024)
        self.descriptor = self._socket.fileno()

    def accept(self, kinds: Any, seconds: float | None = None) -> UnixConnection[Any] | None:
        """The next connection; None if it is another user's, or if none comes in time."""
        self._socket.settimeout(seconds)
        try:
            connection, _ = self._socket.accept()
        except (TimeoutError, BlockingIOError):  # the latter if there is no time at all
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            connection.close()
            return None
        return UnixConnection(connection, kinds)

    def close(self) -> None:
        self._socket.close()


def connect(
    address: str, kinds: Any, seconds: float, expected: Callable[[], bool] = lambda: True
) -> UnixConnection[Any]:
    """Connects to a listener, which may not have started yet; expected: returns False if it never will."""
    until = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{address}")
            return UnixConnection(connection, kinds)
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() >= until or not expected():
                raise JoinError(f"the server did not start within {seconds:g} s") from None
            time.sleep(0.01)
