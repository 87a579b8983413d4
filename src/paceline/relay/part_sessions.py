"""The workers of this machine whose replicas are on several machines.

Each has a part of its replica's model. It sends its part of a gradient to the servers before the replica's first worker
pushes, and gets its part of a version after that one has had the server's answer.
"""

from __future__ import annotations

import contextlib
from typing import Any

from paceline.relay.context import RelayContext
from paceline.relay.part_messages import HoldParameters, PartDone, PartHello, PullPart, PushPart
from paceline.server.messages import RunFailed
from paceline.transport.unix_connection import Closed, UnixConnection


class PartSessions:
    """All of this machine."""

    def __init__(self, context: RelayContext) -> None:
        self._context, self._transfers = context, context.transfers
        self._here = set(context.config.spec.places[context.machine]) if context.config.spec.places else set()
        self._connections: dict[int, UnixConnection[Any]] = {}
        """By rank in the team."""

    @property
    def active(self) -> bool:
        return bool(self._connections)

    def open(self, hello: PartHello, connection: UnixConnection[Any]) -> None:
        rank = hello.rank
        if rank not in self._here or rank in self._connections:
            connection.close()
            return
        self._connections[rank] = connection
        self._context.came = True
        self._context.poller.watch(connection.descriptor, lambda _: self._receive(rank))

    def _receive(self, rank: int) -> None:
        try:
            message = self._connections[rank].receive()
        except Closed:
            self._close(rank)
            return
        match message:
            case HoldParameters():
                self._transfers.hold(rank, message.parameters)
                self._answer(rank)
            case PushPart():
                self._transfers.push_part(rank, message.parameters, lambda: self._answer(rank))
            case PullPart():
                if self._transfers.holds(message.buffer, message.version):
                    self._answer(rank)
                else:
                    self._transfers.fetch(message.buffer, message.version, lambda: self._answer(rank))
            case _:
                self._close(rank)

    def _answer(self, rank: int) -> None:
        if rank in self._connections:
            try:
                self._connections[rank].send(PartDone())
            except Closed:
                self._close(rank)

    def fail(self, failure: RunFailed) -> None:
        """Tells all why the run has failed, and closes all connections."""
        for rank, connection in list(self._connections.items()):
            with contextlib.suppress(Closed):
                connection.send(failure)
            self._close(rank)

    def _close(self, rank: int) -> None:
        connection = self._connections.pop(rank)
        self._context.poller.unwatch(connection.descriptor)
        connection.close()
        self._transfers.restart_part(rank)
