"""A worker's connection to the coordinator, which is made again after the coordinator was killed.

Both ends count messages. When the worker connects again, each says how many it has received, and the other sends the
rest again: so every message is handled once. All that comes in is written to the journal first.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.server.journal import EntryKind, Journal
from paceline.server.messages import UNCOUNTED, FromWorker, Resumed
from paceline.transport.unix_connection import Closed, UnixConnection

_LOOK = 0.1
"""Seconds between looks whether a worker has connected again."""


class SessionLink:
    """As a `UnixConnection` to a worker."""

    def __init__(self, rank: int, pid: int, journal: Journal, connection: UnixConnection[Any] | None) -> None:
        self._rank, self._pid, self._journal, self._connection = rank, pid, journal, connection
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self.meet: Callable[[float], None] = lambda _seconds: None
        """Lets workers connect again, for so many seconds."""
        self._process = -1
        """Of a worker that has not connected again: a descriptor of its process."""
        self.received = 0
        """Messages of the worker that were received."""
        self.sent = 0
        """Messages that were sent to it."""
        self.unanswered: list[tuple[Any, Sequence[int]]] = []
        """The last of them, which it may not have: those since its last message."""

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        if not isinstance(message, UNCOUNTED):
            self.sent += 1
            self.unanswered.append((message, descriptors))
        if self._connection is not None and not self._journal.replaying:
            self._connection.send(message, descriptors)

    def patience_to_send(self, seconds: float) -> None:
        if self._connection is not None:
            self._connection.patience_to_send(seconds)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self) -> Any:
        """The next message; raises Closed if the worker is dead."""
        found = self._read()
        if found is not None:
            return found
        if self._connection is None:
            self._journal.add(EntryKind.CLOSED, self._rank)
            raise Closed("the worker died while the server was away")
        try:
            data = self._connection.receive_bytes()
        except Closed:
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
        self.received += 1
        self.unanswered.clear()  # all that was sent before is in the worker's socket at least
        return self._decode(data)

    # -- connecting again --------------------------------------------------------------------------------------------

    def attach(self, connection: UnixConnection[Any], received: int | None) -> None:
        """Goes on with another connection; received: as `Resume` has it, None if the worker knows of no session."""
        self.close()
        self._connection = connection
        with contextlib.suppress(Closed):  # the coordinator notices that
            if received is not None:
                connection.send(Resumed(self.received))
            missing = self.sent - (received or 0)
            for message, descriptors in self.unanswered[-missing:] if missing else ():
                connection.send(message, descriptors)

    @property
    def attached(self) -> bool:
        return self._connection is not None

    def _dead(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def descriptor(self) -> int:
        """Can be read when there is a message, or when the worker has died."""
        if self._connection is not None:
            return self._connection.descriptor
        if self._process < 0:
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
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
