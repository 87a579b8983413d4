"""A worker's connection to the coordinator, which is made again after the coordinator or a relay was killed.

Both ends count messages. When the worker connects again, each says how many it has received, and the other sends the
rest again: so every message is handled once. All that comes in is written to the journal first.

A connection that ends is the end of its worker, unless it goes through relays: then these say so (`WorkerGone`), and
without a word the session waits for its worker to connect again.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.errors import ServerLost
from paceline.server.journal import EntryKind, Journal
from paceline.server.messages import CALLS, UNCOUNTED, FromWorker, Resume, Resumed, WorkerGone
from paceline.transport.unix_connection import Closed, UnixConnection

_LOOK = 0.1
"""Seconds between looks whether a worker has connected again."""


class Detached(Exception):
    """A worker's relay was killed, and the worker has not connected again."""


class SessionLink:
    """As a `UnixConnection` to a worker."""

    def __init__(
        self, rank: int, pid: int, journal: Journal, connection: UnixConnection[Any] | None, *, relayed: bool = False
    ) -> None:
        """relayed: True if the worker comes through the relay of its machine."""
        self._rank, self._pid, self._journal, self._connection = rank, pid, journal, connection
        self.relayed = relayed
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self.meet: Callable[[float], None] = lambda _seconds: None
        """Lets workers connect again, for so many seconds."""
        self.detach: Callable[[], None] = self.close
        """Gives up a connection that a relay has ended."""
        self._process = -1
        """Of a worker that has not connected again: a descriptor of its process, or where that is not known, of a pipe
        that is closed at its end."""
        self._pipe = -1
        """The other end of that."""
        self.gone = False
        """True if a relay has said that the worker has ended."""
        self.left = False
        """True if it has left on purpose."""
        self.received = 0
        """Messages of the worker that were received."""
        self.sent = 0
        """Messages that were sent to it."""
        self.unanswered: list[tuple[Any, Sequence[int]]] = []
        """The last of them, which it may not have: those since its last message, or through relays since the last but
        one that waits for a reply."""
        self._shown = 0
        """How many of those were sent before the last message that waits for a reply."""

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        if not isinstance(message, UNCOUNTED):
            self.sent += 1
            self.unanswered.append((message, descriptors))
        if self._connection is not None and not self._journal.replaying:
            with contextlib.suppress(*([Closed] if self.relayed else [])):  # it is sent when the worker is back
                self._connection.send(message, descriptors)

    def patience_to_send(self, seconds: float) -> None:
        if self._connection is not None:
            self._connection.patience_to_send(seconds)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self) -> Any:
        """The next message; raises Closed if the worker is dead, `Detached` if its relay is."""
        found = self._read()
        if found is not None:
            return found
        if self._connection is None and self.relayed and not self.gone:
            raise Detached
        if self._connection is None or self.gone:
            self._journal.add(EntryKind.CLOSED, self._rank)
            raise Closed("the worker died while the server was away")
        try:
            data = self._connection.receive_bytes()
        except Closed:
            if self.relayed:
                self.detach()
                raise Detached from None
            self._journal.add(EntryKind.CLOSED, self._rank)
            raise
        self._journal.add(EntryKind.MESSAGE, self._rank, data)
        return self._count(data)

    def receive_within(self, seconds: float) -> Any:
        """The next message, or None if there is none in time."""
        found = self._read(silence=True)
        if found is not None:
            return None if found is EntryKind.SILENCE else found
        until = time.monotonic() + seconds
        while True:
            while self._connection is None and not self._dead() and (left := until - time.monotonic()) > 0:
                self.meet(min(_LOOK, left))
            if self._connection is None and self._dead():
                return self.receive()
            ready = select.poll()
            if self._connection is not None:
                ready.register(self._connection.descriptor, select.POLLIN)
            if self._connection is None or not ready.poll(max(0, int((until - time.monotonic()) * 1e3))):
                self._journal.add(EntryKind.SILENCE, self._rank)
                return None
            with contextlib.suppress(Detached):
                return self.receive()

    def _read(self, *, silence: bool = False) -> Any:
        """The next message of the journal, while that is read; None if it is not."""
        entry = self._journal.peek()
        if entry is None:
            return None
        assert entry.rank == self._rank, entry
        self._journal.take()
        if entry.kind is EntryKind.CLOSED:
            raise Closed("the other end is gone")
        if entry.kind is EntryKind.SILENCE and silence:
            return EntryKind.SILENCE
        assert entry.kind is EntryKind.MESSAGE, entry
        return self._count(entry.data)

    def _count(self, data: bytes) -> Any:
        message = self._decode(data)
        if isinstance(message, WorkerGone):
            self.gone, self.left = True, message.left
            raise Closed("its relay says that the worker has ended")
        self.received += 1
        if not self.relayed:
            self.unanswered.clear()  # all that was sent before is in the worker's socket at least
        elif isinstance(message, CALLS):
            del self.unanswered[: self._shown]
            self._shown = len(self.unanswered)
        return message

    @property
    def state(self) -> tuple[int, int, list[Any], int]:
        """What a coordinator that is started again must know of it: see `restore`."""
        return self.received, self.sent, [message for message, _ in self.unanswered], self._shown

    def restore(self, state: tuple[int, int, list[Any], int], descriptors: Callable[[Any], Sequence[int]]) -> None:
        """descriptors: those that went beside a message."""
        self.received, self.sent, unanswered, self._shown = state
        self.unanswered = [(message, descriptors(message)) for message in unanswered]

    # -- connecting again --------------------------------------------------------------------------------------------

    def attach(self, connection: UnixConnection[Any], resume: Resume | None) -> None:
        """Goes on with another connection; resume: None if the worker knows of no session."""
        self.close()
        self._connection = connection
        with contextlib.suppress(Closed):  # the coordinator notices that
            if resume is not None:
                connection.send(Resumed(self.received, resume.attempt))
            missing = self.sent - (0 if resume is None else resume.received)
            if missing > len(self.unanswered):
                raise ServerLost(f"rank {self._rank} has missed messages that the server has no more", [self._rank])
            for message, descriptors in self.unanswered[-missing:] if missing else ():
                connection.send(message, descriptors)

    @property
    def attached(self) -> bool:
        return self._connection is not None

    def end(self, *, left: bool) -> None:
        """A relay says that the worker has ended, which has not connected again; the next `receive` does so."""
        self.gone, self.left = True, left
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _dead(self) -> bool:
        if self.gone:
            return True
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def descriptor(self) -> int:
        """Can be read when there is a message, or when the worker has died."""
        if self._connection is not None:
            return self._connection.descriptor
        if self._process < 0 and self.relayed:
            self._process, self._pipe = os.pipe()
            if self.gone:
                self.end(left=self.left)
        elif self._process < 0:
            try:
                self._process = os.pidfd_open(self._pid)
            except ProcessLookupError:
                self._process, other = os.pipe()
                os.close(other)  # so that it can be read
        return self._process

    @property
    def open(self) -> bool:
        return self._connection.open if self._connection is not None else not self._dead()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for descriptor in (self._process, self._pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self._process = self._pipe = -1
