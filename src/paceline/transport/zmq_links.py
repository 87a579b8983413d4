"""Messages between machines, over ZeroMQ: in order, each once, whole, and only from members of the run.

A link goes one way: a sender connects to the other machine's receiver, which acknowledges what it took. What was not
acknowledged is kept, and sent again if a connection broke in between. The sender stops at a window of bytes that are
not acknowledged, so a slow reader never makes either end's memory grow. There is one link for short things and another
for bulk, so that the former overtake the latter.

Every frame has a typed head: the run, who sent it, its number in the link, how long it is, and a checksum. With a key,
all of it is encrypted and authenticated by CURVE; without, nothing but loopback is used.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import decode as z85_decode

from paceline.errors import TeamError
from paceline.transport.keys import Keys

CHUNK = 1 << 20
"""Bytes of a large thing that go in one frame."""
_ROOM = 1 << 18
"""Bytes that a frame may be longer than a chunk: short things and heads."""
_QUEUE = 16
"""Frames that ZeroMQ keeps for a connection, at each end."""
_HANDSHAKE = 3000
"""Milliseconds in which whoever connects must have proven that it is a member."""
_BACKLOG = 64

LINKS = ("control", "bulk")


class FrameHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of each frame; numbers begin with 1. Number 0 asks how far the other end is; its size is how far one has sent."""

    run: str
    machine: int
    number: int
    size: int
    check: int


class FrameAck(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer: all up to this number have come."""

    number: int
    asked: int = -1
    """The answer to a number 0: how far the asker thought that it had sent."""
    damaged: bool = False
    """The next one has come, but damaged."""


_encode = msgspec.msgpack.Encoder().encode
_head = msgspec.msgpack.Decoder(FrameHeader)
_taken = msgspec.msgpack.Decoder(FrameAck)


def _check(message: Any, payload: Any) -> int:
    """Of a frame; the parts by themselves, so that who knows the payload's already need not look at it again."""
    return zlib.crc32(message) ^ (0 if payload is None else zlib.crc32(payload))


def _tcp(address: str) -> str:
    """As ZeroMQ writes it."""
    return f"tcp://[{address}]" if ":" in address else f"tcp://{address}"


class RejectCounter(Counter[str]):
    """What was refused, by why; and said now and then, not each time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._next = say, 0.0

    def add(self, why: str, who: str = "somebody") -> None:
        self[why] += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 5.0
            self._say(f"refused what {who} sent ({why}); {self.total()} refused so far")


class LinkSender:
    """One link to another machine."""

    def __init__(self, context: zmq.Context[Any], link: str, me: int, run: str, keys: Keys | None, window: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, f"{me} {link}".encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, 4096)
        if keys is not None:
            self.socket.curve_serverkey = keys.server.public
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.client
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._me, self._run, self._window = me, run, window
        self._kept: deque[tuple[int, bytes, Any, int | None]] = deque()
        """Number, message, payload and the payload's checksum, if that is known, of what is not acknowledged."""
        self._next = 0
        """Which of those goes next."""
        self._number = 0
        self._bytes = 0
        self._knock = False
        self._progress = time.monotonic()
        """When something was last acknowledged, or nothing was to be."""
        self.heard = time.monotonic()
        """When the other end last gave a sign of life."""
        self.again = 0
        """Frames that were sent again."""
        self._knocking: socket.socket | None = None

    def connect(self, address: str, port: int) -> None:
        self._address = (address, port)
        self.socket.setsockopt(zmq.IPV6, ":" in address)
        self._endpoint = f"{_tcp(address)}:{port}"
        self.socket.connect(self._endpoint)

    def renew(self, patience: float) -> None:
        """Connect anew if nothing has been acknowledged for so long: damage may have left the other end waiting."""
        now = time.monotonic()
        if not self._kept:
            self._progress = now
        elif now - self._progress > patience:
            self._progress = now
            self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)

    def deserted(self) -> bool:
        """Whether the other machine says that nobody listens there any more; it is asked once, and heard later.

        ZeroMQ itself goes on trying, since whoever listens might come back; here nobody does.
        """
        if self._knocking is None:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._knocking = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            return self._knocking.connect_ex(self._address) == errno.ECONNREFUSED
        answered = select.poll()
        answered.register(self._knocking, select.POLLOUT)
        if not answered.poll(0):
            return False
        refused = self._knocking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        self._knocking.close()
        self._knocking = None
        return refused

    @property
    def room(self) -> int:
        """Bytes that may still be sent before the other end must acknowledge some."""
        return self._window - self._bytes

    @property
    def idle(self) -> bool:
        return not self._kept

    @property
    def waiting(self) -> bool:
        """Whether something is to be sent as soon as ZeroMQ takes it."""
        return self._knock or self._next < len(self._kept)

    def send(self, message: bytes, payload: Any = None, check: int | None = None) -> None:
        """payload: bytes, or memory that stays as it is until this is acknowledged; check: its crc32, if known."""
        self._number += 1
        self._kept.append((self._number, message, payload, check))
        self._bytes += len(message) + (0 if payload is None else len(payload))
        self.flush()

    def flush(self) -> None:
        try:
            while self.waiting:
                if self._knock:
                    sent = self._kept[self._next - 1][0] if self._next else self._number - len(self._kept)
                    self.socket.send_multipart(
                        [_encode(FrameHeader(self._run, self._me, 0, sent, 0)), b""], zmq.DONTWAIT
                    )
                    self._knock = False
                    continue
                number, message, payload, known = self._kept[self._next]
                parts = [message] if payload is None else [message, payload]
                size = sum(map(len, parts))
                check = _check(message, payload) if known is None else zlib.crc32(message) ^ known
                head = _encode(FrameHeader(self._run, self._me, number, size, check))
                self.socket.send_multipart([head, *parts], zmq.DONTWAIT)
                self._next += 1
        except zmq.Again:
            pass

    def read(self) -> None:
        """Take acknowledgements."""
        with contextlib.suppress(zmq.Again):
            while True:
                parts = self.socket.recv_multipart(zmq.DONTWAIT)
                try:
                    taken = _taken.decode(parts[0])
                except msgspec.MsgspecError:
                    continue
                # A wrong number here would make this end forget what has never come.
                if parts[1:] != [zlib.crc32(parts[0]).to_bytes(4, "little")]:
                    continue
                self.heard = self._progress = time.monotonic()
                while self._kept and self._kept[0][0] <= taken.number:
                    _, message, payload, _ = self._kept.popleft()
                    self._bytes -= len(message) + (0 if payload is None else len(payload))
                    self._next = max(0, self._next - 1)
                if taken.damaged or taken.asked > taken.number:
                    self.again += self._next
                    self._next = 0
        self.flush()

    def read_monitor(self) -> None:
        """A connection was made; after a first one, something may have been lost with it."""
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(self.monitor, zmq.DONTWAIT)
                self._knock = True
        self.flush()

    def close(self) -> None:
        if self._knocking is not None:
            self._knocking.close()
        self.socket.disable_monitor()
        self.socket.close(0)


class LinkReceiver:
    """Where the links of one kind from all other machines end."""

    def __init__(
        self,
        context: zmq.Context[Any],
        link: str,
        refusals: RejectCounter,
        take: Callable[[int, bytes, Any], None],
    ) -> None:
        """take: is given who sent it, the message, and the payload; raises ValueError for what it refuses."""
        self._context, self._link, self._take = context, link, take
        self.refusals = refusals
        self.heard: dict[int, float] = {}
        """When each machine was last heard of."""
        self._taken: dict[int, int] = {}
        self._run = ""
        self._knocks: deque[float] = deque()
        """When those connected who may still prove to be members."""
        self._old = self._members = self._strangers = 0

    def bind(self, address: str, keys: Keys | None) -> int:
        """Listen; returns the port."""
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self.socket.setsockopt(zmq.SNDHWM, 1000)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + _ROOM)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        self.socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if keys is not None:
            self.socket.setsockopt(zmq.ZAP_DOMAIN, b"paceline")
            self.socket.curve_server = True
            self.socket.curve_secretkey = keys.server.secret
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.setsockopt(zmq.IPV6, ":" in address)
        return int(self.socket.bind_to_random_port(_tcp(address)))

    def open(self, run: str, machines: list[int]) -> None:
        """From now on these machines are heard, in this run."""
        self._run = run
        now = time.monotonic()
        self._taken = dict.fromkeys(machines, 0)
        self.heard = dict.fromkeys(machines, now)

    def read(self, most: int = 8) -> None:
        """Take what has come, but not so much that others wait for long."""
        for _ in range(most):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._frame([frame.buffer for frame in frames])

    def _frame(self, parts: list[memoryview]) -> None:
        who = bytes(parts[0])
        answer = self._judge(who, parts)
        if answer is not None:
            with contextlib.suppress(zmq.ZMQError):
                text = _encode(answer)
                self.socket.send_multipart([who, text, zlib.crc32(text).to_bytes(4, "little")], zmq.DONTWAIT)

    def _judge(self, who: bytes, parts: list[memoryview]) -> FrameAck | None:
        """Take one frame, or refuse it; returns what to answer."""
        head = self._read_head(who, parts)
        if head is None:
            return None
        before = self._taken[head.machine]
        name = f"machine {head.machine}"
        if head.number == 0:
            self.heard[head.machine] = time.monotonic()
            return FrameAck(before, head.size)
        if head.number > before + 1:
            self.refusals.add("before its turn", name)  # if one before it was lost with its connection, both come again
            return None
        message, payload = parts[2], parts[3] if len(parts) == 4 else None
        why = ""
        if head.size != len(message) + (0 if payload is None else len(payload)):
            why = "not as long as it says"
        elif head.check != _check(message, payload):
            why = "damaged"
        elif head.number <= before:
            why = "seen before"
        if why:
            self.refusals.add(why, name)
            return FrameAck(before, damaged=head.number == before + 1)
        self.heard[head.machine] = time.monotonic()
        self._taken[head.machine] = head.number
        try:
            self._take(head.machine, bytes(message), payload)
        except (ValueError, KeyError, IndexError, TeamError) as error:  # msgspec's are ValueErrors, too
            self.refusals.add(f"{error}" if type(error) is ValueError else "not understood", name)
        return FrameAck(head.number)

    def _read_head(self, who: bytes, parts: list[memoryview]) -> FrameHeader | None:
        """The head of a frame of this run, from one of its machines; None for any other."""
        why = "not a frame"
        if len(parts) in (3, 4):
            try:
                head = _head.decode(parts[1])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                why = "no head"
            else:
                if head.run != self._run:
                    why = "of another run"
                elif who == f"{head.machine} {self._link}".encode() and head.machine in self._taken:
                    return head
                else:
                    why = "from a machine that is not in the run"
        self.refusals.add(why)
        return None

    def read_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.DONTWAIT)["event"]
                if event == zmq.EVENT_ACCEPTED:
                    self._knocks.append(time.monotonic())
                else:
                    self._members += 1

    def count_strangers(self) -> None:
        """Whoever connected and has not proven in time to be a member is refused, however it failed.

        ZeroMQ does not say which connection it is that has proven it, so they are counted: those who came so long ago,
        less all who have. One who came since makes it too few, but not for longer than that.
        """
        before = time.monotonic() - _HANDSHAKE / 1e3 - 0.5
        while self._knocks and self._knocks[0] < before:
            self._knocks.popleft()
            self._old += 1
        for _ in range(self._old - self._members - self._strangers):
            self._strangers += 1
            self.refusals.add("not a member")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(0)


class CurveAuth:
    """Says to ZeroMQ whose keys are those of a member."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")
        self._allowed = z85_decode(keys.client.public)

    def read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.DONTWAIT)
                member = mechanism == b"CURVE" and credentials == [self._allowed]
                status = [b"200", b"OK", b"member"] if member else [b"400", b"not a member", b""]
                self.socket.send_multipart([version, number, *status, b""])

    def close(self) -> None:
        self.socket.close(0)
