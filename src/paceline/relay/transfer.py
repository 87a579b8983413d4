"""Transfers gradients, versions and optimizer state between machines, over the bulk links.

Everything is received where it belongs: a worker's gradient lies in the same place in the memory of every machine that
needs it, and a version in the same buffer. A machine fetches a version once, however many of its workers wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline import events, failpoints
from paceline.events.forwarding import FIRST_MACHINE
from paceline.events.recorder import ReplicaRecorder, folder_of, limit_of
from paceline.relay.chunks import ChunkMap, GradientUpload, check_place, cut, gaps, overlap
from paceline.relay.messages import Chunk, Fetch, RelayConfig, Span, TransferDone, TransferEnd
from paceline.relay.pending import Done, FetchTransfer, GradientTransfer, chunks
from paceline.server.memory import RunMemory
from paceline.transport import Memory
from paceline.transport.links import LinkSender

_encode = msgspec.msgpack.Encoder().encode
_FETCHED = {-1: "state", -2: "rest", -3: "kept"}
"""By number of a buffer that is none, what is fetched instead of a version."""
_LINE = 64
"""Bytes: a parameter begins on a cache line of its own."""
_REQUESTED = ("version", *_FETCHED.values())


class TransferManager:
    """All transfers of one machine."""

    def __init__(
        self,
        config: RelayConfig,
        memory: RunMemory,
        control: dict[int, LinkSender],
        bulk: dict[int, LinkSender],
        life: int = 0,
    ) -> None:
        """life: how often this relay was started again; numbers of transfers begin where no earlier one has been."""
        self._first = life << 32
        self._config, self._memory, self._control, self._bulk = config, memory, control, bulk
        self._gradients, self._versions = _bytes(memory.gradients), _bytes(memory.versions)
        self._state, self._rest, self._kept = map(_bytes, (memory.state, memory.buffers, memory.kept))
        self._rest_spans = cut([(0, memory.buffers.size)])
        me = config.machine
        folder = None if config.spec.folder is None else folder_of(Path(config.spec.folder), me)
        limit = limit_of(config.spec.record_limit, me, len(config.spec.machines))
        self.recorder = ReplicaRecorder(folder, f"relay-{me}", config.spec.replica, limit)
        machines = sorted(set(config.spec.servers))
        self._owners = [machine for machine in machines if machine != me]
        """Other machines that have servers."""
        chunk_maps = {
            machine: ChunkMap(self._spans(config.layout.gradients, machine), config.layout.parameters)
            for machine in machines
        }
        self._incoming = chunk_maps.get(me, ChunkMap([], []))
        """The chunks of other machines' gradients that come here."""
        self._version_spans = {machine: cut(self._spans(config.layout.versions, machine)) for machine in machines}
        self._state_spans = {machine: cut(self._spans(config.layout.state, machine)) for machine in machines}
        self._kept_spans = {machine: cut(self._spans(config.layout.kept, machine)) for machine in machines}
        self._chunk_maps = chunk_maps
        self._gradient_spans = self._spans(config.layout.gradients, me) if me in machines else []
        # Of replicas that are on several machines each, each worker sends its own part.
        own = () if config.spec.places else config.spec.machines[me]
        self._pushes = {rank: self._push_of(rank) for rank in own}
        self._held: dict[int, tuple[int, ...]] = {}
        """By worker, the parameters that it computes with, if it has a part of a replica."""
        self._part_spans: dict[tuple[int, tuple[int, ...]], list[Span]] = {}
        """By owner and parameters, what is sent of a version."""
        self._needed: tuple[int, ...] | None = None
        """The parameters that all workers of this machine compute with; None for all."""
        self._outgoing: dict[int, deque[Iterator[tuple[bytes, Any]]]] = {machine: deque() for machine in bulk}
        """By machine, what it has requested and is being sent."""
        self._turns = dict.fromkeys(bulk, 0)
        self._versions_here: dict[int, int] = {} if config.late or life else {0: 0}
        """By buffer, the version that is complete in it on this machine."""
        self._fetches: dict[int, FetchTransfer] = {}
        self._fetch_count = self._first
        self._loads: dict[int, tuple[set[int], int, Done]] = {}
        """By worker, the machines that have not confirmed what it has loaded into this buffer."""
        self._shows: dict[int, Done] = {}

    def _push_of(self, rank: int) -> GradientTransfer:
        slot = self._config.layout.gradient
        memory = self._gradients[rank * slot : (rank + 1) * slot]
        uploads = {machine: GradientUpload(self._chunk_maps[machine], memory) for machine in self._owners}
        return GradientTransfer(uploads, turn=self._first + 1)

    def repeat(self, machine: int) -> None:
        """Repeats what was under way to a machine, or is expected of it, as its relay was started again."""
        self._outgoing[machine].clear()
        for push in self._pushes.values():
            if machine in push.uploads and (push.done is None or machine in push.waits):
                push.uploads[machine].repeat()
        for number, fetch in self._fetches.items():
            if machine in fetch.waits:
                self._control[machine].send(_encode(Fetch(number, fetch.buffer, fetch.version, fetch.parameters)))
        for rank, (waits, buffer, _) in self._loads.items():
            if machine in waits:
                self._send_loaded(rank, machine, buffer)
        if machine == FIRST_MACHINE:
            for rank in self._shows:
                self._enqueue(FIRST_MACHINE, "shown", rank, FIRST_MACHINE)

    def meet(self, machine: int) -> None:
        """Prepares for a machine that joins."""
        self._outgoing[machine], self._turns[machine] = deque(), 0

    def adopt(self, rank: int) -> None:
        """Prepares for the gradients of a worker that joins on this machine."""
        if rank in self._pushes:
            self.restart(rank)
        else:
            self._pushes[rank] = self._push_of(rank)

    def _parameter_spans(self, parameters: tuple[int, ...]) -> list[Span]:
        """The spans of some parameters, each up to where another may begin; ValueError if there is no such one."""
        spans = self._config.layout.parameters
        if not all(0 <= one < len(spans) for one in parameters):
            raise ValueError("there is no such parameter")
        return [(start, -(-stop // _LINE) * _LINE) for start, stop in (spans[one] for one in parameters)]

    def _spans(self, spans: list[list[Span]], machine: int) -> list[Span]:
        return [span for server, at in enumerate(self._config.spec.servers) if at == machine for span in spans[server]]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def made(self, rank: int, parameters: list[int]) -> None:
        for upload in self._pushes[rank].uploads.values():
            for parameter in parameters:
                upload.made(parameter)

    def push(self, rank: int, done: Done) -> None:
        """Sends the rest of a worker's final gradient; calls `done` when all machines that need it have it."""
        if rank not in self._pushes:
            done()  # its parts are there
            return
        push = self._pushes[rank]
        push.waits, push.done = set(push.uploads), done
        for upload in push.uploads.values():
            upload.close()
        self._settle(rank)

    def push_part(self, rank: int, parameters: tuple[int, ...], done: Done) -> None:
        """Sends these parameters' gradients of a replica, which a worker of this rank in the team has written."""
        config, number = self._config, self._config.spec.capacity + rank
        slot = config.layout.gradient
        start = rank // config.spec.replica * slot
        memory, spans = self._gradients[start : start + slot], self._parameter_spans(parameters)
        turn = self._pushes[number].turn + 1 if number in self._pushes else 1
        uploads = {
            machine: GradientUpload(ChunkMap(overlap(self._spans(config.layout.gradients, machine), spans), []), memory)
            for machine in self._owners
        }
        self._pushes[number] = GradientTransfer({machine: one for machine, one in uploads.items() if one.size}, turn)
        self.push(number, done)

    def restart_part(self, rank: int) -> None:
        """Ends the transfers of a worker that is gone."""
        self.restart(self._config.spec.capacity + rank)

    def restart(self, rank: int) -> None:
        """Begins a new gradient of a worker, or ends the transfers of one that is gone."""
        push = self._pushes.get(rank)
        if push is not None:
            push.turn += 1
            push.waits, push.done, push.start, push.bytes = set(), None, 0.0, 0
            for upload in push.uploads.values():
                upload.restart()

    def _settle(self, rank: int) -> None:
        push = self._pushes[rank]
        if push.done is None or push.waits:
            return
        if push.start:
            now = time.perf_counter()
            capacity, each = self._config.spec.capacity, self._config.spec.replica
            replica = rank if rank < capacity else (rank - capacity) // each
            self.recorder.add(events.Send(replica, push.start, now - push.start, push.bytes))
        done, push.done = push.done, None
        failpoints.hit("relay.confirmed")
        done()
        self.restart(rank)

    # -- versions ----------------------------------------------------------------------------------------------------

    def holds(self, buffer: int, version: int) -> bool:
        return not self._owners or self._versions_here.get(buffer) == version

    def hold(self, rank: int, parameters: tuple[int, ...]) -> None:
        """A worker of this rank in the team, with a part of a replica, computes with these parameters from now on."""
        self._held[rank] = parameters
        before, self._needed = self._needed, tuple(sorted({one for held in self._held.values() for one in held}))
        if before is not None and not set(self._needed) <= set(before):
            self._versions_here.clear()
        if set(self._held) == set(self._config.spec.places[self._config.machine]):
            self.drop_rest(0)  # which had all of the first version

    def drop_rest(self, buffer: int) -> None:
        """Gives back the memory of a version, and of the optimizer's state, that no process of this machine needs."""
        layout, me = self._config.layout, self._config.machine
        needed = [*self._spans(layout.versions, me), *self._parameter_spans(self._needed or ())]
        for start, stop in gaps(needed, layout.version):
            self._memory.versions.drop(buffer * layout.version + start, buffer * layout.version + stop)
        for start, stop in gaps(self._spans(layout.state, me), self._memory.state.size):
            self._memory.state.drop(start, stop)

    def fetch(self, buffer: int, version: int, done: Done, *, whole: bool = False) -> None:
        """Fetches a version, or what is needed of it here; calls `done` when all of that is here."""
        if not self._owners:
            done()
            return
        parameters, waiting = None if whole else self._needed, [done]
        for fetch in self._fetches.values():
            if (fetch.what, fetch.buffer, fetch.version) == ("version", buffer, version):
                if fetch.parameters in (None, parameters):
                    fetch.done.append(done)
                    return
                waiting = [*fetch.done, done]
        self._start_fetch(FetchTransfer("version", buffer, version, set(self._owners), waiting, parameters))

    def fetch_state(self, done: Done) -> None:
        """Fetches the optimizer's state as it is now."""
        if not self._owners:
            done()
        else:
            self._start_fetch(FetchTransfer("state", -1, 0, set(self._owners), [done]))

    def fetch_rest(self, done: Done) -> None:
        """Fetches the model's other tensors, besides trained parameters, from the coordinator's machine."""
        if self._config.machine == FIRST_MACHINE:
            done()
        else:
            self._start_fetch(FetchTransfer("rest", -2, 0, {FIRST_MACHINE}, [done]))

    def fetch_kept(self, done: Done) -> None:
        """Fetches the copy of a version that the servers have made for a snapshot."""
        if not self._owners:
            done()
        else:
            self._start_fetch(FetchTransfer("kept", -3, 0, set(self._owners), [done]))

    def show(self, rank: int, done: Done) -> None:
        """Sends these, as a worker of this machine has written them, to the coordinator's machine."""
        if self._config.machine == FIRST_MACHINE:
            done()
        else:
            self._shows[rank] = done
            self._enqueue(FIRST_MACHINE, "shown", rank, FIRST_MACHINE)

    def _start_fetch(self, fetch: FetchTransfer) -> None:
        number = self._fetch_count = self._fetch_count + 1
        if fetch.what == "version":
            # No worker waits for an earlier version in this buffer: else the coordinator would not have reused it.
            for earlier, other in list(self._fetches.items()):
                if other.buffer == fetch.buffer:
                    del self._fetches[earlier]
            self._versions_here.pop(fetch.buffer, None)
        self._fetches[number] = fetch
        for machine in fetch.waits:
            self._control[machine].send(_encode(Fetch(number, fetch.buffer, fetch.version, fetch.parameters)))

    def take_fetch(self, machine: int, request: Fetch) -> None:
        what = _FETCHED.get(request.buffer, "version")
        self._enqueue(machine, what, request.number, self._config.machine, request.buffer, request.parameters)

    def _enqueue(
        self,
        machine: int,
        what: str,
        number: int,
        owner: int,
        buffer: int = 0,
        parameters: tuple[int, ...] | None = None,
    ) -> None:
        """Sends a machine, when it is its turn, the owner's part of something."""
        self._outgoing[machine].append(chunks(what, number, *self._part(what, owner, buffer, parameters), buffer))

    def _part(
        self, what: str, owner: int, buffer: int, parameters: tuple[int, ...] | None = None
    ) -> tuple[list[Span], memoryview]:
        """The spans of an owner's part, and the memory that they are in; ValueError if there is none of that name.

        parameters: of a version, those that are needed; None for all.
        """
        if what in ("rest", "shown"):
            return self._rest_spans, self._rest
        if what in ("state", "placed"):
            return self._state_spans.get(owner, []), self._state
        if what == "kept":
            return self._kept_spans.get(owner, []), self._kept
        if what not in ("version", "loaded"):
            raise ValueError("a chunk of nothing known")
        if not 0 <= buffer < self._config.spec.versions:
            raise ValueError("there is no such buffer")
        size, spans = self._config.layout.version, self._version_spans.get(owner, [])
        if parameters is not None:
            key = owner, parameters
            if key not in self._part_spans:
                whole = self._spans(self._config.layout.versions, owner)
                self._part_spans[key] = cut(overlap(whole, self._parameter_spans(parameters)))
            spans = self._part_spans[key]
        return spans, self._versions[buffer * size : (buffer + 1) * size]

    # -- parameters and state that a worker has loaded ---------------------------------------------------------------

    def load(self, rank: int, buffer: int, done: Done) -> None:
        """Sends parameters and state that a worker has loaded to the machines that own them."""
        if not self._owners:
            done()
            return
        self._loads[rank] = (set(self._owners), buffer, done)
        for machine in self._owners:
            self._send_loaded(rank, machine, buffer)

    def _send_loaded(self, rank: int, machine: int, buffer: int) -> None:
        self._enqueue(machine, "loaded", rank, machine, buffer)
        self._enqueue(machine, "placed", rank, machine, buffer)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def take_chunk(self, machine: int, chunk: Chunk, payload: Any) -> None:
        if payload is None:
            raise ValueError("a chunk without bytes")
        place, me, config = chunk.place, self._config.machine, self._config
        if chunk.what == "gradient":
            start = self._sender(machine, chunk.number) * config.layout.gradient + place
            if config.spec.places:
                if not any(first <= place and place + len(payload) <= last for first, last in self._gradient_spans):
                    raise ValueError("a part of a gradient that no server needs here")
            else:
                check_place(self._incoming.places.get(place), place, payload)
            self._gradients[start : start + len(payload)] = payload
            failpoints.hit("relay.stored")
            return
        buffer, owner, parameters = chunk.buffer, me, None
        if chunk.what in _REQUESTED:
            fetch = self._fetches.get(chunk.number)
            if fetch is None or fetch.what != chunk.what or machine not in fetch.waits:
                return  # of a fetch that was given up
            buffer, owner, parameters = fetch.buffer, machine, fetch.parameters
        spans, memory = self._part(chunk.what, owner, buffer, parameters)
        check_place(dict(spans).get(place), place, payload)
        memory[place : place + len(payload)] = payload
        failpoints.hit("relay.stored")

    def _sender(self, machine: int, number: int) -> int:
        """The worker, or the replica, whose gradient a machine sends; ValueError if it is not the machine's."""
        spec = self._config.spec
        if spec.places:
            if number - spec.capacity not in spec.places[machine]:
                raise ValueError("a part of a gradient of another machine's worker")
            return (number - spec.capacity) // spec.replica
        # A worker that joins may be on another machine than its rank was before.
        if number not in (range(spec.capacity) if spec.elastic else spec.machines[machine]):
            raise ValueError("a gradient of another machine's worker")
        return number

    def take_end(self, machine: int, end: TransferEnd) -> None:
        if end.what in _REQUESTED:
            fetch = self._fetches.get(end.number)
            if fetch is None:
                return
            fetch.waits.discard(machine)
            if not fetch.waits:
                del self._fetches[end.number]
                if fetch.what == "version" and fetch.parameters in (None, self._needed):
                    self._versions_here[fetch.buffer] = fetch.version
                for done in fetch.done:
                    done()
        elif end.what in ("gradient", "placed", "shown"):
            self._control[machine].send(_encode(TransferDone(end.what, end.number, end.turn)))

    def take_done(self, machine: int, message: TransferDone) -> None:
        if message.what == "gradient":
            push = self._pushes.get(message.number)
            if push is not None and message.turn == push.turn:
                push.waits.discard(machine)
                self._settle(message.number)
        elif message.what == "shown" and message.number in self._shows:
            self._shows.pop(message.number)()
        elif message.what == "placed" and message.number in self._loads:
            waits, _, done = self._loads[message.number]
            waits.discard(machine)
            if not waits:
                del self._loads[message.number]
                done()

    # -- sending -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Sends as much as there is, and as the windows have room for."""
        for machine, sender in self._bulk.items():
            while sender.room > 0 and self._send_next(machine, sender):
                pass

    def _send_next(self, machine: int, sender: LinkSender) -> bool:
        """Sends a machine its next chunk, in turns: one of each worker's gradient, and one that it has requested."""
        jobs = [*self._pushes, -1]
        for _ in jobs:
            turn = self._turns[machine] = (self._turns[machine] + 1) % len(jobs)
            job = jobs[turn]
            if job < 0:
                if self._send_requested(machine, sender):
                    return True
            elif machine in self._pushes[job].uploads and self._send_gradient(job, machine, sender):
                return True
        return False

    def _send_requested(self, machine: int, sender: LinkSender) -> bool:
        outgoing = self._outgoing[machine]
        while outgoing:
            for message, payload in outgoing[0]:
                failpoints.hit("relay.chunk")
                sender.send(message, payload)
                return True
            outgoing.popleft()
        return False

    def _send_gradient(self, rank: int, machine: int, sender: LinkSender) -> bool:
        push = self._pushes[rank]
        upload = push.uploads[machine]
        chunk = upload.next()
        if chunk is not None:
            if not push.start:
                push.start = time.perf_counter()
            failpoints.hit("relay.chunk")
            place, data, check = chunk
            push.bytes += len(data)
            sender.send(_encode(Chunk("gradient", rank, place, push.turn)), data, check)
            return True
        if upload.complete and not upload.ended:
            upload.ended = True
            sender.send(_encode(TransferEnd("gradient", rank, push.turn)))
            return True
        return False


def _bytes(memory: Memory) -> memoryview:
    return memory.bytes(0, memory.size)
