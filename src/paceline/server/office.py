"""The office of a machine: a process through which everything goes that its workers and servers say to other machines.

Towards its workers it is the server: the same socket, the same messages. At home, where the coordinator is, it sits at
the coordinator's table for every worker. So neither side knows that there is a network in between: the way of a message
is worker, its office, the home's office, coordinator, and back. A push goes on only when the gradient is where the
servers need it; an answer only when the version that it names is here. See `haul` for those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from paceline import events
from paceline.errors import JoinError, TeamError
from paceline.server.haul import HOME, Haul
from paceline.server.letters import (
    Beat,
    Beaten,
    Begin,
    Bound,
    Charter,
    Chunk,
    End,
    Finished,
    Gone,
    Have,
    Letter,
    Lines,
    Peer,
    Say,
    Tell,
    Want,
)
from paceline.server.messages import (
    MEMORIES,
    Bye,
    Cancel,
    Cancelled,
    Copied,
    Failed,
    FromWorker,
    Frozen,
    Go,
    Hello,
    Leased,
    Made,
    Over,
    Push,
    Ready,
    Seated,
    ShardHello,
    Thaw,
    ToShard,
    ToWorker,
    Unreachable,
    receive_parts,
)
from paceline.server.streams import Streams
from paceline.server.words import SharedWords
from paceline.transport import Memory
from paceline.transport.keys import Keys
from paceline.transport.links import LINKS, Doorkeeper, Receiver, Refusals, Sender
from paceline.transport.wire import Closed, Listener, Wire, connect

_BEAT = 0.5
"""Seconds between signs of life."""
_SILENT = 3 * _BEAT
"""Seconds without a sign of life after which a machine is asked whether anybody listens there."""
_KNOCK = 0.02
"""Seconds between looks at whether the coordinator has come."""
_STALLED = 30.0
"""Seconds without a sign that anything arrives, after which a connection is made anew."""
_FAREWELL = 3.0
"""Seconds in which the last words must have arrived."""
_WINDOWS = {"control": 1 << 30, "bulk": 8 << 20}
"""Bytes that may be under way on a link. Of short things, answers bound how many there can be."""
_READS = 64

_encode = msgspec.msgpack.Encoder().encode
_letter = msgspec.msgpack.Decoder(Letter)
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_shard = msgspec.msgpack.Decoder(ToShard)


@dataclasses.dataclass(slots=True)
class _Near:
    """A worker (or below 0, a server) of this machine."""

    who: int
    wire: Wire[Any]
    buffer: int = 0
    """With the version that it has."""
    answers: deque[Any] = dataclasses.field(default_factory=deque)
    """What it is to be told, in order, as soon as what they name is here."""
    fetching: bool = False
    held: list[Any] | None = None
    """What it has said since it wrote parameters and state, until these are where they belong."""
    bye: bool = False
    """Whether it has said farewell."""
    table: int = -1
    """The state of its hyperparameters that was last passed on."""


class Office:
    """Of one machine, for one run."""

    def __init__(self, begin: Begin, say: Callable[[str], None]) -> None:
        self._me, self._run, self._say = begin.machine, begin.run, say
        self._keys = None if begin.key is None else Keys.of(begin.key, begin.run)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self.refusals = Refusals(say)
        self._door = None if self._keys is None else Doorkeeper(self._context, self._keys)
        self._receivers = {link: Receiver(self._context, link, self.refusals, self._take) for link in LINKS}
        # Without a key there is only loopback, whatever was asked for.
        address = "127.0.0.1" if self._keys is None else begin.address
        ports = {link: receiver.bind(address, self._keys) for link, receiver in self._receivers.items()}
        self.bound = Bound(ports["control"], ports["bulk"])
        self._near: dict[int, _Near] = {}
        self._far: dict[int, Wire[Any]] = {}
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

    def open(self, charter: Charter, memories: list[Memory], listener: Listener) -> None:
        """Begin: now it is known who the others are."""
        self._charter, self._memories, self._listener = charter, memories, listener
        self._where = {rank: machine for machine, ranks in enumerate(charter.ranks) for rank in ranks}
        self._where |= {-1 - server: machine for server, machine in enumerate(charter.servers)}
        others = {machine: peer for machine, peer in enumerate(charter.peers) if machine != self._me}
        for receiver in self._receivers.values():
            receiver.open(self._run, list(others))
        self._senders: dict[str, dict[int, Sender]] = {
            link: {machine: self._connect(link, peer) for machine, peer in others.items()} for link in LINKS
        }
        self._control = self._senders["control"]
        self._haul = Haul(charter, memories, self._control, self._senders["bulk"])
        self._streams = Streams(charter, self._me == HOME)
        self._words = SharedWords(memories[3], charter.room)
        # Until the coordinator has counted, and a beat has brought its number here.
        self._words.present = sum(map(len, charter.ranks))
        table = memories[2]
        self._slots = [table.bytes(rank * charter.table, charter.table) for rank in range(charter.room)]
        after = charter.room * charter.table
        self._used = [table.bytes(after + rank * charter.flags, charter.flags) for rank in range(charter.room)]
        self._patience = charter.timeouts.join
        self._next_beat = 0.0
        for receiver in self._receivers.values():
            self._watch(receiver.socket, receiver.read)
            self._watch(receiver.monitor, receiver.read_monitor)
        for senders in self._senders.values():
            for sender in senders.values():
                self._watch(sender.monitor, sender.read_monitor)
        if self._door is not None:
            self._watch(self._door.socket, self._door.read)
        self._watch(listener.descriptor, self._accept)

    def _connect(self, link: str, peer: Peer) -> Sender:
        sender = Sender(self._context, link, self._me, self._run, self._keys, _WINDOWS[link])
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
                    sender.send(_encode(Finished()))
        self._count_refusals()
        self._haul.recorder.close()
        until = time.monotonic() + _FAREWELL
        self._farewell(until, lambda: self._streams.complete)
        self._pass_on_streams()
        if self._me != HOME and HOME not in self._over:
            self._control[HOME].send(_encode(Finished()))
        self._farewell(until, self._all_said)
        self._streams.remove()

    def _needed(self, until: float) -> bool:
        """until: when somebody must have come."""
        if self._near or self._far or self._early:
            return True
        if not (self._came and self._charter.elastic):
            return not self._came and time.monotonic() < until
        # Somebody may come for those who were lost, as long as there is something to join.
        if self._me != HOME:
            return HOME not in self._over | self._finished
        try:
            connect(self._charter.coordinator, ToWorker, 0.0).close()
        except JoinError:
            return False
        return True

    def _farewell(self, until: float, over: Callable[[], bool]) -> None:
        while time.monotonic() < until and not over():
            self._turn(0.05)
            self._pass_on_streams()

    def _all_said(self) -> bool:
        others = set(self._control) - self._over
        quiet = all(self._control[machine].idle for machine in others)
        return quiet and (self._me != HOME or others <= self._finished)

    def _turn(self, seconds: float) -> None:
        self._haul.pump()
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
                    sender.send(_encode(Beat(time.perf_counter(), self._words.present)))
                self._look_after(machine, now)
            for link in LINKS:
                self._senders[link][machine].renew(_STALLED)
        self._pass_on_streams()
        self._count_refusals()
        self._haul.recorder.flush()

    def _count_refusals(self) -> None:
        for receiver in self._receivers.values():
            receiver.count_strangers()
        for why, count in self.refusals.items():
            if count > self._told.get(why, 0):
                now, more = time.perf_counter(), count - self._told.get(why, 0)
                self._haul.recorder.add(events.Refused(-1, now, self._me, why, more))
                self._told[why] = count

    def _look_after(self, machine: int, now: float) -> None:
        """Whether a machine that this one needs still gives signs of life."""
        needed = machine in self._charter.servers or (
            any(self._where[who] == machine for who in self._far) if self._me == HOME else machine == HOME
        )
        heard = [self._control[machine].heard]
        heard += [receiver.heard[machine] for receiver in self._receivers.values()]
        limit = self._charter.timeouts.meeting if self._came else self._charter.timeouts.join
        silent = now - max(heard)
        if needed and silent > limit:
            self._lose(machine, f"was not heard of for {silent:.1f} s; the timeout is {limit:g} s")
        elif needed and self._came and silent > _SILENT and self._control[machine].deserted():
            self._lose(machine, "is there, but its office, through which its workers are reached, has died")

    def _lose(self, machine: int, how: str) -> None:
        """A machine can not be reached any more."""
        self._over.add(machine)
        why = f"machine {machine} ({self._charter.peers[machine].address}) {how}"
        self._say(why)
        if self._me == HOME:
            for who in [who for who in self._far if self._where[who] == machine]:
                word = Unreachable(why) if who >= 0 else Failed("ServerLost", why, [])
                with contextlib.suppress(Closed):
                    self._far[who].send(word)
                self._rise(who)
        if machine == HOME or (machine in self._charter.servers and self._me != HOME):
            holds = "decides" if machine == HOME else "holds a shard of the parameters"
            for near in list(self._near.values()):
                if near.who >= 0:
                    with contextlib.suppress(Closed):
                        near.wire.send(Failed("ServerLost", f"{why}; it {holds}", self._charter.ranks[machine]))
                self._part(near)

    # -- those of this machine ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        wire = self._listener.accept(FromWorker, 0.0)
        if wire is None:
            return
        try:
            hello, descriptors = wire.receive_with_descriptors(MEMORIES)
        except Closed:
            return
        if not isinstance(hello, Hello | ShardHello):
            wire.close()
            return
        who = hello.rank if isinstance(hello, Hello) else -1 - hello.index
        joins = isinstance(hello, Hello) and hello.joins and self._may_join(who)
        if who in self._near or not (joins or self._where.get(who) == self._me):
            wire.close()
            return
        if joins:
            self._where[who] = self._me
            self._haul.adopt(who)
            self._streams.move(who, self._me)
        self._near[who] = near = _Near(who, wire)
        self._came = True
        self._watch(wire.descriptor, lambda: self._hear(near))
        self._tell_coordinator(who, hello, descriptors)

    def _may_join(self, who: int) -> bool:
        """Whether this rank is free, as far as is known here: whoever had it before has gone."""
        return self._charter.elastic and 0 <= who < self._charter.room and who not in self._far | self._early

    def _hear(self, near: _Near) -> None:
        for _ in range(_READS):
            try:
                message = near.wire.receive()
            except Closed:
                self._left(near)
                return
            self._heard(near, message)
            if near.who not in self._near or not near.wire.ready:
                return

    def _heard(self, near: _Near, message: Any) -> None:
        who = near.who
        if near.held is not None:
            near.held.append(message)
            return
        match message:
            case Made():
                self._haul.made(who, message.parameters)
                return
            case Push() if not message.skip:
                self._haul.push(who, lambda: self._pass_push(near, message))
                return
            case Cancelled() | Push():
                self._haul.restart(who)
            case Bye():
                near.bye = True
            case Copied():
                self._haul.show(who, lambda: self._tell_coordinator(who, message))
                return
            case Thaw() if message.reload:
                near.held = []  # the coordinator stands still until it hears this, and must hear nothing before it
                self._haul.load(who, near.buffer, lambda: self._loaded(near, message))
                return
        self._tell_coordinator(who, message)

    def _loaded(self, near: _Near, message: Thaw) -> None:
        self._tell_coordinator(near.who, message)
        held, near.held = near.held or [], None
        for later in held:
            self._heard(near, later)

    def _pass_push(self, near: _Near, message: Push) -> None:
        table = used = None
        if message.hyperparameters != near.table:
            slot = self._slots[near.who]
            table = bytes(slot[: 8 + int.from_bytes(slot[:8], "little")])
            near.table = message.hyperparameters
        if not message.complete:
            used = bytes(self._used[near.who])
        self._tell_coordinator(near.who, message, table=table, used=used)

    def _left(self, near: _Near) -> None:
        """One of this machine has gone."""
        if not near.bye:
            self._streams.lost(near.who)
        self._part(near)
        if self._me == HOME:
            self._rise(near.who)
        else:
            self._control[HOME].send(_encode(Gone(near.who)))

    def _part(self, near: _Near) -> None:
        if self._near.pop(near.who, None) is not None:
            self._unwatch(near.wire.descriptor)
            near.wire.close()
            self._haul.forget(near.who)

    def _receive(self, who: int, data: bytes) -> None:
        """The coordinator tells this to one of this machine."""
        near = self._near.get(who)
        if near is None:
            return
        if who < 0:
            message = _to_shard.decode(data)
            # At the start it gets this machine's memory, in place of the coordinator's.
            memories = [memory.descriptor for memory in self._memories] if isinstance(message, Ready) else []
            self._try(near, lambda: near.wire.send(message, memories))
            return
        message = _to_worker.decode(data)
        if isinstance(message, Cancel):
            self._words.floors.stamp(who, time.perf_counter())
            self._words.floors.write(who, message.version & 0xFFFFFFFF)
        elif isinstance(message, Failed):
            self._try(near, lambda: near.wire.send(message))
        else:
            near.answers.append(message)
            self._answer(near)

    def _answer(self, near: _Near) -> None:
        """Tell a worker what it is to be told, as far as the versions are here that it then goes on with."""
        while near.answers and not near.fetching and near.who in self._near:
            message = near.answers[0]
            if isinstance(message, Go | Leased | Over | Frozen | Seated):
                if not self._haul.holds(message.buffer, message.version):
                    self._fetch(near, lambda m=message: self._haul.fetch(m.buffer, m.version, lambda: self._on(near)))  # type: ignore[misc]
                    return
                near.buffer = message.buffer
                if isinstance(message, Frozen | Seated):
                    # For this one the state must be here, too; for one who joins, the rest of the model.
                    near.answers[0] = _Whole(message)
                    more = self._haul.fetch_state if isinstance(message, Frozen) else self._haul.fetch_rest
                    self._fetch(near, lambda more=more: more(lambda: self._on(near)))  # type: ignore[misc]
                    continue
            near.answers.popleft()
            plain = message.message if isinstance(message, _Whole) else message
            # One who joins gets this machine's memory.
            with_it = [memory.descriptor for memory in self._memories] if isinstance(plain, Seated) else []
            self._try(near, lambda m=plain, d=with_it: near.wire.send(m, d))  # type: ignore[misc]

    def _fetch(self, near: _Near, begin: Callable[[], None]) -> None:
        near.fetching = True
        begin()

    def _on(self, near: _Near) -> None:
        near.fetching = False
        self._answer(near)

    def _try(self, near: _Near, action: Callable[[], None]) -> None:
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
            self._control[HOME].send(_encode(Say(who, _encode(message), table, used)))

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
        wire = self._far.get(who)
        if wire is None:
            return
        try:
            wire.send(message, descriptors)
        except Closed:
            self._risen(who)
        if isinstance(message, Bye):
            self._rise(who)

    def _knock(self) -> None:
        """Whether the coordinator is there by now, for those who have come before it."""
        for who in list(self._early):
            try:
                wire = connect(self._charter.coordinator, ToWorker if who >= 0 else ToShard, 0.0)
            except JoinError:
                return
            self._far[who] = wire
            self._watch(wire.descriptor, lambda who=who: self._told_by_coordinator(who))  # type: ignore[misc]
            for message, descriptors in self._early.pop(who):
                self._speak(who, message, descriptors)

    def _rise(self, who: int) -> None:
        self._early.pop(who, None)
        wire = self._far.pop(who, None)
        if wire is not None:
            self._unwatch(wire.descriptor)
            wire.close()

    def _risen(self, who: int) -> None:
        """The coordinator has closed this chair."""
        self._rise(who)
        machine = self._where[who]
        if machine != self._me:
            self._control[machine].send(_encode(Gone(who)))
        elif who in self._near:
            self._part(self._near[who])

    def _told_by_coordinator(self, who: int) -> None:
        wire = self._far[who]
        try:
            message = wire.receive()
        except Closed:
            self._risen(who)
            return
        machine, data = self._where[who], _encode(message)
        if machine == self._me:
            self._receive(who, data)
        else:
            self._control[machine].send(_encode(Tell(who, data)))

    # -- other offices -----------------------------------------------------------------------------------------------

    def _take(self, machine: int, text: bytes, payload: Any) -> None:
        """What another office says; ValueError if it is not to be taken."""
        letter = _letter.decode(text)
        match letter:
            case Chunk():
                self._haul.take_chunk(machine, letter, payload)
            case End():
                self._haul.take_end(machine, letter)
            case Want():
                self._haul.take_want(machine, letter)
            case Have():
                self._haul.take_have(machine, letter)
            case Say():
                self._take_say(machine, letter)
            case Tell():
                if machine != HOME:
                    raise ValueError("an order that is not the coordinator's")
                self._receive(letter.who, letter.data)
            case Gone():
                self._take_gone(machine, letter.who)
            case Beat() | Beaten():
                self._take_beat(machine, letter)
            case Finished():
                self._finished.add(machine)
            case Lines():
                self._streams.take(machine, letter.name, letter.text)

    def _take_beat(self, machine: int, letter: Beat | Beaten) -> None:
        now = time.perf_counter()
        if isinstance(letter, Beat):
            if machine == HOME:
                self._words.present = letter.present
            self._control[machine].send(_encode(Beaten(letter.sent, now)))
            return
        best = self._clocks.get(machine, (float("inf"), 0.0))
        # A little doubt each time, so that a drift is followed.
        taken = (now - letter.sent, letter.at - (now + letter.sent) / 2)
        self._clocks[machine] = min((best[0] * 1.01, best[1]), taken)

    def _take_say(self, machine: int, letter: Say) -> None:
        if self._me != HOME:
            raise ValueError("words for another machine")
        message = _from_worker.decode(letter.data)
        if isinstance(message, Hello) and message.joins and self._may_join(letter.who):
            self._where[letter.who] = machine
            self._streams.move(letter.who, machine)
        if self._where.get(letter.who) != machine:
            raise ValueError("words of another machine's worker")
        if letter.who >= 0:
            if letter.table is not None:
                if len(letter.table) > self._charter.table:
                    raise ValueError("hyperparameters that are too long")
                self._slots[letter.who][: len(letter.table)] = letter.table
            if letter.used is not None:
                if len(letter.used) != self._charter.flags:
                    raise ValueError("flags of other parameters")
                self._used[letter.who][:] = letter.used
        if isinstance(message, Hello):
            message = msgspec.structs.replace(message, plan=0, host=self._charter.peers[machine].address)
        self._sit(letter.who, message, [])

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
        for name, text in self._streams.more(self._clocks[HOME][1]):
            self._control[HOME].send(_encode(Lines(name, text)))

    def close(self) -> None:
        for senders in self._senders.values():
            for sender in senders.values():
                sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        if self._door is not None:
            self._door.close()
        self._context.destroy(0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """An answer for which everything is on its way."""

    message: Frozen | Seated


def keep_office(address: str, patience: float, say: Callable[[str], None]) -> None:
    """Be the office of this machine until the run is over."""
    listener = Listener(address)
    until = time.monotonic() + patience
    lead = listener.accept(Begin, patience)
    if lead is None:
        raise JoinError(f"nobody came to the office within {patience:g} s")
    begin, descriptors = lead.receive_with_descriptors(MEMORIES)
    office = Office(begin, lambda text: say(f"machine {begin.machine}: {text}"))
    lead.send(office.bound)
    parts: Wire[Any] = lead.of(FromWorker)
    text = receive_parts(parts, max(0.0, until - time.monotonic()))
    if text is None:
        raise JoinError(f"the first worker of machine {begin.machine} did not say who the others are")
    charter = msgspec.msgpack.decode(text, type=Charter)
    office.open(charter, [Memory.inherited(descriptor) for descriptor in descriptors], listener)
    lead.send(Ready())
    with contextlib.suppress(TeamError):
        lead.close()
    try:
        office.run()
    finally:
        office.close()
