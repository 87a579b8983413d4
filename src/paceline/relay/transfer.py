"""The bulk of what a machine sends to others and gets from them: gradients, versions, the optimizer's state.

Everything is received where it belongs: a worker's gradient lies in the same place in the memory of every machine that
needs it, and a version in the same buffer. A machine gets a version once, however many of its workers wait for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline import events
from paceline.events import Recorder, folder_of
from paceline.relay.chunks import ChunkMap, GradientUpload, cut
from paceline.relay.messages import Chunk, Fetch, RelayConfig, Span, TransferDone, TransferEnd
from paceline.server.memory import RunMemory
from paceline.transport import Memory
from paceline.transport.zmq_links import LinkSender

_encode = msgspec.msgpack.Encoder().encode
Done = Callable[[], None]
HOME = 0
"""The machine of rank 0 and of the coordinator."""


@dataclasses.dataclass(slots=True)
class _Push:
    """A worker's gradient, as far as the machines have it that need it."""

    shipments: dict[int, GradientUpload]
    """By machine."""
    turn: int = 1
    waits: set[int] = dataclasses.field(default_factory=set)
    """Machines that have not confirmed."""
    done: Done | None = None
    start: float = 0.0
    """When its first chunk was sent."""
    bytes: int = 0


@dataclasses.dataclass(slots=True)
class _Fetch:
    """Something that is being fetched from the machines that have written it."""

    what: str
    number: int
    buffer: int
    version: int
    waits: set[int]
    done: list[Done]


class TransferManager:
    """Of one machine."""

    def __init__(
        self, config: RelayConfig, memory: RunMemory, control: dict[int, LinkSender], bulk: dict[int, LinkSender]
    ) -> None:
        self._config, self._control, self._bulk = config, control, bulk
        self._gradients, self._versions = _bytes(memory.gradients), _bytes(memory.versions)
        self._state, self._rest = _bytes(memory.state), _bytes(memory.buffers)
        self._whole_rest = cut([(0, memory.buffers.size)])
        me = config.machine
        folder = None if config.spec.folder is None else folder_of(Path(config.spec.folder), me)
        self.recorder = Recorder(folder, f"relay-{me}")
        machines = sorted(set(config.spec.servers))
        self._owners = [machine for machine in machines if machine != me]
        """Other machines that have servers."""
        grids = {
            machine: ChunkMap(self._of(config.layout.gradients, machine), config.layout.parameters)
            for machine in machines
        }
        self._mine = grids.get(me, ChunkMap([], []))
        """What of the others' gradients comes here."""
        self._written = {machine: cut(self._of(config.layout.versions, machine)) for machine in machines}
        self._kept = {machine: cut(self._of(config.layout.state, machine)) for machine in machines}
        self._grids = grids
        self._pushes = {rank: self._push_of(rank) for rank in config.spec.machines[me]}
        self._parcels: dict[int, deque[Iterator[tuple[bytes, Any]]]] = {machine: deque() for machine in bulk}
        """By machine, what else is being sent to it."""
        self._turns = dict.fromkeys(bulk, 0)
        self._labels: dict[int, int] = {0: 0}
        """By buffer, the version that all of it holds here."""
        self._fetches: dict[int, _Fetch] = {}
        self._fetched = 0
        self._loads: dict[int, tuple[set[int], Done]] = {}
        self._shows: dict[int, Done] = {}

    def _push_of(self, rank: int) -> _Push:
        slot = self._config.layout.gradient
        memory = self._gradients[rank * slot : (rank + 1) * slot]
        return _Push({machine: GradientUpload(self._grids[machine], memory) for machine in self._owners})

    def adopt(self, rank: int) -> None:
        """A worker joins on this machine."""
        if rank in self._pushes:
            self.restart(rank)
        else:
            self._pushes[rank] = self._push_of(rank)

    def _of(self, spans: list[list[Span]], machine: int) -> list[Span]:
        return [span for server, at in enumerate(self._config.spec.servers) if at == machine for span in spans[server]]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def made(self, rank: int, parameters: list[int]) -> None:
        for shipment in self._pushes[rank].shipments.values():
            for parameter in parameters:
                shipment.made(parameter)

    def push(self, rank: int, done: Done) -> None:
        """A worker's gradient is final; `done` when it is everywhere where it is needed."""
        push = self._pushes[rank]
        push.waits, push.done = set(push.shipments), done
        for shipment in push.shipments.values():
            shipment.close()
        self._settle(rank)

    def restart(self, rank: int) -> None:
        """A worker begins a new gradient."""
        push = self._pushes.get(rank)
        if push is not None:
            push.turn += 1
            push.waits, push.done, push.start, push.bytes = set(), None, 0.0, 0
            for shipment in push.shipments.values():
                shipment.restart()

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self.restart(rank)

    def _settle(self, rank: int) -> None:
        push = self._pushes[rank]
        if push.done is None or push.waits:
            return
        if push.start:
            now = time.perf_counter()
            self.recorder.add(events.Send(rank, push.start, now - push.start, push.bytes))
        done, push.done = push.done, None
        done()
        self.restart(rank)

    # -- versions ----------------------------------------------------------------------------------------------------

    def holds(self, buffer: int, version: int) -> bool:
        return not self._owners or self._labels.get(buffer) == version

    def fetch(self, buffer: int, version: int, done: Done) -> None:
        """Have this version here; `done` when it is."""
        for fetch in self._fetches.values():
            if (fetch.what, fetch.buffer, fetch.version) == ("version", buffer, version):
                fetch.done.append(done)
                return
        self._begin(_Fetch("version", 0, buffer, version, set(self._owners), [done]))

    def fetch_state(self, done: Done) -> None:
        """Have the optimizer's state here, as it is now."""
        if not self._owners:
            done()
            return
        self._begin(_Fetch("state", 0, -1, 0, set(self._owners), [done]))

    def fetch_rest(self, done: Done) -> None:
        """Have here what the model has besides trained parameters, as it was last shown at home."""
        if self._config.machine == HOME:
            done()
            return
        self._begin(_Fetch("rest", 0, -2, 0, {HOME}, [done]))

    def show(self, rank: int, done: Done) -> None:
        """A worker of this machine has written that; `done` when it is at home."""
        if self._config.machine == HOME:
            done()
            return
        self._shows[rank] = done
        self._parcels[HOME].append(_chunk("shown", rank, self._whole_rest, self._rest, 0, 0))

    def _begin(self, fetch: _Fetch) -> None:
        self._fetched += 1
        fetch.number = self._fetched
        if fetch.what == "version":
            # Whoever wanted what was to come here before is gone: else its buffer would not have been used again.
            for number, other in list(self._fetches.items()):
                if other.buffer == fetch.buffer:
                    del self._fetches[number]
            self._labels.pop(fetch.buffer, None)
        self._fetches[fetch.number] = fetch
        for machine in fetch.waits:
            self._control[machine].send(_encode(Fetch(fetch.number, fetch.buffer, fetch.version)))

    def take_want(self, machine: int, want: Fetch) -> None:
        me, size = self._config.machine, self._config.layout.version
        if want.buffer == -2:
            spans, memory, what = self._whole_rest, self._rest, "rest"
        elif want.buffer < 0:
            spans, memory, what = self._kept.get(me, []), self._state, "state"
        else:
            if not 0 <= want.buffer < self._config.spec.versions:
                raise ValueError("there is no such buffer")
            spans, what = self._written.get(me, []), "version"
            memory = self._versions[want.buffer * size : (want.buffer + 1) * size]
        self._parcels[machine].append(_chunk(what, want.number, spans, memory, 0, want.buffer))

    # -- what a worker has changed -----------------------------------------------------------------------------------

    def load(self, rank: int, buffer: int, done: Done) -> None:
        """A worker has written other parameters and another state: let those who own them have them."""
        size = self._config.layout.version
        version = self._versions[buffer * size : (buffer + 1) * size]
        if not self._owners:
            done()
            return
        self._loads[rank] = (set(self._owners), done)
        for machine in self._owners:
            self._parcels[machine].append(_chunk("loaded", rank, self._written[machine], version, 0, buffer))
            self._parcels[machine].append(_chunk("placed", rank, self._kept[machine], self._state, 0, buffer))

    # -- coming in ---------------------------------------------------------------------------------------------------

    def take_chunk(self, machine: int, chunk: Chunk, payload: Any) -> None:
        if payload is None:
            raise ValueError("a chunk without bytes")
        place, me, config = chunk.place, self._config.machine, self._config
        if chunk.what == "gradient":
            # One who joins may be on another machine than whoever had its rank before.
            known = range(config.spec.capacity) if config.spec.elastic else config.spec.machines[machine]
            if chunk.number not in known:
                raise ValueError("a gradient of another machine's worker")
            _request(self._mine.places.get(place), place, payload)
            start = chunk.number * config.layout.gradient + place
            self._gradients[start : start + len(payload)] = payload
            return
        if chunk.what == "shown":
            self._take_rest(place, payload)
            return
        if chunk.what in ("version", "state", "rest"):
            fetch = self._fetches.get(chunk.number)
            if fetch is None or fetch.what != chunk.what or machine not in fetch.waits:
                return  # of something that nobody waits for any more
            if chunk.what == "rest":
                self._take_rest(place, payload)
                return
            buffer, owner = fetch.buffer, machine
        else:
            buffer, owner = chunk.buffer, me
        spans = self._written if chunk.what in ("version", "loaded") else self._kept
        if chunk.what not in ("version", "loaded", "state", "placed"):
            raise ValueError("a chunk of nothing known")
        _request(dict(spans.get(owner, [])).get(place), place, payload)
        if chunk.what in ("version", "loaded"):
            if not 0 <= buffer < config.spec.versions:
                raise ValueError("there is no such buffer")
            start = buffer * config.layout.version + place
            self._versions[start : start + len(payload)] = payload
        else:
            self._state[place : place + len(payload)] = payload

    def _take_rest(self, place: int, payload: Any) -> None:
        _request(dict(self._whole_rest).get(place), place, payload)
        self._rest[place : place + len(payload)] = payload

    def take_end(self, machine: int, end: TransferEnd) -> None:
        if end.what in ("version", "state", "rest"):
            fetch = self._fetches.get(end.number)
            if fetch is None:
                return
            fetch.waits.discard(machine)
            if not fetch.waits:
                del self._fetches[end.number]
                if fetch.what == "version":
                    self._labels[fetch.buffer] = fetch.version
                for done in fetch.done:
                    done()
        elif end.what in ("gradient", "placed", "shown"):
            self._control[machine].send(_encode(TransferDone(end.what, end.number, end.turn)))

    def take_have(self, machine: int, have: TransferDone) -> None:
        if have.what == "gradient":
            push = self._pushes.get(have.number)
            if push is not None and have.turn == push.turn:
                push.waits.discard(machine)
                self._settle(have.number)
        elif have.what == "shown" and have.number in self._shows:
            self._shows.pop(have.number)()
        elif have.what == "placed" and have.number in self._loads:
            waits, done = self._loads[have.number]
            waits.discard(machine)
            if not waits:
                del self._loads[have.number]
                done()

    # -- going out ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send as much as there is, and as the other ends have room for."""
        for machine, sender in self._bulk.items():
            while sender.room > 0 and self._send_next(machine, sender):
                pass

    def _send_next(self, machine: int, sender: LinkSender) -> bool:
        """The next chunk for a machine, in turns: one of each worker's, and one of what it has asked for."""
        jobs = [*self._pushes, -1]
        for _ in jobs:
            turn = self._turns[machine] = (self._turns[machine] + 1) % len(jobs)
            job = jobs[turn]
            if job < 0:
                if self._send_parcel(machine, sender):
                    return True
            elif machine in self._pushes[job].shipments and self._send_gradient(job, machine, sender):
                return True
        return False

    def _send_parcel(self, machine: int, sender: LinkSender) -> bool:
        parcels = self._parcels[machine]
        while parcels:
            for message, payload in parcels[0]:
                sender.send(message, payload)
                return True
            parcels.popleft()
        return False

    def _send_gradient(self, rank: int, machine: int, sender: LinkSender) -> bool:
        push = self._pushes[rank]
        shipment = push.shipments[machine]
        chunk = shipment.next()
        if chunk is not None:
            if not push.start:
                push.start = time.perf_counter()
            place, data, check = chunk
            push.bytes += len(data)
            sender.send(_encode(Chunk("gradient", rank, place, push.turn)), data, check)
            return True
        if shipment.complete and not shipment.ended:
            shipment.ended = True
            sender.send(_encode(TransferEnd("gradient", rank, push.turn)))
            return True
        return False


def _chunk(
    what: str, number: int, spans: list[Span], memory: memoryview, turn: int, buffer: int
) -> Iterator[tuple[bytes, Any]]:
    for start, stop in spans:
        yield _encode(Chunk(what, number, start, turn, buffer)), memory[start:stop]
    yield _encode(TransferEnd(what, number, turn)), None


def _bytes(memory: Memory) -> memoryview:
    return memory.bytes(0, memory.size)


def _request(stop: int | None, place: int, payload: Any) -> None:
    if stop is None or len(payload) != stop - place:
        raise ValueError("a chunk that does not belong where it says")
