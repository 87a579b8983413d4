"""The workers and servers of this machine, to which their relay is the server.

A push goes on to the coordinator once the gradient is where the servers need it; an answer of the coordinator goes to
its worker once the version that it names is on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import failpoints
from paceline.relay.context import RelayContext
from paceline.relay.coordinator_sessions import CoordinatorSessions
from paceline.relay.part_messages import FromPart, PartHello
from paceline.relay.part_sessions import PartSessions
from paceline.server import messages
from paceline.server.eviction import end_connected
from paceline.server.memory import MEMORIES
from paceline.transport.unix_connection import Closed, Listener, UnixConnection

_READS = 64
"""Messages of one session that are handled before others have their turn."""

_encode = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(messages.ToWorker)
_to_shard = msgspec.msgpack.Decoder(messages.ToShard)


@dataclasses.dataclass(slots=True)
class LocalSession:
    """A worker (or below 0, a server) of this machine."""

    who: int
    connection: UnixConnection[Any]
    pid: int
    buffer: int = 0
    """The number of the buffer with the worker's version."""
    answers: deque[Any] = dataclasses.field(default_factory=deque)
    """Messages to the worker, in order, until what they name is here."""
    fetching: bool = False
    fetched: bool = False
    """True if everything that the first answer needs is here, or on its way."""
    held: list[Any] | None = None
    """Messages that came since the worker wrote parameters and state, until these are where they belong."""
    whole: bool = False
    """True if it has requested a frozen version of which it needs all, though it computes with a part."""
    gathered: bool = False
    """True if that is here, or on its way."""
    left: bool = False
    """True if it has said that it leaves."""
    resuming: int = 0
    """The number of the attempt to go on, until the coordinator has answered it; what comes before was sent on an
    earlier way."""
    hyperparameters: int = -1
    """Number of its hyperparameters that were last sent to the coordinator."""


class LocalSessions:
    """All of this machine."""

    def __init__(self, context: RelayContext, listener: Listener, coordinator: CoordinatorSessions) -> None:
        self._context, self._listener, self._coordinator = context, listener, coordinator
        self._transfers = context.transfers
        self._sessions: dict[int, LocalSession] = {}
        self._parts = PartSessions(context)
        self._expected: dict[int, int] = {}
        """Those that were connected and may connect again, with descriptors of their processes."""
        context.poller.watch(listener.descriptor, self._accept)
        for who, pid in context.record.state.members.items():
            self._expect(who, pid)

    @property
    def active(self) -> bool:
        return bool(self._sessions or self._expected) or self._parts.active

    def __contains__(self, who: int) -> bool:
        return who in self._sessions

    # -- from workers ------------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        connection = self._listener.accept(messages.FromWorker | FromPart, 0.0)
        if connection is None:
            return
        try:
            hello, descriptors = connection.receive_with_descriptors(MEMORIES)
        except (Closed, msgspec.MsgspecError):
            connection.close()
            return
        if isinstance(hello, PartHello):
            self._parts.open(hello, connection)
            return
        if not isinstance(hello, messages.Hello | messages.ShardHello | messages.Resume):
            connection.close()
            return
        context = self._context
        who = -1 - hello.index if isinstance(hello, messages.ShardHello) else hello.rank
        joins = isinstance(hello, messages.Hello) and hello.joins and self._coordinator.may_join(who)
        before = self._sessions.get(who)
        again = before is None or before.pid == hello.pid  # it has lost the way of before sooner than this relay has
        if not (again and (joins or context.machine_of.get(who) == context.machine)):
            connection.close()
            return
        if before is not None:
            self.close(who)
        if joins:
            context.adopt(who, context.machine)
        if who >= 0 and not context.config.spec.places:
            self._transfers.adopt(who)
        self._sessions[who] = session = LocalSession(who, connection, hello.pid)
        if isinstance(hello, messages.Resume):
            session.resuming = hello.attempt
        context.came = True
        self._stop_expecting(who)
        context.record.state.members[who] = hello.pid
        context.record.state.gone.pop(who, None)
        context.record.save()
        context.poller.watch(connection.descriptor, lambda _: self._receive(session))
        self._coordinator.send(who, hello, descriptors)

    def _receive(self, session: LocalSession) -> None:
        for _ in range(_READS):
            try:
                message = session.connection.receive()
            except Closed:
                self._ended(session)
                return
            self._handle(session, message)
            if not self._is_current(session) or not session.connection.ready:
                return

    def _is_current(self, session: LocalSession) -> bool:
        """False if its connection was closed, or its worker has another by now."""
        return self._sessions.get(session.who) is session

    def _handle(self, session: LocalSession, message: Any) -> None:
        who = session.who
        if not isinstance(message, messages.GradientReady):
            failpoints.hit("relay.request")
        if session.held is not None:
            session.held.append(message)
            return
        match message:
            case messages.GradientReady():
                self._transfers.made(who, message.parameters)
                return
            case messages.PushGradient() if not message.skip:
                self._transfers.push(who, lambda: self._send_push(session, message))
                return
            case messages.StepCancelled() | messages.PushGradient():
                self._transfers.restart(who)
            case messages.LeaveTeam():
                session.left = True
            case messages.Freeze():
                session.whole = bool(self._context.config.spec.places) and not message.pull
            case messages.BuffersCopied():
                self._transfers.show(who, lambda: self._pass_on(session, message))
                return
            case messages.GatherKept():
                self._transfers.fetch_kept(lambda: setattr(self._context.flags, "gathered", message.number))
                return
            case messages.Thaw() if message.reload:
                session.held = []  # the coordinator is frozen until this message, and must get none before it
                self._transfers.load(who, session.buffer, lambda: self._reloaded(session, message))
                return
            case messages.Thaw() if session.whole:
                self._transfers.drop_rest(session.buffer)
        self._coordinator.send(who, message)

    def _pass_on(self, session: LocalSession, message: Any) -> None:
        """Sends a message once its transfers are over, if the worker has not come again, and repeated it, meanwhile."""
        if self._is_current(session):
            self._coordinator.send(session.who, message)

    def _reloaded(self, session: LocalSession, message: messages.Thaw) -> None:
        if not self._is_current(session):
            return
        if session.whole:
            self._transfers.drop_rest(session.buffer)
        self._coordinator.send(session.who, message)
        held, session.held = session.held or [], None
        for later in held:
            self._handle(session, later)

    def _send_push(self, session: LocalSession, message: messages.PushGradient) -> None:
        if not self._is_current(session):
            return
        table = used = None
        if message.hyperparameters != session.hyperparameters:
            slot = self._context.table.slots[session.who]
            table = bytes(slot[: 8 + int.from_bytes(slot[:8], "little")])
            session.hyperparameters = message.hyperparameters
        if not message.complete:
            used = bytes(self._context.table.used[session.who])
        self._coordinator.send(session.who, message, table=table, used=used)

    def _ended(self, session: LocalSession) -> None:
        """The process of a session has closed its connection, or died."""
        if not self._is_current(session):
            return
        if session.left:
            self._tell_end(session.who, session.pid, left=True)
        else:
            self.close(session.who)

    def _tell_end(self, who: int, pid: int, *, left: bool) -> None:
        """Tells the coordinator that a process of this machine has ended; left: True if it has said that it leaves."""
        context = self._context
        self.close(who, final=True)
        left = left or (who >= 0 and context.flags.has_left(who, pid))
        if not left:  # else its last events are still to be sent
            context.streams.worker_lost(who * context.config.spec.replica)
        if who < 0 and not context.state.kept:
            why = f"server {-1 - who} on {context.config.peers[context.machine].address}"
            ranks = list(context.config.spec.machines[context.machine])
            failed = messages.RunFailed("ServerLost", f"{why}, which holds a shard of the parameters, died", ranks)
            self._coordinator.send(who, failed)
        context.record.state.gone[who] = left
        context.record.save()
        self._coordinator.end(who, left=left)

    def _expect(self, who: int, pid: int) -> None:
        """Waits until a process connects again, or has ended, or has left the team while there was no relay."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            descriptor = -1
        if descriptor < 0 or (who >= 0 and self._context.flags.has_left(who, pid)):
            self._tell_end(who, pid, left=False)
            return
        self._expected[who] = descriptor
        self._context.poller.watch(descriptor, lambda _: self._tell_end(who, pid, left=False))

    def _stop_expecting(self, who: int) -> None:
        descriptor = self._expected.pop(who, -1)
        if descriptor >= 0:
            self._context.poller.unwatch(descriptor)
            os.close(descriptor)

    def tick(self) -> None:
        """Looks whether processes have left the team that were expected to connect again."""
        for who in list(self._expected):
            pid = self._context.record.state.members[who]
            if who >= 0 and self._context.flags.has_left(who, pid):
                self._tell_end(who, pid, left=True)

    def connect_again(self) -> None:
        """Lets all connect again, as the way to the coordinator was broken: what was on it is repeated."""
        for who in list(self._sessions):
            self.close(who)
        for who, left in self._context.record.state.gone.items():
            self._coordinator.end(who, left=left)

    # -- to workers --------------------------------------------------------------------------------------------------

    def deliver(self, who: int, data: bytes) -> None:
        """Passes on a message of the coordinator."""
        session = self._sessions.get(who)
        if session is None:
            return
        failpoints.hit("relay.answer")
        if who < 0:
            message = _to_shard.decode(data)
            # At the start it gets this machine's memory, in place of the coordinator's.
            self._send(session, message, with_memories=isinstance(message, messages.Ready))
            return
        message = _to_worker.decode(data)
        answers = getattr(message, "attempt", -1) == session.resuming or isinstance(message, messages.RunFailed)
        if session.resuming and not answers:
            return
        session.resuming = 0
        if isinstance(message, messages.Ready | messages.SessionOpened):
            self._context.serve()
        if isinstance(message, messages.CancelStep):
            self._context.flags.cancel(who, message.version, time.perf_counter())
        elif isinstance(message, messages.RunFailed):
            self._send(session, message)
        elif isinstance(message, messages.EndWorker):
            end_connected(session.pid, session.connection)
        else:
            session.answers.append(message)
            self._answer(session)

    def _answer(self, session: LocalSession) -> None:
        """Sends a worker its answers, as far as the versions that they name are here."""
        transfers = self._transfers
        while session.answers and not session.fetching and self._is_current(session):
            message = session.answers[0]
            if not session.fetched and isinstance(message, messages.WithVersion):
                frozen = isinstance(message, messages.Frozen)
                gather = frozen and session.whole and not session.gathered
                if gather or not transfers.holds(message.buffer, message.version):
                    session.gathered = gather
                    fetch = functools.partial(transfers.fetch, message.buffer, message.version, whole=gather)
                    self._fetch(session, fetch)
                    return
                session.buffer = message.buffer
                whole = session.whole or not self._context.config.spec.places
                if (frozen and whole) or isinstance(message, messages.SessionOpened):
                    # It also needs the optimizer's state; a worker that joins, the rest of the model.
                    session.fetched = True
                    self._fetch(session, transfers.fetch_state if frozen else transfers.fetch_rest)
                    continue
            session.answers.popleft()
            session.fetched = session.gathered = False
            # A worker that joins gets this machine's memory.
            self._send(session, message, with_memories=isinstance(message, messages.SessionOpened))

    def _fetch(self, session: LocalSession, fetch: Callable[[Callable[[], None]], None]) -> None:
        """Fetches something before the next answer."""

        def done() -> None:
            session.fetching = False
            self._answer(session)

        session.fetching = True
        fetch(done)

    def _send(self, session: LocalSession, message: msgspec.Struct, *, with_memories: bool = False) -> None:
        memories = self._context.memory.descriptors if with_memories else []
        try:
            session.connection.send(message, memories)
        except Closed:
            self._ended(session)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, who: int, *, final: bool = False) -> None:
        """Closes a connection; final: True if its process does not come again."""
        session = self._sessions.pop(who, None)
        if session is not None:
            self._context.poller.unwatch(session.connection.descriptor)
            session.connection.close()
            self._transfers.restart(who)
        if final:
            self._stop_expecting(who)
            self._context.record.state.members.pop(who, None)
            self._context.record.save()
        elif session is not None:
            self._expect(who, session.pid)

    def fail(self, failure: messages.RunFailed) -> None:
        """Tells all workers why the run has failed, and closes all sessions."""
        self._parts.fail(failure)
        for session in list(self._sessions.values()):
            if session.who >= 0:
                with contextlib.suppress(Closed):
                    session.connection.send(failure)
            self.close(session.who, final=True)
