"""The way to the coordinator: through the relay of its machine, which holds one connection to it per member.

A member is a worker (its rank) or a server (-1 - its number). So the coordinator treats members of all machines alike.
It learns of the end of a worker by a message (`WorkerGone`), as a connection may also end since a relay was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline import failpoints
from paceline.errors import JoinError, ServerLost
from paceline.events.forwarding import FIRST_MACHINE
from paceline.parameters.worker_table import SLOT
from paceline.relay.context import RelayContext
from paceline.relay.messages import MemberGone, ToCoordinator
from paceline.server.messages import (
    FromWorker,
    Hello,
    LeaveTeam,
    Resume,
    RunFailed,
    ShardHello,
    ToShard,
    ToWorker,
    WorkerGone,
)
from paceline.transport.unix_connection import Closed, UnixConnection, connect

_encode = msgspec.msgpack.Encoder().encode
_from_worker = msgspec.msgpack.Decoder(FromWorker)


class CoordinatorSessions:
    """This machine's way to the coordinator; connections to it exist only on its own machine."""

    def __init__(
        self, context: RelayContext, deliver: Callable[[int, bytes], None], closed: Callable[[int, bool], None]
    ) -> None:
        """deliver: is given a member and the coordinator's message to it. closed: is told of a member whose connection
        the coordinator has closed, and True if there is no coordinator any more."""
        self._context, self._deliver, self._closed = context, deliver, closed
        self._connections: dict[int, UnixConnection[Any]] = {}
        self._waiting: dict[int, list[tuple[Any, Sequence[int]]]] = {}
        """By member, messages that came before the coordinator, with descriptors."""
        self._answered: set[int] = set()
        """Members that the coordinator has let in."""
        self._expected = set(context.record.state.sessions)
        """Those that are to connect again, as the coordinator or a relay before this one was killed."""
        self._ended: dict[int, WorkerGone] = {}
        """Those that have ended without a connection, until the coordinator is told."""
        self._told: dict[int, WorkerGone] = {}
        """All that have ended: a coordinator that was killed may not have noted it."""
        self._begun = bool(self._expected)
        """True if there was a coordinator."""

    @property
    def waiting(self) -> bool:
        """True if messages wait for the coordinator to start."""
        return bool(self._waiting or self._ended)

    @property
    def active(self) -> bool:
        return bool(self._connections or self._waiting or self._expected or self._ended)

    def __contains__(self, who: int) -> bool:
        return who in self._connections or who in self._waiting

    def may_join(self, who: int) -> bool:
        """True if this rank is free, as far as is known here."""
        spec = self._context.config.spec
        return spec.elastic and 0 <= who < spec.capacity and who not in self and who not in self._expected

    def of_machine(self, machine: int) -> list[int]:
        """The connected members of a machine."""
        known = {*self._connections, *self._expected}
        return [who for who in known if self._context.machine_of[who] == machine]

    def reachable(self) -> bool:
        try:
            connect(self._context.config.coordinator, ToWorker, 0.0).close()
        except JoinError:
            return False
        return True

    # -- to the coordinator ------------------------------------------------------------------------------------------

    def send(
        self,
        who: int,
        message: msgspec.Struct,
        descriptors: Sequence[int] = (),
        *,
        table: bytes | None = None,
        used: bytes | None = None,
    ) -> None:
        """Sends a message of a member of this machine."""
        if self._context.at_coordinator:
            self._submit(who, message, descriptors)
        else:
            self._context.control[FIRST_MACHINE].send(_encode(ToCoordinator(who, _encode(message), table, used)))

    def take(self, machine: int, envelope: ToCoordinator) -> None:
        """Passes on a message of another machine's member; ValueError if it is to be refused."""
        context, who = self._context, envelope.who
        if not context.at_coordinator:
            raise ValueError("words for another machine")
        message = _from_worker.decode(envelope.data)
        if isinstance(message, Hello) and message.joins and self.may_join(who):
            context.adopt(who, machine)
        failpoints.hit("relay.taken")
        if context.machine_of.get(who) != machine:
            raise ValueError("words of another machine's worker")
        if who >= 0:
            self._store(who, envelope)
        if isinstance(message, Hello):
            message = msgspec.structs.replace(message, spec=False, host=context.config.peers[machine].address)
        self._submit(who, message, ())

    def _store(self, who: int, envelope: ToCoordinator) -> None:
        """Writes what comes beside a push where the servers read it."""
        context = self._context
        if envelope.table is not None:
            if len(envelope.table) > SLOT:
                raise ValueError("hyperparameters that are too long")
            context.table.slots[who][: len(envelope.table)] = envelope.table
        if envelope.used is not None:
            if len(envelope.used) != len(context.config.spec.parameters):
                raise ValueError("flags of other parameters")
            context.table.used[who][:] = envelope.used

    def _submit(self, who: int, message: Any, descriptors: Sequence[int]) -> None:
        if isinstance(message, Hello | ShardHello | Resume):
            if who in self and isinstance(message, Hello) and not message.joins:
                raise ValueError("a worker that has come before")
            self.close(who)  # an earlier way of the same member, if there was one
            self._expected.discard(who)
            if not isinstance(message, Resume):
                self._told.pop(who, None)
            self._waiting[who] = []
            self._context.came = True
            self._note()
        if who in self._waiting:
            self._waiting[who].append((message, descriptors))
            self.retry()
            return
        self._write(who, message, descriptors)

    def _write(self, who: int, message: Any, descriptors: Sequence[int]) -> None:
        connection = self._connections.get(who)
        if connection is None:
            return
        try:
            connection.send(message, descriptors)
        except Closed:
            self._closed_by_coordinator(who)
        if isinstance(message, LeaveTeam):
            self.close(who)
            self._note()

    def _note(self) -> None:
        """Records of which members this relay has connections."""
        self._context.record.state.sessions = [*self._connections, *self._waiting, *self._expected]
        self._context.record.save()

    def retry(self) -> None:
        """Connects members that came before the coordinator, and tells it of ends, if it is there by now."""
        for who, gone in list(self._ended.items()):
            try:
                connection: UnixConnection[Any] = connect(self._context.config.coordinator, ToWorker, 0.0)
            except JoinError:
                if not self._comes_back:
                    self._ended.clear()
                break
            with contextlib.suppress(Closed):
                connection.send(gone)
            connection.close()
            del self._ended[who]
        for who in list(self._waiting):
            try:
                connection = connect(self._context.config.coordinator, ToWorker if who >= 0 else ToShard, 0.0)
            except JoinError:
                if self._begun and not self._comes_back:
                    del self._waiting[who]
                    self._end_for(who)
                continue
            self._connections[who] = connection
            self._context.poller.watch(connection.descriptor, lambda _, who=who: self._receive(who))  # type: ignore[misc]
            for message, descriptors in self._waiting.pop(who):
                self._write(who, message, descriptors)

    # -- from the coordinator ----------------------------------------------------------------------------------------

    def _receive(self, who: int) -> None:
        try:
            message = self._connections[who].receive()
        except Closed:
            self._closed_by_coordinator(who)
            return
        self._answered.add(who)
        self._begun = True
        self._deliver(who, _encode(message))

    @property
    def _comes_back(self) -> bool:
        """True if the coordinator is started again if it was killed."""
        return self._context.state.live

    def _closed_by_coordinator(self, who: int) -> None:
        answered = who in self._answered
        self.close(who)
        if self._comes_back:
            self._ended.update(self._told)
        if self._comes_back or self.reachable():  # it was killed, or has removed this member alone; which it will say
            self._expected.add(who)
            self._closed(who, False)
        elif answered:  # after a reason of the coordinator's own, which comes first
            self._end_for(who)
        else:
            self._closed(who, True)
        self._note()

    def _end_for(self, who: int) -> None:
        """There is no coordinator any more."""
        if who >= 0:
            self._deliver(who, _encode(RunFailed("ServerLost", ServerLost.UNTOLD, [])))
        self._closed(who, True)

    def end(self, who: int, *, left: bool) -> None:
        """Tells the coordinator that a member of this machine has ended; left: True if on purpose."""
        if self._context.at_coordinator:
            self.fail(who, WorkerGone(who, left))
        else:
            self._context.control[FIRST_MACHINE].send(_encode(MemberGone(who, left)))

    def fail(self, who: int, message: msgspec.Struct) -> None:
        """Tells the coordinator why a member is lost, and closes its connection."""
        connection = self._connections.get(who)
        if connection is not None and (who >= 0 or not isinstance(message, WorkerGone)):
            with contextlib.suppress(Closed):
                connection.send(message)
        if who >= 0:
            self._told[who] = gone = WorkerGone(who, isinstance(message, WorkerGone) and message.left)
            if connection is None and (who in self._expected or (self._begun and who in self._waiting)):
                self._ended[who] = gone
        self.close(who)
        self._expected.discard(who)
        self._note()
        self.retry()

    def close(self, who: int) -> None:
        self._waiting.pop(who, None)
        self._answered.discard(who)
        connection = self._connections.pop(who, None)
        if connection is not None:
            self._context.poller.unwatch(connection.descriptor)
            connection.close()
