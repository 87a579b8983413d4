"""The relay of a machine: a process through which everything goes that its workers and servers say to other machines.

Towards its workers it is the server: the same socket, the same messages. At home, where the coordinator is, it sits at
the coordinator's table for every worker. So neither side knows that there is a network in between: the way of a message
is worker, its relay, the home's relay, coordinator, and back. A push goes on only when the gradient is where the
servers need it; an answer only when the version that it names is here. See `transfers` for those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from paceline import events
from paceline.errors import JoinError, TeamError
from paceline.events.forwarding import StreamForwarder
from paceline.parameters.worker_table import SLOT, WorkerTable
from paceline.relay.messages import (
    Chunk,
    EventLines,
    Fetch,
    MemberGone,
    Ping,
    Pong,
    RelayAddress,
    RelayBind,
    RelayBound,
    RelayConfig,
    RelayDone,
    RelayMessage,
    ToCoordinator,
    ToMember,
    TransferDone,
    TransferEnd,
)
from paceline.relay.transfer import HOME, TransferManager
from paceline.server.flags import SharedFlags
from paceline.server.memory import MEMORIES, RunMemory
from paceline.server.messages import (
    BuffersCopied,
    CancelStep,
    EpochOver,
    FromWorker,
    Frozen,
    GradientReady,
    Hello,
    LeaseGranted,
    LeaveTeam,
    MachineLost,
    Proceed,
    PushGradient,
    Ready,
    RunFailed,
    SessionOpened,
    ShardHello,
    StepCancelled,
    Thaw,
    ToShard,
    ToWorker,
    receive_parts,
)
from paceline.transport.keys import Keys
from paceline.transport.unix_connection import Closed, Listener, UnixConnection, connect
from paceline.transport.zmq_links import LINKS, CurveAuth, LinkReceiver, LinkSender, RejectCounter

_BEAT = 0.5
"""Seconds between signs of life."""
_SILENT = 3 * _BEAT
"""Seconds without a sign of life after which a machine is asked whether anybody listens there."""
_KNOCK = 0.02
"""Seconds between looks at whether the coordinator has come."""
_STALLED = 30.0
"""Seconds without a sign that anything arrives, after which a connection is made anew."""
_EXIT_REPORT = 3.0
"""Seconds in which the last words must have arrived."""
_WINDOWS = {"control": 1 << 30, "bulk": 8 << 20}
"""Bytes that may be under way on a link. Of short things, answers bound how many there can be."""
_READS = 64

_encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(RelayMessage)
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_shard = msgspec.msgpack.Decoder(ToShard)


@dataclasses.dataclass(slots=True)
class _LocalConnection:
    """A worker (or below 0, a server) of this machine."""

    who: int
    connection: UnixConnection[Any]
    buffer: int = 0
    """With the version that it has."""
    answers: deque[Any] = dataclasses.field(default_factory=deque)
    """What it is to be told, in order, as soon as what they name is here."""
    fetching: bool = False
    held: list[Any] | None = None
    """What it has said since it wrote parameters and state, until these are where they belong."""
    bye: bool = False
    """Whether it has said exit_report."""
    table: int = -1
    """The state of its hyperparameters that was last passed on."""


class Relay:
    """Of one machine, for one run."""

    def __init__(self, begin: RelayBind, say: Callable[[str], None]) -> None:
        self._me, self._run, self._say = begin.machine, begin.run, say
        self._keys = None if begin.key is None else Keys.of(begin.key, begin.run)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self.refusals = RejectCounter(say)
        self._admission = None if self._keys is None else CurveAuth(self._context, self._keys)
        self._receivers = {link: LinkReceiver(self._context, link, self.refusals, self._take) for link in LINKS}
        # Without a key there is only loopback, whatever was asked for.
        address = "127.0.0.1" if self._keys is None else begin.address
        ports = {link: receiver.bind(address, self._keys) for link, receiver in self._receivers.items()}
        self.bound = RelayBound(ports["control"], ports["bulk"])
        self._near: dict[int, _LocalConnection] = {}
        self._far: dict[int, UnixConnection[Any]] = {}
        """At home, by worker or server, its chair at the coordinator's table."""
        self._early: dict[int, list[tuple[Any, list[int]]]] = {}
        """What they say who have come before the coordinator, with descriptors."""
        self._actions: dict[int, Callable[[], None]] = {}
        """By descriptor, what to do when something has come on it."""
        self._poller = zmq.Poller()
        self._over: set[int] = set()
        """Machines that were given up."""
        self._finished: set[int] = set()
        """Machines from which nothing more comes."""
        self._told: dict[str, int] = {}
        self._came = False
        self._clocks: dict[int, tuple[float, float]] = {}
        """By machine: the shortest time that an answer took, and by how much its clock is ahead of this one's then."""

    def open(self, config: RelayConfig, memory: RunMemory, listener: Listener) -> None:
        """Begin: now it is known who the others are."""
        self._config, self._memory, self._listener = config, memory, listener
        self._where = {rank: machine for machine, ranks in enumerate(config.spec.machines) for rank in ranks}
        self._where |= {-1 - server: machine for server, machine in enumerate(config.spec.servers)}
        others = {machine: peer for machine, peer in enumerate(config.peers) if machine != self._me}
        for receiver in self._receivers.values():
            receiver.open(self._run, list(others))
        self._senders: dict[str, dict[int, LinkSender]] = {
            link: {machine: self._connect(link, peer) for machine, peer in others.items()} for link in LINKS
        }
        self._control = self._senders["control"]
        self._transfers = TransferManager(config, memory, self._control, self._senders["bulk"])
        self._streams = StreamForwarder(config.spec.folder, self._me, config.spec.machines)
        self._words = SharedFlags(memory.flags, config.spec.capacity)
        # Until the coordinator has counted, and a beat has brought its number here.
        self._words.present = sum(map(len, config.spec.machines))
        table = memory.table.bytes(0, memory.table.size)
        self._table = WorkerTable(table, config.spec.capacity, len(config.spec.parameters))
        self._patience = config.spec.timeouts.join
        self._next_beat = 0.0
        for receiver in self._receivers.values():
            self._watch(receiver.socket, receiver.read)
            self._watch(receiver.monitor, receiver.read_monitor)
        for senders in self._senders.values():
            for sender in senders.values():
                self._watch(sender.monitor, sender.read_monitor)
        if self._admission is not None:
            self._watch(self._admission.socket, self._admission.read)
        self._watch(listener.descriptor, self._accept)

    def _connect(self, link: str, peer: RelayAddress) -> LinkSender:
        sender = LinkSender(self._context, link, self._me, self._run, self._keys, _WINDOWS[link])
        sender.connect(peer.address, peer.control if link == "control" else peer.bulk)
        return sender

    def _watch(self, what: Any, action: Callable[[], None]) -> None:
        self._poller.register(what, zmq.POLLIN)
        self._actions[what if isinstance(what, int) else id(what)] = action

    def _unwatch(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        del self._actions[descriptor]

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nobody of this machine is left, and at home nobody at all; in an elastic run, nobody anywhere."""
        until = time.monotonic() + self._patience
        while self._needed(until):
            self._turn(_BEAT)
        if self._me == HOME:
            for machine, sender in self._control.items():
                if machine not in self._over:
                    sender.send(_encode(RelayDone()))
        self._count_refusals()
        self._transfers.recorder.close()
        until = time.monotonic() + _EXIT_REPORT
        self._exit_report(until, lambda: self._streams.complete)
        self._pass_on_streams()
        if self._me != HOME and HOME not in self._over:
            self._control[HOME].send(_encode(RelayDone()))
        self._exit_report(until, self._all_said)
        self._streams.remove()

    def _needed(self, until: float) -> bool:
        """until: when somebody must have come."""
        if self._near or self._far or self._early:
            return True
        if not (self._came and self._config.spec.elastic):
            return not self._came and time.monotonic() < until
        # Somebody may come for those who were lost, as long as there is something to join.
        if self._me != HOME:
            return HOME not in self._over | self._finished
        try:
            connect(self._config.coordinator, ToWorker, 0.0).close()
        except JoinError:
            return False
        return True

    def _exit_report(self, until: float, over: Callable[[], bool]) -> None:
        while time.monotonic() < until and not over():
            self._turn(0.05)
            self._pass_on_streams()

    def _all_said(self) -> bool:
        others = set(self._control) - self._over
        quiet = all(self._control[machine].idle for machine in others)
        return quiet and (self._me != HOME or others <= self._finished)

    def _turn(self, seconds: float) -> None:
        self._transfers.pump()
        for senders in self._senders.values():
            for sender in senders.values():
                self._poller.register(sender.socket, zmq.POLLIN | (zmq.POLLOUT if sender.waiting else 0))
        if self._early:
            self._knock()
            seconds = min(seconds, _KNOCK)
        ready = dict(self._poller.poll(int(seconds * 1e3)))
        for senders in self._senders.values():  # the short things first
            for sender in senders.values():
                if sender.socket in ready:
                    sender.read()
        for what in ready:
            action = self._actions.get(what if isinstance(what, int) else id(what))
            if action is not None:
                action()
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        self._next_beat = now + _BEAT
        for machine, sender in self._control.items():
            if machine not in self._over:
                if sender.idle:
                    sender.send(_encode(Ping(time.perf_counter(), self._words.present)))
                self._look_after(machine, now)
            for link in LINKS:
                self._senders[link][machine].renew(_STALLED)
        self._pass_on_streams()
        self._count_refusals()
        self._transfers.recorder.flush()

    def _count_refusals(self) -> None:
        for receiver in self._receivers.values():
            receiver.count_strangers()
        for why, count in self.refusals.items():
            if count > self._told.get(why, 0):
                now, more = time.perf_counter(), count - self._told.get(why, 0)
                self._transfers.recorder.add(events.Refused(-1, now, self._me, why, more))
                self._told[why] = count

    def _look_after(self, machine: int, now: float) -> None:
        """Whether a machine that this one needs still gives signs of life."""
        needed = machine in self._config.spec.servers or (
            any(self._where[who] == machine for who in self._far) if self._me == HOME else machine == HOME
        )
        heard = [self._control[machine].heard]
        heard += [receiver.heard[machine] for receiver in self._receivers.values()]
        limit = self._config.spec.timeouts.barrier if self._came else self._config.spec.timeouts.join
        silent = now - max(heard)
        if needed and silent > limit:
            self._lose(machine, f"was not heard of for {silent:.1f} s; the timeout is {limit:g} s")
        elif needed and self._came and silent > _SILENT and self._control[machine].deserted():
            self._lose(machine, "is there, but its relay, through which its workers are reached, has died")

    def _lose(self, machine: int, how: str) -> None:
        """A machine can not be reached any more."""
        self._over.add(machine)
        why = f"machine {machine} ({self._config.peers[machine].address}) {how}"
        self._say(why)
        if self._me == HOME:
            for who in [who for who in self._far if self._where[who] == machine]:
                word = MachineLost(why) if who >= 0 else RunFailed("ServerLost", why, [])
                with contextlib.suppress(Closed):
                    self._far[who].send(word)
                self._rise(who)
        if machine == HOME or (machine in self._config.spec.servers and self._me != HOME):
            holds = "decides" if machine == HOME else "holds a shard of the parameters"
            for near in list(self._near.values()):
                if near.who >= 0:
                    with contextlib.suppress(Closed):
                        near.connection.send(
                            RunFailed("ServerLost", f"{why}; it {holds}", list(self._config.spec.machines[machine]))
                        )
                self._part(near)

    # -- those of this machine ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection = self._listener.accept(FromWorker, 0.0)
        if connection is None:
            return
        try:
            hello, descriptors = connection.receive_with_descriptors(MEMORIES)
        except Closed:
            return
        if not isinstance(hello, Hello | ShardHello):
            connection.close()
            return
        who = hello.rank if isinstance(hello, Hello) else -1 - hello.index
        joins = isinstance(hello, Hello) and hello.joins and self._may_join(who)
        if who in self._near or not (joins or self._where.get(who) == self._me):
            connection.close()
            return
        if joins:
            self._where[who] = self._me
            self._transfers.adopt(who)
            self._streams.assign(who, self._me)
        self._near[who] = near = _LocalConnection(who, connection)
        self._came = True
        self._watch(connection.descriptor, lambda: self._hear(near))
        self._tell_coordinator(who, hello, descriptors)

    def _may_join(self, who: int) -> bool:
        """Whether this rank is free, as far as is known here: whoever had it before has gone."""
        return (
            self._config.spec.elastic and 0 <= who < self._config.spec.capacity and who not in self._far | self._early
        )

    def _hear(self, near: _LocalConnection) -> None:
        for _ in range(_READS):
            try:
                message = near.connection.receive()
            except Closed:
                self._left(near)
                return
            self._heard(near, message)
            if near.who not in self._near or not near.connection.ready:
                return

    def _heard(self, near: _LocalConnection, message: Any) -> None:
        who = near.who
        if near.held is not None:
            near.held.append(message)
            return
        match message:
            case GradientReady():
                self._transfers.made(who, message.parameters)
                return
            case PushGradient() if not message.skip:
                self._transfers.push(who, lambda: self._pass_push(near, message))
                return
            case StepCancelled() | PushGradient():
                self._transfers.restart(who)
            case LeaveTeam():
                near.bye = True
            case BuffersCopied():
                self._transfers.show(who, lambda: self._tell_coordinator(who, message))
                return
            case Thaw() if message.reload:
                near.held = []  # the coordinator stands still until it hears this, and must hear nothing before it
                self._transfers.load(who, near.buffer, lambda: self._loaded(near, message))
                return
        self._tell_coordinator(who, message)

    def _loaded(self, near: _LocalConnection, message: Thaw) -> None:
        self._tell_coordinator(near.who, message)
        held, near.held = near.held or [], None
        for later in held:
            self._heard(near, later)

    def _pass_push(self, near: _LocalConnection, message: PushGradient) -> None:
        table = used = None
        if message.hyperparameters != near.table:
            slot = self._table.slots[near.who]
            table = bytes(slot[: 8 + int.from_bytes(slot[:8], "little")])
            near.table = message.hyperparameters
        if not message.complete:
            used = bytes(self._table.used[near.who])
        self._tell_coordinator(near.who, message, table=table, used=used)

    def _left(self, near: _LocalConnection) -> None:
        """One of this machine has gone."""
        if not near.bye:
            self._streams.worker_lost(near.who)
        self._part(near)
        if self._me == HOME:
            self._rise(near.who)
        else:
            self._control[HOME].send(_encode(MemberGone(near.who)))

    def _part(self, near: _LocalConnection) -> None:
        if self._near.pop(near.who, None) is not None:
            self._unwatch(near.connection.descriptor)
            near.connection.close()
            self._transfers.forget(near.who)

    def _receive(self, who: int, data: bytes) -> None:
        """The coordinator tells this to one of this machine."""
        near = self._near.get(who)
        if near is None:
            return
        if who < 0:
            message = _to_shard.decode(data)
            # At the start it gets this machine's memory, in place of the coordinator's.
            descriptors = self._memory.descriptors if isinstance(message, Ready) else []
            self._try(near, lambda: near.connection.send(message, descriptors))
            return
        message = _to_worker.decode(data)
        if isinstance(message, CancelStep):
            self._words.floors.stamp(who, time.perf_counter())
            self._words.floors.write(who, message.version & 0xFFFFFFFF)
        elif isinstance(message, RunFailed):
            self._try(near, lambda: near.connection.send(message))
        else:
            near.answers.append(message)
            self._answer(near)

    def _answer(self, near: _LocalConnection) -> None:
        """Tell a worker what it is to be told, as far as the versions are here that it then goes on with."""
        while near.answers and not near.fetching and near.who in self._near:
            message = near.answers[0]
            if isinstance(message, Proceed | LeaseGranted | EpochOver | Frozen | SessionOpened):
                if not self._transfers.holds(message.buffer, message.version):
                    fetch = functools.partial(self._transfers.fetch, message.buffer, message.version)
                    self._fetch(near, functools.partial(fetch, lambda: self._on(near)))
                    return
                near.buffer = message.buffer
                if isinstance(message, Frozen | SessionOpened):
                    # For this one the state must be here, too; for one who joins, the rest of the model.
                    near.answers[0] = _Whole(message)
                    more = self._transfers.fetch_state if isinstance(message, Frozen) else self._transfers.fetch_rest
                    self._fetch(near, lambda more=more: more(lambda: self._on(near)))  # type: ignore[misc]
                    continue
            near.answers.popleft()
            plain = message.message if isinstance(message, _Whole) else message
            # One who joins gets this machine's memory.
            with_it = self._memory.descriptors if isinstance(plain, SessionOpened) else []
            self._try(near, lambda m=plain, d=with_it: near.connection.send(m, d))  # type: ignore[misc]

    def _fetch(self, near: _LocalConnection, begin: Callable[[], None]) -> None:
        near.fetching = True
        begin()

    def _on(self, near: _LocalConnection) -> None:
        near.fetching = False
        self._answer(near)

    def _try(self, near: _LocalConnection, action: Callable[[], None]) -> None:
        try:
            action()
        except Closed:
            self._left(near)

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _tell_coordinator(
        self,
        who: int,
        message: msgspec.Struct,
        descriptors: list[int] | None = None,
        *,
        table: bytes | None = None,
        used: bytes | None = None,
    ) -> None:
        if self._me == HOME:
            self._sit(who, message, descriptors or [])
        else:
            self._control[HOME].send(_encode(ToCoordinator(who, _encode(message), table, used)))

    def _sit(self, who: int, message: Any, descriptors: list[int]) -> None:
        """At home: say this at the coordinator's table, in the chair of whoever says it."""
        if isinstance(message, Hello | ShardHello):
            if who in self._far or who in self._early:
                raise ValueError("a worker that has come before")
            self._early[who] = []
            self._came = True
        if who in self._early:
            self._early[who].append((message, descriptors))
            self._knock()
            return
        self._speak(who, message, descriptors)

    def _speak(self, who: int, message: Any, descriptors: list[int]) -> None:
        connection = self._far.get(who)
        if connection is None:
            return
        try:
            connection.send(message, descriptors)
        except Closed:
            self._risen(who)
        if isinstance(message, LeaveTeam):
            self._rise(who)

    def _knock(self) -> None:
        """Whether the coordinator is there by now, for those who have come before it."""
        for who in list(self._early):
            try:
                connection = connect(self._config.coordinator, ToWorker if who >= 0 else ToShard, 0.0)
            except JoinError:
                return
            self._far[who] = connection
            self._watch(connection.descriptor, lambda who=who: self._told_by_coordinator(who))  # type: ignore[misc]
            for message, descriptors in self._early.pop(who):
                self._speak(who, message, descriptors)

    def _rise(self, who: int) -> None:
        self._early.pop(who, None)
        connection = self._far.pop(who, None)
        if connection is not None:
            self._unwatch(connection.descriptor)
            connection.close()

    def _risen(self, who: int) -> None:
        """The coordinator has closed this chair."""
        self._rise(who)
        machine = self._where[who]
        if machine != self._me:
            self._control[machine].send(_encode(MemberGone(who)))
        elif who in self._near:
            self._part(self._near[who])

    def _told_by_coordinator(self, who: int) -> None:
        connection = self._far[who]
        try:
            message = connection.receive()
        except Closed:
            self._risen(who)
            return
        machine, data = self._where[who], _encode(message)
        if machine == self._me:
            self._receive(who, data)
        else:
            self._control[machine].send(_encode(ToMember(who, data)))

    # -- other relays -----------------------------------------------------------------------------------------------

    def _take(self, machine: int, text: bytes, payload: Any) -> None:
        """What another relay says; ValueError if it is not to be taken."""
        message = _message.decode(text)
        match message:
            case Chunk():
                self._transfers.take_chunk(machine, message, payload)
            case TransferEnd():
                self._transfers.take_end(machine, message)
            case Fetch():
                self._transfers.take_want(machine, message)
            case TransferDone():
                self._transfers.take_have(machine, message)
            case ToCoordinator():
                self._take_say(machine, message)
            case ToMember():
                if machine != HOME:
                    raise ValueError("an order that is not the coordinator's")
                self._receive(message.who, message.data)
            case MemberGone():
                self._take_gone(machine, message.who)
            case Ping() | Pong():
                self._take_beat(machine, message)
            case RelayDone():
                self._finished.add(machine)
            case EventLines():
                self._streams.append(machine, message.name, message.text)

    def _take_beat(self, machine: int, message: Ping | Pong) -> None:
        now = time.perf_counter()
        if isinstance(message, Ping):
            if machine == HOME:
                self._words.present = message.present
            self._control[machine].send(_encode(Pong(message.sent, now)))
            return
        best = self._clocks.get(machine, (float("inf"), 0.0))
        # A little doubt each time, so that a drift is followed.
        taken = (now - message.sent, message.at - (now + message.sent) / 2)
        self._clocks[machine] = min((best[0] * 1.01, best[1]), taken)

    def _take_say(self, machine: int, envelope: ToCoordinator) -> None:
        if self._me != HOME:
            raise ValueError("words for another machine")
        message = _from_worker.decode(envelope.data)
        if isinstance(message, Hello) and message.joins and self._may_join(envelope.who):
            self._where[envelope.who] = machine
            self._streams.assign(envelope.who, machine)
        if self._where.get(envelope.who) != machine:
            raise ValueError("words of another machine's worker")
        if envelope.who >= 0:
            if envelope.table is not None:
                if len(envelope.table) > SLOT:
                    raise ValueError("hyperparameters that are too long")
                self._table.slots[envelope.who][: len(envelope.table)] = envelope.table
            if envelope.used is not None:
                if len(envelope.used) != len(self._config.spec.parameters):
                    raise ValueError("flags of other parameters")
                self._table.used[envelope.who][:] = envelope.used
        if isinstance(message, Hello):
            message = msgspec.structs.replace(message, spec=False, host=self._config.peers[machine].address)
        self._sit(envelope.who, message, [])

    def _take_gone(self, machine: int, who: int) -> None:
        if machine == HOME:
            if who in self._near:
                self._part(self._near[who])
        elif self._me == HOME and self._where.get(who) == machine:
            self._rise(who)
        else:
            raise ValueError("the end of another machine's worker")

    # -- events ------------------------------------------------------------------------------------------------------

    def _pass_on_streams(self) -> None:
        """What this machine's processes have recorded, to the run's folder at home; times are home's there."""
        if HOME not in self._clocks or HOME in self._over:
            return  # at home, or home's clock is not known yet
        for name, text in self._streams.new_lines(self._clocks[HOME][1]):
            self._control[HOME].send(_encode(EventLines(name, text)))

    def close(self) -> None:
        for senders in self._senders.values():
            for sender in senders.values():
                sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """An answer for which everything is on its way."""

    message: Frozen | SessionOpened


def run_relay(address: str, patience: float, say: Callable[[str], None]) -> None:
    """Be the relay of this machine until the run is over."""
    listener = Listener(address)
    until = time.monotonic() + patience
    lead = listener.accept(RelayBind, patience)
    if lead is None:
        raise JoinError(f"nobody came to the relay within {patience:g} s")
    begin, descriptors = lead.receive_with_descriptors(MEMORIES)
    relay = Relay(begin, lambda text: say(f"machine {begin.machine}: {text}"))
    lead.send(relay.bound)
    parts: UnixConnection[Any] = lead.of(FromWorker)
    text = receive_parts(parts, max(0.0, until - time.monotonic()))
    if text is None:
        raise JoinError(f"the first worker of machine {begin.machine} did not say who the others are")
    config = msgspec.msgpack.decode(text, type=RelayConfig)
    relay.open(config, RunMemory.inherited(descriptors), listener)
    lead.send(Ready())
    with contextlib.suppress(TeamError):
        lead.close()
    try:
        relay.run()
    finally:
        relay.close()
