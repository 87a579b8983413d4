"""How a machine joins a running team: it calls a port of the coordinator's machine, the door, and proves the key.

1. Its launcher asks for places (`AskPlaces`), and gets ranks and the plan of the run (`PlacesGiven`).
2. Its first worker opens a relay there, and announces it (`MachineHere`); all other relays connect to it.
3. Its workers join through that relay, as those do that are started again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.config import parse_door
from paceline.errors import JoinError, TeamError
from paceline.relay.messages import RelayAddress, RelayConfig
from paceline.transport.handshake import PortListener, begin_call
from paceline.transport.keys import VARIABLE, Secret
from paceline.transport.poller import Poller
from paceline.transport.tcp_connection import TcpConnection

_PURPOSE = "the door of a run"
"""Stands for the run's name, which a machine that joins does not know yet."""
_LARGEST = 1 << 28
"""Bytes of a plan, at most."""
_SILENCE = 30.0
"""Seconds after which a caller that says nothing is given up."""


class AskPlaces(msgspec.Struct, frozen=True, tag=True):
    """Asks for places for so many workers."""

    workers: int


class MachineHere(msgspec.Struct, frozen=True, tag=True):
    """A machine's relay is bound to this address."""

    machine: int
    relay: RelayAddress


class PlacesGiven(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a machine's workers, and its relay's view of the run."""

    ranks: list[int]
    config: RelayConfig


class PlacesRefused(msgspec.Struct, frozen=True, tag=True):
    """Why a machine cannot join."""

    reason: str


Request = AskPlaces | MachineHere
Answer = PlacesGiven | MachineHere | PlacesRefused


class Door:
    """The coordinator's end, in the relay of its machine."""

    def __init__(
        self, poller: Poller, listening: socket.socket, key: str | None, refused: Callable[[str, bool], None]
    ) -> None:
        """listening: its port, bound; refused: as of `PortListener`."""
        self._poller = poller
        self._listener = PortListener(poller, "", Secret.of(key, _PURPOSE), self._proven, refused, listening)
        self.answer: Callable[[Request], Answer] = lambda _: PlacesRefused("its training has not begun yet; try again")
        self._callers: list[TcpConnection] = []

    def _proven(self, name: str, connection: socket.socket) -> None:
        caller = TcpConnection(
            self._poller,
            connection,
            name,
            _SILENCE,
            _LARGEST,
            lambda parts: self._take(caller, parts),
            lambda _: self._callers.remove(caller),
        )
        self._callers.append(caller)

    def _take(self, caller: TcpConnection, parts: list[Any]) -> None:
        try:
            request = msgspec.msgpack.decode(bytes(parts[0]), type=Request)
        except msgspec.MsgspecError:
            return
        caller.send([msgspec.msgpack.encode(self.answer(request))])

    def tick(self) -> None:
        self._listener.expire()

    def close(self) -> None:
        self._listener.close()
        for caller in self._callers:
            caller.close()


def call(door: str, key: str | None, request: Request, patience: float) -> Answer:
    """The answer of a run's door; JoinError with one sentence if there is none."""
    host, port = parse_door(door, "--join")
    until = time.monotonic() + patience
    poller, answers = Poller(), []
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        connection = begin_call(str(address), port, Secret.of(key, _PURPOSE), "joins").complete(until)
    except (ConnectionRefusedError, socket.gaierror, TimeoutError) as error:
        why = "no run listens there: it has ended, or it was started without --open"
        if not isinstance(error, ConnectionRefusedError):
            why = f"there is no way to it ({error})"
        raise JoinError(f"cannot join at {door}: {why}") from None
    except OSError:
        raise JoinError(
            f"cannot join at {door}: the run there has another key than this machine, or none; set the run's "
            f"{VARIABLE} here"
        ) from None

    def ended(error: TeamError | None) -> None:
        answers.append(PlacesRefused(str(error or "the run has ended")))

    caller = TcpConnection(poller, connection, host, patience, _LARGEST, lambda parts: answers.append(parts[0]), ended)
    try:
        caller.send([msgspec.msgpack.encode(request)])
        while not answers and time.monotonic() < until:
            poller.wait(0.1)
    finally:
        caller.close()
        poller.close()
    if not answers:
        raise JoinError(f"cannot join at {door}: no answer in {patience:g} s (--timeout)")
    found = answers[0]
    answer = found if isinstance(found, PlacesRefused) else msgspec.msgpack.decode(bytes(found), type=Answer)
    if isinstance(answer, PlacesRefused):
        raise JoinError(f"cannot join at {door}: {answer.reason}")
    return answer
