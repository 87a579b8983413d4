"""The relay of a machine: the process through which its workers and servers exchange messages with other machines.

To its workers it is the server: the same socket, the same messages (`local_sessions`). On the coordinator's machine it
holds one connection to the coordinator per worker (`coordinator_sessions`). So neither side knows of a network in
between. A message goes

1. from the worker to its relay,
2. over the control link to the relay of the coordinator's machine,
3. to the coordinator; and the answer back the same way.

Gradients and versions go beside that, over the bulk links, into the memory of the machines that need them (`transfer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import events
from paceline.cluster.run_state import RunState
from paceline.events.forwarding import FIRST_MACHINE, StreamForwarder
from paceline.parameters.worker_table import WorkerTable
from paceline.relay import messages
from paceline.relay.context import RelayContext
from paceline.relay.coordinator_sessions import CoordinatorSessions
from paceline.relay.door import Door
from paceline.relay.joining_machines import JoiningMachines
from paceline.relay.local_sessions import LocalSessions
from paceline.relay.record import RelayRecord
from paceline.relay.sockets import RelaySockets
from paceline.relay.transfer import TransferManager
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.server.messages import MachineLost, RunFailed
from paceline.transport.keys import Secret
from paceline.transport.links import LINKS, LinkReceiver, LinkSender, RejectCounter
from paceline.transport.poller import Poller

_PING_INTERVAL = 0.5
"""Seconds between signs of life."""
_FIRST_PINGS, _FIRST_INTERVAL = 10, 0.02
"""How many signs of life follow each other quickly, to compare clocks, and the seconds between them."""
_SILENT = 3 * _PING_INTERVAL
"""Seconds of silence after which a machine is lost if its relay's port is closed."""
_RETRY = 0.02
"""Seconds between attempts to connect to a coordinator that has not started yet."""
_STALLED = 30.0
"""Seconds without an acknowledgement after which a link is connected again."""
_FLUSH = 3.0
"""Seconds at the end of a run in which the last messages and events must have arrived."""
_WINDOWS = {"control": 1 << 30, "bulk": 8 << 20}
"""Bytes that may be under way on a link. Short messages are bounded by their answers."""

_encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(messages.RelayMessage)


class PeerLiveness:
    """Signs of life between relays: which machines are silent, and how far their clocks are apart."""

    def __init__(self, context: RelayContext, receivers: dict[str, LinkReceiver]) -> None:
        self._context, self._receivers = context, receivers
        self._clocks: dict[int, tuple[float, float]] = {}
        """By machine: seconds of the quickest round trip, and by how many its clock was ahead of this one's then."""

    def lost(self, machine: int) -> str:
        """Why a machine that is needed must be given up; empty if it need not."""
        context, sender = self._context, self._context.control[machine]
        heard = [sender.heard, *(receiver.heard[machine] for receiver in self._receivers.values())]
        silent = time.monotonic() - max(heard)
        timeouts = context.config.spec.timeouts
        limit = timeouts.barrier if context.came else timeouts.join
        if silent > limit:
            return f"was not heard of for {silent:.1f} s; the timeout is {limit:g} s"
        if context.came and silent > _SILENT and sender.refused:
            return "is there, but its relay, through which its workers are reached, has died"
        return ""

    def clock_ahead(self, machine: int) -> float | None:
        """By how many seconds a machine's clock is ahead of this one's; None if that is not known."""
        return self._clocks[machine][1] if machine in self._clocks else None

    def take_ping(self, machine: int, ping: messages.Ping) -> None:
        if machine == FIRST_MACHINE:
            self._context.flags.present = ping.present
        self._context.control[machine].send(_encode(messages.Pong(ping.sent, time.perf_counter())))

    def take_pong(self, machine: int, pong: messages.Pong) -> None:
        now = time.perf_counter()
        best = self._clocks.get(machine, (float("inf"), 0.0))
        taken = (now - pong.sent, pong.at - (now + pong.sent) / 2)
        # The best one ages a little each time, so that drift is followed.
        self._clocks[machine] = min((best[0] * 1.01, best[1]), taken)


class Relay:
    """The relay of one machine, for one run."""

    def __init__(self, bind: messages.RelayBind, sockets: RelaySockets, say: Callable[[str], None], life: int) -> None:
        """sockets: which outlive it; life: how often it was started again."""
        self._machine, self._run, self._say = bind.machine, bind.run, say
        self._sockets, self._life = sockets, life
        self._secret = Secret.of(bind.key, bind.run)
        self._poller = Poller()
        self.refusals = RejectCounter(say)
        self._reported: dict[str, int] = {}
        """By reason, the refusals that are recorded."""
        self._receivers = {
            link: LinkReceiver(self._poller, link, self.refusals, self._dispatch, life) for link in LINKS
        }
        for link, receiver in self._receivers.items():
            receiver.bind("", self._secret, sockets.links[link])
            receiver.reborn = self._meet_again
        self._door: Door | None = None
        if sockets.door is not None:
            self._door = Door(self._poller, sockets.door, bind.key, self._refuse_joiner)
        self._lives: dict[int, int] = {}
        """By machine, how often its relay was started again."""
        self._lost: set[int] = set()
        """Machines that were given up."""
        self._finished: set[int] = set()
        """Machines that have sent their last message."""

    def open(self, config: messages.RelayConfig, memory: RunMemory, record: RelayRecord) -> None:
        """Connects to the other relays, and begins to take messages."""
        for machine, peer in record.state.joined.items():
            config.peers[machine] = peer
        self._config, self._spec, self._record = config, config.spec, record
        self._finished.update(record.state.finished)
        spec = config.spec
        others = {
            machine: peer for machine, peer in enumerate(config.peers) if machine != self._machine and peer.address
        }
        for receiver in self._receivers.values():
            receiver.open(self._run, {machine: peer.address for machine, peer in others.items()})
        self._senders: dict[str, dict[int, LinkSender]] = {
            link: {machine: self._connect(link, machine, peer) for machine, peer in others.items()} for link in LINKS
        }
        self._control = self._senders["control"]
        self._transfers = TransferManager(config, memory, self._control, self._senders["bulk"], self._life)
        self._streams = StreamForwarder(spec.folder, self._machine, spec.processes)
        flags = SharedFlags(memory.flags, spec.capacity)
        # Until the coordinator has counted, and a ping has brought its number here.
        flags.present = sum(map(len, spec.machines))
        table = memory.table.bytes(0, memory.table.size)
        machine_of = {rank: machine for machine, ranks in enumerate(spec.machines) for rank in ranks}
        machine_of |= {-1 - server: machine for server, machine in enumerate(spec.servers)}
        self._context = context = RelayContext(
            config,
            memory,
            self._poller,
            self._control,
            self._transfers,
            self._streams,
            flags,
            machine_of,
            WorkerTable(table, spec.capacity, len(spec.parameters)),
            record,
            RunState(memory.record),
        )
        context.go_on()
        if not self._life:
            context.state.relayed = False
        self._coordinator = CoordinatorSessions(context, self._route, self._close_member)
        self._local = LocalSessions(context, self._sockets.local, self._coordinator)
        self._liveness = PeerLiveness(context, self._receivers)
        self._next_ping = 0.0
        self._pings = 0
        if self._door is not None:
            self._door.answer = JoiningMachines(context, self._coordinator, self.meet).answer

    def meet(self, machine: int, peer: messages.RelayAddress) -> None:
        """A machine joins: connects to its relay."""
        self._config.peers[machine] = self._record.state.joined[machine] = peer
        self._record.save()
        for receiver in self._receivers.values():
            receiver.meet(machine, peer.address)
        self._transfers.meet(machine)
        for link in LINKS:
            self._senders[link][machine] = self._connect(link, machine, peer)

    def _meet_again(self, machine: int, life: int) -> None:
        """A machine's relay was killed and started again: repeats what was under way to it."""
        if life <= self._lives.get(machine, 0):
            return
        self._lives[machine] = life
        for link in LINKS:
            self._receivers[link].restart(machine, life)
            self._senders[link][machine].restart(life)
        self._transfers.repeat(machine)
        if machine == FIRST_MACHINE:
            self._streams.send_again()
            self._local.connect_again()

    def _refuse_joiner(self, _address: str, broken: bool) -> None:
        if not broken:
            self.refusals.add("not a member")

    def _connect(self, link: str, machine: int, peer: messages.RelayAddress) -> LinkSender:
        sender = LinkSender(self._poller, link, self._machine, self._run, self._secret, _WINDOWS[link], self._life)
        sender.reborn = lambda life: self._meet_again(machine, life)
        sender.connect(peer.address, peer.control if link == "control" else peer.bulk)
        return sender

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until it is not needed any more, and all messages and events have arrived."""
        until = time.monotonic() + self._spec.timeouts.join
        while self._needed(until):
            self._step(_PING_INTERVAL)
        self._context.end()
        if self._context.at_coordinator:
            for machine, sender in self._control.items():
                if machine not in self._lost:
                    sender.send(_encode(messages.RelayDone()))
        self._record_refusals()
        self._transfers.recorder.close()
        until = time.monotonic() + _FLUSH
        self._flush(until, lambda: self._streams.complete)
        self._forward_events()
        if not self._context.at_coordinator and FIRST_MACHINE not in self._lost:
            self._control[FIRST_MACHINE].send(_encode(messages.RelayDone()))
        self._flush(until, self._all_sent)
        self._streams.remove()

    def _needed(self, until: float) -> bool:
        """True if a process of this machine is connected, on the coordinator's machine any process; in an elastic run
        as long as there is a coordinator. until: when the first must have come."""
        if self._local.active or self._coordinator.active:
            return True
        came = self._context.came
        if self._door is not None and not came:  # workers of this machine alone reach the coordinator by themselves
            self._context.came = came = self._coordinator.reachable()
        if not (came and self._spec.elastic):
            return not came and time.monotonic() < until
        # A worker may join in place of a lost one as long as there is something to join.
        if not self._context.at_coordinator:
            return FIRST_MACHINE not in self._lost | self._finished
        return self._context.state.live or self._coordinator.reachable()

    def _flush(self, until: float, done: Callable[[], bool]) -> None:
        while time.monotonic() < until and not done():
            self._step(0.05)
            self._forward_events()

    def _all_sent(self) -> bool:
        others = set(self._control) - self._lost
        if self._context.at_coordinator:
            return others <= self._finished  # a relay that has finished may have ended, and acknowledges nothing
        # One whose port is closed has ended, and takes nothing any more.
        return all(self._control[machine].idle or self._control[machine].refused for machine in others)

    def _step(self, seconds: float) -> None:
        self._transfers.pump()
        if self._coordinator.waiting:
            self._coordinator.retry()
            seconds = min(seconds, _RETRY)
        self._poller.wait(min(seconds, _FIRST_INTERVAL) if self._pings < _FIRST_PINGS else seconds)
        if time.monotonic() >= self._next_ping:
            self._pings += 1
            self._next_ping = time.monotonic() + (_FIRST_INTERVAL if self._pings < _FIRST_PINGS else _PING_INTERVAL)
            self._tick()

    def _tick(self) -> None:
        """Everything that happens at intervals."""
        for machine, sender in self._control.items():
            if machine not in self._lost:
                if sender.idle:
                    sender.send(_encode(messages.Ping(time.perf_counter(), self._context.flags.present)))
                if self._needs(machine) and (why := self._liveness.lost(machine)):
                    self._lose(machine, why)
            for link in LINKS:
                self._senders[link][machine].tick(_STALLED)
        for receiver in self._receivers.values():
            receiver.tick()
        if self._door is not None:
            self._door.tick()
        self._local.tick()
        self._forward_events()
        self._record_refusals()
        self._transfers.recorder.flush()

    def _record_refusals(self) -> None:
        for why, count in self.refusals.items():
            more = count - self._reported.get(why, 0)
            if more:
                self._transfers.recorder.add(events.Refused(-1, time.perf_counter(), self._machine, why, more))
                self._reported[why] = count

    def _forward_events(self) -> None:
        """Sends new events of this machine to the run's folder, with times by the clock of rank 0's machine."""
        ahead = self._liveness.clock_ahead(FIRST_MACHINE)
        if ahead is None or FIRST_MACHINE in self._lost or self._pings < _FIRST_PINGS:
            return  # this is rank 0's machine, or its clock is not known well yet
        for name, text, before in self._streams.new_lines(ahead):
            self._control[FIRST_MACHINE].send(_encode(messages.EventLines(name, text, before)))

    # -- losing machines ---------------------------------------------------------------------------------------------

    def _needs(self, machine: int) -> bool:
        """True if this machine cannot go on, or must report it, when the other is lost."""
        if machine in self._spec.servers:
            return True
        return bool(self._coordinator.of_machine(machine)) if self._context.at_coordinator else machine == FIRST_MACHINE

    def _lose(self, machine: int, how: str) -> None:
        """Gives up a machine that cannot be reached any more."""
        self._lost.add(machine)
        why = f"machine {machine} ({self._config.peers[machine].address}) {how}"
        self._say(why)
        first, holds = machine == FIRST_MACHINE, machine in self._spec.servers
        if first or holds:
            why = f"{why}; it {'decides' if first else 'holds a shard of the parameters'}"
        for who in self._coordinator.of_machine(machine):
            failed = RunFailed("ServerLost", why, self._spec.processes[machine])
            self._coordinator.fail(who, MachineLost(why, holds) if who >= 0 else failed)
        if first or holds:
            self._local.fail(RunFailed("ServerLost", why, self._spec.processes[machine]))

    # -- messages ----------------------------------------------------------------------------------------------------

    def _route(self, who: int, data: bytes) -> None:
        """Sends a message of the coordinator to the machine of its receiver."""
        machine = self._context.machine_of[who]
        if machine == self._machine:
            self._local.deliver(who, data)
        else:
            self._control[machine].send(_encode(messages.ToMember(who, data, self._context.flags.marked)))

    def _close_member(self, who: int, over: bool) -> None:
        """The coordinator has closed the connection of a member; over: True if there is no coordinator any more."""
        machine = self._context.machine_of[who]
        if machine == self._machine:
            self._close_local(who, over)
        else:
            self._control[machine].send(_encode(messages.MemberGone(who, over)))

    def _close_local(self, who: int, over: bool) -> None:
        if over:
            self._context.end()
        self._local.close(who, final=over)

    def _dispatch(self, machine: int, text: bytes, payload: Any) -> None:
        """Handles a message of another relay; ValueError if it is to be refused."""
        message = _message.decode(text)
        match message:
            case messages.Chunk():
                self._transfers.take_chunk(machine, message, payload)
            case messages.TransferEnd():
                self._transfers.take_end(machine, message)
            case messages.Fetch():
                self._transfers.take_fetch(machine, message)
            case messages.TransferDone():
                self._transfers.take_done(machine, message)
            case messages.ToCoordinator():
                self._coordinator.take(machine, message)
            case messages.ToMember():
                _check_order(machine)
                self._context.flags.marked = max(self._context.flags.marked, message.marked)
                self._local.deliver(message.who, message.data)
            case messages.MemberGone():
                self._take_gone(machine, message)
            case messages.Ping():
                self._liveness.take_ping(machine, message)
            case messages.Pong():
                self._liveness.take_pong(machine, message)
            case messages.MachineJoined():
                _check_order(machine)
                self.meet(message.machine, message.relay)
            case messages.RelayDone():
                self._finished.add(machine)
                self._record.state.finished = sorted(self._finished)
                self._record.save()
            case messages.EventLines():
                self._streams.append(machine, message.name, message.text, before=message.before)

    def _take_gone(self, machine: int, message: messages.MemberGone) -> None:
        if machine == FIRST_MACHINE:
            self._close_local(message.who, message.left)
        elif self._context.at_coordinator and self._context.machine_of.get(message.who) == machine:
            self._coordinator.end(message.who, left=message.left)
        else:
            raise ValueError("the end of another machine's worker")

    def close(self) -> None:
        for senders in self._senders.values():
            for sender in senders.values():
                sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        if self._door is not None:
            self._door.close()
        self._poller.close()


def _check_order(machine: int) -> None:
    """Refuses an order of another machine than the coordinator's."""
    if machine != FIRST_MACHINE:
        raise ValueError("an order that is not the coordinator's")
