"""The server's door: it stays open while a run goes on, for workers who join it and engines that want one to leave."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import Any

from paceline.cluster.servers import Dismiss
from paceline.errors import Mismatch, TeamTimeout
from paceline.server.messages import (
    Ask,
    Cancelled,
    Copied,
    Copy,
    Enter,
    Failed,
    FromWorker,
    Hello,
    Plan,
    Push,
    Seated,
    send_parts,
)
from paceline.server.seats import Seat, Seats, State
from paceline.transport import Memory
from paceline.transport.wire import Closed, Listener, Wire

_PATIENCE = 5.0
"""Seconds that the server waits for somebody to take what it is sent."""
_WAITING = (State.PUSHED, State.ASKING, State.ENTERING)
"""In these states a worker hears what it is told at once."""
_CALLS = (Push, Cancelled, Ask, Enter)
"""After these it does."""


class Door:
    """Hears strangers, and lets them in once they have been shown what they need."""

    def __init__(self, listener: Listener, plan: Plan, text: bytes, memories: list[Memory], seats: Seats) -> None:
        self._listener, self._plan, self._text, self._memories, self._seats = listener, plan, text, memories, seats
        self._strangers: dict[int, Wire[Any]] = {}
        self._arriving: list[Seat] = []
        """Who has said hello, and waits until somebody shows what its model has besides parameters."""
        self._epoll: select.epoll | None = None
        self.seat: Callable[[Seat], None] = lambda _seat: None
        """Gives a newcomer its place among the others."""
        self.dismiss: Callable[[int], None] = lambda _rank: None
        """Lets a worker know that it shall leave."""

    def open(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        epoll.register(self._listener.descriptor, select.EPOLLIN)

    def close(self) -> None:
        for wire in [*self._strangers.values(), *(seat.wire for seat in self._arriving)]:
            wire.close()
        self._listener.close()

    def hear(self, descriptor: int) -> None:
        """Something has happened at the door."""
        assert self._epoll is not None
        if descriptor == self._listener.descriptor:
            wire = self._listener.accept(FromWorker, 0)
            if wire is not None:
                self._strangers[wire.descriptor] = wire
                self._epoll.register(wire.descriptor, select.EPOLLIN)
            return
        if descriptor not in self._strangers:
            return
        wire = self._strangers.pop(descriptor)
        self._epoll.unregister(descriptor)
        try:
            message = wire.receive()
        except Exception:  # it has gone, or speaks another language; that changes nothing here
            wire.close()
            return
        if isinstance(message, Dismiss):
            self.dismiss(message.rank)
            wire.close()
        elif isinstance(message, Hello):
            self._greet(Seat(message.rank, message.pid, wire, host=message.host, joined=True, fresh=True))
        else:
            wire.close()

    def _greet(self, seat: Seat) -> None:
        rank, capacity = seat.rank, self._plan.capacity
        if not 0 <= rank < capacity:
            self._refuse(seat, f"rank {rank} cannot join: this run has room for ranks 0 to {capacity - 1}")
        elif rank in self._seats or any(other.rank == rank for other in self._arriving):
            self._refuse(seat, f"rank {rank} cannot join: there is a rank {rank} already")
        else:
            self._arriving.append(seat)
            waiting = next((other for other in self._seats.values() if other.state in _WAITING), None)
            if waiting is not None or not self._plan.rest or not self._seats:
                self._admit(waiting)

    def _refuse(self, seat: Seat, why: str) -> None:
        with contextlib.suppress(Closed):
            seat.wire.send(Failed("JoinError", why, [seat.rank]))
        seat.wire.close()

    def passing(self, seat: Seat, message: Any) -> None:
        """A worker has said something: if it waits for the answer, it may show its model to those who have come."""
        if self._arriving and isinstance(message, _CALLS):
            self._admit(seat)

    def settle(self) -> None:
        """If nobody is left who could show anything, the newest that is known has to do."""
        if self._arriving and not self._seats:
            self._admit(None)

    def _admit(self, shows: Seat | None) -> None:
        if shows is not None and self._plan.rest and not self._show(shows):
            return
        for seat in self._arriving:
            self.seat(seat)
        self._arriving.clear()

    def _show(self, seat: Seat) -> bool:
        self._seats.tell(seat, Copy())
        try:
            answer = seat.wire.receive_within(self._plan.timeouts.meeting)
        except Closed:
            return False  # its end will be heard, and another one asked
        if answer is None:
            raise TeamTimeout(f"rank {seat.rank} did not show its model to one who joins", [seat.rank])
        if not isinstance(answer, Copied):
            raise Mismatch(f"rank {seat.rank} sent a {type(answer).__name__} instead of its model", [seat.rank])
        return True

    def hand_over(self, seat: Seat) -> None:
        """Give a newcomer the plan and all memory."""
        seat.wire.patience_to_send(_PATIENCE)
        with contextlib.suppress(Closed):  # its end will be heard
            descriptors = [memory.descriptor for memory in self._memories]
            seat.wire.send(Seated(seat.version, seat.buffer), descriptors)
            send_parts(seat.wire, self._text)
