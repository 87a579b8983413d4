"""How a connection between machines begins: both ends prove that they know the run's secret.

    caller                                   listener
      ─────────── TLS, if there is a key ───────────     anonymous Diffie-Hellman, AES-GCM; no certificates
      ◄──────────── mark, nonce ────────────────────
      ───── mark, name, nonce, HMAC(secret) ────────►
      ◄──────────── HMAC(secret) ───────────────────

Each HMAC covers its sender's role, both nonces, the caller's name and the TLS channel's binding (RFC 5929). An attacker
in the middle has two channels with different bindings, and a recorded proof is of no use on another connection. So the
key authenticates both ends, and every connection is encrypted with keys of its own that are never stored.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator

from paceline.errors import UsageError
from paceline.transport.keys import Secret
from paceline.transport.poller import READ, WRITE, Poller

SECONDS = 3.0
"""Seconds in which a connection must have proven that it is a member's."""
_MARK = b"pl08"
_CHALLENGE = struct.Struct("!4s16s")
_ANSWER = struct.Struct("!4s32s16s32s")  # mark, name, nonce, proof
_PROOF = 32
_BACKLOG = 64
_BROKEN = (ConnectionError, TimeoutError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that has ended."""
_UNPROVEN = 512
"""Connections without a proof at a time; the oldest is closed for one more."""
_CIPHER = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"  # the level that allows anonymous key exchange: the HMACs authenticate
_GROUP = b"""-----BEGIN DH PARAMETERS-----
MIIBiAKCAYEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEfz9zeNVs7ZRkDW7w09N75nAI4YbRvydbmyQd62R0mkff3
7lmMsPrBhtkcrv4TCYUTknC0EwyTvEN5RPT9RFLi103TZPLiHnH1S/9croKrnJ32
nuhtK8UiNjoNq8Uhl5sN6todv5pC1cRITgq80Gv6U93vPBsg7j/VnXwl5B0rZsYu
N///////////AgEC
-----END DH PARAMETERS-----
"""
"""ffdhe3072 of RFC 7919."""


@functools.cache
def _context(server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    if not server_side:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # TLS 1.3 has no anonymous key exchange, and its channel binding is not to be had from Python.
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.set_ciphers(_CIPHER)
    except ssl.SSLError:
        raise UsageError(
            f"this Python's {ssl.OPENSSL_VERSION} has no anonymous AES-GCM, with which connections between "
            "machines are encrypted; use a Python whose OpenSSL is not restricted to FIPS"
        ) from None
    if server_side:
        with open(os.memfd_create("group"), "wb") as file:  # noqa: PTH123
            file.write(_GROUP)
            file.flush()
            context.load_dh_params(f"/proc/self/fd/{file.fileno()}")
    return context


class NotAMember(ConnectionError):
    """The other end has no proof, or another protocol."""


class Handshake:
    """One new connection, until both ends have proven their membership. Never blocks."""

    def __init__(self, connection: socket.socket, secret: Secret, name: str | None = None) -> None:
        """name: of this end if it is the caller, at most 32 bytes; None for the listener."""
        connection.setblocking(False)
        self.socket = connection
        self.name = name or ""
        """The caller's, on both ends."""
        self.until = time.monotonic() + SECONDS
        self._secret, self._calls = secret, name is not None
        self._steps = self._prove()
        self.events = WRITE
        """What `advance` waits for."""

    def advance(self) -> bool:
        """Goes on as far as it can; True when done. OSError if the other end fails to prove its membership."""
        try:
            self.events = next(self._steps)
        except StopIteration:
            return True
        return False

    def complete(self, until: float) -> socket.socket:
        """Waits until it is done, at most to this time; returns the socket, which does not block."""
        poll = select.poll()
        while not self.advance():
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer")
            poll.register(self.socket, self.events)
            poll.poll(1000 * min(left, 0.1))
        return self.socket

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _prove(self) -> Generator[int, None, None]:
        binding = b""
        if self._calls:
            yield from self._connected()
        if self._secret.encrypted:
            yield from self._encrypt()
            assert isinstance(self.socket, ssl.SSLSocket)
            binding = self.socket.get_channel_binding("tls-unique") or b""
            if not binding:
                raise ConnectionError("the channel has no binding")
        yield from (self._prove_caller(binding) if self._calls else self._prove_listener(binding))

    def _connected(self) -> Generator[int, None, None]:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        while not poll.poll(0):
            yield WRITE
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    def _encrypt(self) -> Generator[int, None, None]:
        encrypted = _context(not self._calls).wrap_socket(
            self.socket, server_side=not self._calls, do_handshake_on_connect=False
        )
        self.socket = encrypted
        while True:
            try:
                encrypted.do_handshake()
                return
            except ssl.SSLWantReadError:
                yield READ
            except ssl.SSLWantWriteError:
                yield WRITE

    def _prove_caller(self, binding: bytes) -> Generator[int, None, None]:
        mark, theirs = _CHALLENGE.unpack((yield from self._read(_CHALLENGE.size)))
        if mark != _MARK:
            raise NotAMember("the listener speaks another protocol")
        ours, name = os.urandom(16), self.name.encode().ljust(32, b"\0")
        proof = self._secret.answer(b"caller", binding, theirs, ours, name)
        yield from self._write(_ANSWER.pack(_MARK, name, ours, proof))
        answer = yield from self._read(_PROOF)
        if not hmac.compare_digest(answer, self._secret.answer(b"listener", binding, theirs, ours, name)):
            raise NotAMember("the listener is not a member of the run")

    def _prove_listener(self, binding: bytes) -> Generator[int, None, None]:
        ours = os.urandom(16)
        yield from self._write(_CHALLENGE.pack(_MARK, ours))
        mark, name, theirs, proof = _ANSWER.unpack((yield from self._read(_ANSWER.size)))
        expected = self._secret.answer(b"caller", binding, ours, theirs, name)
        if mark != _MARK or not hmac.compare_digest(proof, expected):
            raise NotAMember("the caller is not a member of the run")
        self.name = name.rstrip(b"\0").decode()
        yield from self._write(self._secret.answer(b"listener", binding, ours, theirs, name))

    def _read(self, count: int) -> Generator[int, None, bytes]:
        data = b""
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                yield READ
                continue
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        return data

    def _write(self, data: bytes) -> Generator[int, None, None]:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                yield WRITE


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that members can call; port: 0 for any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    listening.setblocking(False)
    return listening


class PortListener:
    """A port that members call; every caller proves its membership beside the others, and within seconds."""

    def __init__(
        self,
        poller: Poller,
        address: str,
        secret: Secret,
        proven: Callable[[str, socket.socket], None],
        refused: Callable[[str, bool], None],
        listening: socket.socket | None = None,
    ) -> None:
        """proven: is given the name and the socket of a member. refused: is given the address of each other caller,
        and True if it has only broken off, or come to nothing, and not sent what no member sends.

        listening: as `listen` returns it; by default any port of the address.
        """
        self._poller, self._secret, self._proven, self._refused = poller, secret, proven, refused
        self._socket = listen(address) if listening is None else listening
        self.port: int = self._socket.getsockname()[1]
        self._unproven: dict[int, Handshake] = {}
        """By descriptor, the oldest first."""
        self._addresses: dict[int, str] = {}
        """The addresses of those callers."""
        poller.watch(self._socket.fileno(), self._accept)

    def _accept(self, _: int) -> None:
        try:
            connection, address = self._socket.accept()
        except OSError:  # it is gone again, or there are too many descriptors
            return
        if len(self._unproven) >= _UNPROVEN:
            self._refuse(next(iter(self._unproven)), False)
        descriptor = connection.fileno()
        self._addresses[descriptor] = str(address[0])
        self._unproven[descriptor] = Handshake(connection, self._secret)
        self._poller.watch(descriptor, lambda _: self._advance(descriptor))
        self._advance(descriptor)

    def _advance(self, descriptor: int) -> None:
        handshake = self._unproven[descriptor]
        try:
            done = handshake.advance()
        except (OSError, ValueError) as error:  # TLS's errors are OSErrors; a name that is no text, ValueError
            self._refuse(descriptor, isinstance(error, _BROKEN) and not isinstance(error, NotAMember))
            return
        if not done:
            self._poller.change(descriptor, handshake.events)
            return
        del self._unproven[descriptor], self._addresses[descriptor]
        self._poller.unwatch(descriptor)
        self._proven(handshake.name, handshake.socket)

    def _refuse(self, descriptor: int, broken: bool) -> None:
        self._poller.unwatch(descriptor)
        self._unproven.pop(descriptor).close()
        self._refused(self._addresses.pop(descriptor), broken)

    def expire(self) -> None:
        """Refuses callers whose time to prove their membership is over."""
        now = time.monotonic()
        for descriptor, handshake in list(self._unproven.items()):
            if now > handshake.until:
                self._refuse(descriptor, True)

    def close(self) -> None:
        for descriptor, handshake in self._unproven.items():
            self._poller.unwatch(descriptor)
            handshake.close()
        self._unproven.clear()
        self._poller.unwatch(self._socket.fileno())
        self._socket.close()


def begin_call(address: str, port: int, secret: Secret, name: str) -> Handshake:
    """Calls a listener, without waiting for it."""
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect((address, port))
    except BlockingIOError:
        pass
    except OSError:
        connection.close()
        raise
    return Handshake(connection, secret, name)
