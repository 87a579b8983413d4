"""Links between the relays of two machines: frames in order, each once, also when connections break.

A link goes one way: a sender calls the other machine's receiver, which acknowledges what it took. The sender keeps
what is not acknowledged, and sends it again on the next connection; it stops at a window of such bytes, so a slow
reader never makes either end's memory grow. There is one link for short messages and another for bulk, so that the
former overtake the latter.

A relay that was killed and started again begins anew: each end says how often it was started (its life), and the
other forgets what was under way to or from the one before.
"""

from __future__ import annotations

import errno
import socket
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.errors import TeamError
from paceline.transport.handshake import Handshake, PortListener, begin_call
from paceline.transport.keys import Secret
from paceline.transport.poller import Poller
from paceline.transport.tcp_connection import FrameHeader, TcpConnection, damage, encode, make_frame, read_header

CHUNK = 1 << 20
"""Bytes of bulk data in one frame."""
LARGEST = CHUNK + (1 << 18)
"""Bytes of a frame, at most: a chunk, or a short message."""
_ACK = 4096
"""Bytes of an acknowledgement, at most."""
_SILENCE = 60.0
"""Seconds of a host's silence after which its connection is closed, and made anew."""
_RETRY = 0.1, 1.0
"""Seconds between attempts to connect, at first and at most."""

LINKS = ("control", "bulk")


class FrameAck(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A receiver's answer, and its greeting on a new connection: all frames up to this number have come."""

    number: int
    damaged: bool = False
    """True if the next frame has come, but damaged."""
    life: int = 0
    """How often the receiver was started again."""


_decode = msgspec.msgpack.Decoder(FrameAck).decode


class RejectCounter(Counter[str]):
    """Counts refused frames and connections by reason; prints at most one line every 5 s."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._next = say, 0.0

    def add(self, why: str, who: str = "a caller") -> None:
        self[why] += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 5.0
            self._say(f"refused what {who} sent ({why}); {self.total()} refused so far")


class LinkSender:
    """One link to another machine."""

    def __init__(
        self, poller: Poller, link: str, machine: int, run: str, secret: Secret, window: int, life: int = 0
    ) -> None:
        """machine: the number of this one. window: bytes that may be sent before they are acknowledged.

        life: how often this end was started again.
        """
        self._poller, self._name, self._secret = poller, f"{machine} {link}" + (f" {life}" if life else ""), secret
        self._machine, self._run, self._window = machine, run, window
        self._unacknowledged: deque[tuple[int, bytes, Any, int | None]] = deque()
        """Number, message, payload and, if known, the payload's checksum."""
        self._next = 0
        """Index of the next of those to send."""
        self._number = 0
        self._bytes = 0
        self._handshake: Handshake | None = None
        self._connection: TcpConnection | None = None
        self._greeted = False
        """True if the receiver has said on this connection how far it is."""
        self._retry, self._wait = 0.0, _RETRY[0]
        """When to connect again, and how long to wait after that."""
        self._progress = time.monotonic()
        """Time of the last acknowledgement, or when there was nothing to acknowledge."""
        self.heard = time.monotonic()
        """Time of the last sign of life from the other end."""
        self.refused = False
        """True if the other machine answers that its relay's port is closed."""
        self.again = 0
        """Frames that were sent again."""
        self._life = 0
        """Of the other end."""
        self.reborn: Callable[[int], None] = lambda _life: None
        """Called with the other end's life when that was started again."""

    def connect(self, address: str, port: int) -> None:
        self._address = (address, port)
        self._call()

    # -- the connection ----------------------------------------------------------------------------------------------

    def _call(self) -> None:
        self._retry = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, _RETRY[1])
        try:
            self._handshake = begin_call(*self._address, self._secret, self._name)
            self._advance(0)
        except OSError as error:
            self._disconnect(error)

    def _advance(self, _: int) -> None:
        handshake = self._handshake
        assert handshake is not None
        try:
            done = handshake.advance()
        except OSError as error:
            self._disconnect(error)
            return
        if not done:
            self._poller.watch(handshake.socket.fileno(), self._advance, handshake.events)
            return
        self._poller.unwatch(handshake.socket.fileno())
        self._handshake, self._greeted, self.refused = None, False, False
        self._connection = TcpConnection(
            self._poller, handshake.socket, self._address[0], _SILENCE, _ACK, self._take, lambda _: self._disconnect()
        )

    def _disconnect(self, error: OSError | None = None) -> None:
        if error is not None and error.errno is not None:
            self.refused = error.errno == errno.ECONNREFUSED
        if self._handshake is not None:
            self._poller.unwatch(self._handshake.socket.fileno())
            self._handshake.close()
        if self._connection is not None:
            self._connection.close()
        self._handshake = self._connection = None

    def tick(self, stalled: float) -> None:
        """Connects again if there is no connection, or if nothing was acknowledged for `stalled` seconds."""
        now = time.monotonic()
        if not self._unacknowledged:
            self._progress = now
        elif now - self._progress > stalled:  # damage may have left the other end waiting for the rest of a frame
            self._progress = now
            self._disconnect()
        if self._handshake is not None and now > self._handshake.until:
            self._disconnect()
        if self._handshake is None and self._connection is None and now >= self._retry:
            self._call()

    def restart(self, life: int) -> None:
        """The other end was started again: forgets what was under way, and connects to the new one."""
        if life > self._life:
            self._disconnect()
            self._forget(life)
            self._call()

    def _forget(self, life: int) -> None:
        self._unacknowledged.clear()
        self._next = self._number = self._bytes = 0
        self._life, self._wait = life, _RETRY[0]

    # -- frames ------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that may still be sent before the other end must acknowledge some."""
        return self._window - self._bytes

    @property
    def idle(self) -> bool:
        """True if everything is acknowledged."""
        return not self._unacknowledged

    def send(self, message: bytes, payload: Any = None, check: int | None = None) -> None:
        """payload: bytes, or memory that stays as it is until it is acknowledged. check: its crc32, if known."""
        self._number += 1
        self._unacknowledged.append((self._number, message, payload, check))
        self._bytes += len(message) + (0 if payload is None else len(payload))
        self._flush()

    def _flush(self) -> None:
        while self._greeted and self._connection is not None and self._next < len(self._unacknowledged):
            frame = self._unacknowledged[self._next]
            self._next += 1
            self._connection.send(make_frame(self._run, self._machine, *frame))

    def _take(self, parts: list[Any]) -> None:
        """Takes an acknowledgement."""
        # A wrong number would make this end forget what has never come.
        if len(parts) != 2 or bytes(parts[1]) != zlib.crc32(parts[0]).to_bytes(4, "little"):
            return
        try:
            ack = _decode(parts[0])
        except msgspec.MsgspecError:
            return
        self.heard = self._progress = time.monotonic()
        self._wait = _RETRY[0]
        if ack.life > self._life:
            self._forget(ack.life)
            self._greeted = True
            self.reborn(ack.life)
            self._flush()
            return
        kept = self._unacknowledged
        while kept and kept[0][0] <= ack.number:
            _, message, payload, _ = kept.popleft()
            self._bytes -= len(message) + (0 if payload is None else len(payload))
            self._next = max(0, self._next - 1)
        if ack.damaged or not self._greeted:
            self.again += self._next
            self._next = 0
        self._greeted = True
        self._flush()

    def close(self) -> None:
        self._disconnect()


class LinkReceiver:
    """The end of all links of one kind, from all other machines."""

    def __init__(
        self,
        poller: Poller,
        link: str,
        refusals: RejectCounter,
        take: Callable[[int, bytes, Any], None],
        life: int = 0,
    ) -> None:
        """take: is given the sender's machine, the message and the payload; ValueError if it refuses them.

        life: how often this end was started again.
        """
        self._poller, self._link, self._take, self._life = poller, link, take, life
        self.refusals = refusals
        self.heard: dict[int, float] = {}
        """By machine, the time of its last frame."""
        self._taken: dict[int, int] = {}
        """By machine, the number of its last frame."""
        self._connections: dict[int, TcpConnection] = {}
        self._run = ""
        self._hosts: set[str] = set()
        """Addresses of the run's other machines."""
        self._lives: dict[int, int] = {}
        """By machine, how often its end was started again."""
        self.reborn: Callable[[int, int], None] = lambda _machine, _life: None
        """Called with a machine and its life when its end was started again."""

    def bind(self, address: str, secret: Secret, listening: socket.socket | None = None) -> int:
        """Listens; returns the port. listening: as `PortListener` has it."""
        self._listener = PortListener(self._poller, address, secret, self._connected, self._refuse, listening)
        return self._listener.port

    def _refuse(self, address: str, broken: bool) -> None:
        # A host of the run whose connection has broken before its proof calls again, and proves it then.
        if not (broken and address in self._hosts):
            self.refusals.add("not a member")

    def open(self, run: str, machines: dict[int, str]) -> None:
        """Takes frames of these machines, which are at these addresses, from now on, in this run."""
        self._run, self._hosts = run, set(machines.values())
        self._taken, self._lives = dict.fromkeys(machines, 0), dict.fromkeys(machines, 0)
        self.heard = dict.fromkeys(machines, time.monotonic())

    def meet(self, machine: int, address: str) -> None:
        """Takes frames of one more machine."""
        self._hosts.add(address)
        self._taken[machine], self.heard[machine] = 0, time.monotonic()
        self._lives[machine] = 0

    def restart(self, machine: int, life: int) -> None:
        """A machine's end was started again: takes nothing more of the one before."""
        if life > self._lives[machine]:
            self._lives[machine], self._taken[machine] = life, 0
            before = self._connections.pop(machine, None)
            if before is not None:
                before.close()

    def _connected(self, name: str, connection: socket.socket) -> None:
        machine, life = self._parse(name)
        if machine is None:
            self.refusals.add("from a machine that is not in the run")
            connection.close()
            return
        if life > self._lives[machine]:
            self.restart(machine, life)
            self.reborn(machine, life)
        elif life < self._lives[machine]:
            connection.close()
            return
        if machine in self._connections:
            self._connections[machine].close()  # the sender has given it up
        taken = TcpConnection(
            self._poller,
            connection,
            f"machine {machine}",
            _SILENCE,
            LARGEST,
            lambda parts: self._frame(machine, parts),
            lambda error: self._closed(machine, error),
        )
        self._connections[machine] = taken
        self.heard[machine] = time.monotonic()
        self._answer(taken, FrameAck(self._taken[machine], life=self._life))

    def _parse(self, name: str) -> tuple[int | None, int]:
        """The machine and the life of a caller; None if no machine of the run has this name."""
        words = name.split(" ")
        number, link, life = [*words, "0"][:3] if len(words) in (2, 3) else ("", "", "0")
        if link != self._link or not (number.isdecimal() and life.isdecimal()) or int(number) not in self._taken:
            return None, 0
        return int(number), int(life)

    def _closed(self, machine: int, error: TeamError | None) -> None:
        if error is not None:
            self.refusals.add("not a frame", f"machine {machine}")

    def _answer(self, connection: TcpConnection, ack: FrameAck) -> None:
        text = encode(ack)
        connection.send([text, zlib.crc32(text).to_bytes(4, "little")])

    def _frame(self, machine: int, parts: list[Any]) -> None:
        try:
            header = read_header(parts)
            if header.run != self._run:
                raise ValueError("of another run")
            if header.sender != machine:
                raise ValueError("from a machine that is not in the run")
        except ValueError as error:
            self.refusals.add(str(error))
            return
        ack = self._judge(header, parts)
        if ack is not None:
            self._answer(self._connections[machine], ack)

    def _judge(self, header: FrameHeader, parts: list[Any]) -> FrameAck | None:
        """Takes one frame, or refuses it; returns the answer."""
        machine, before = header.sender, self._taken[header.sender]
        name = f"machine {machine}"
        if header.number > before + 1:
            self.refusals.add("before its turn", name)  # one before it was damaged: both come again
            return None
        why = damage(header, parts) or ("seen before" if header.number <= before else "")
        if why:
            self.refusals.add(why, name)
            return FrameAck(before, damaged=header.number == before + 1)
        self.heard[machine] = time.monotonic()
        self._taken[machine] = header.number
        try:
            self._take(machine, bytes(parts[1]), parts[2] if len(parts) == 3 else None)
        except (ValueError, KeyError, IndexError, TeamError) as error:  # msgspec's are ValueErrors, too
            self.refusals.add(f"{error}" if type(error) is ValueError else "not understood", name)
        return FrameAck(header.number)

    def tick(self) -> None:
        """Refuses callers that have not proven in time that they are members."""
        self._listener.expire()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections.values():
            connection.close()
