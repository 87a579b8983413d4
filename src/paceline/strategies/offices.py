"""How a worker of a team over machines finds its machine's office, and opens it if it is the first there."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.membership import Members
from paceline.cluster.servers import start_office
from paceline.config import Timeouts, capacity
from paceline.errors import JoinError
from paceline.parameters.hyperparameters import SLOT
from paceline.parameters.layout import Layout
from paceline.server.letters import Begin, Bound, Charter, Peer, Span
from paceline.server.messages import Ready, send_parts
from paceline.transport import Intent, Memory
from paceline.transport.keys import demand_key, key_of_run
from paceline.transport.wire import connect, new_address


@dataclasses.dataclass(frozen=True, slots=True)
class Freight:
    """What of a model travels, and where it lies."""

    layout: Layout
    slot: int
    """Bytes of a gradient as it is pushed."""
    compressed: bool
    state: list[list[Span]]


def open_office(
    members: Members,
    run: str,
    launched: str | None,
    servers: list[int],
    freight: Freight,
    memories: list[Memory],
    folder: Path | None,
    timeouts: Timeouts,
    *,
    elastic: bool,
) -> tuple[list[str], subprocess.Popen[bytes] | None]:
    """The addresses of the machines' offices; and the office itself, if this worker has started its machine's."""
    key = key_of_run(launched)
    demand_key(key, members.hosts)
    here = members.machines[members.machine]
    wire: Any = None
    process = None
    word = b""
    if members.rank == here[0]:
        address = new_address()
        process = start_office(address, timeouts.join)
        wire = connect(address, Bound | Ready, timeouts.join)
        begin = Begin(run, members.machine, members.hosts[members.machine], key)
        wire.send(begin, [memory.descriptor for memory in memories])
        bound = wire.receive_within(timeouts.join)
        if not isinstance(bound, Bound):
            raise JoinError(f"the office of machine {members.machine} did not start within {timeouts.join:g} s")
        word = msgspec.msgpack.encode((address, bound.control, bound.bulk))
    words = members.gather(word, Intent.ALLOCATE)
    offices = [msgspec.msgpack.decode(words[ranks[0]], type=tuple[str, int, int]) for ranks in members.machines]
    if wire is not None:
        peers = [Peer(host, *ports) for host, (_, *ports) in zip(members.hosts, offices, strict=True)]
        charter = _charter(members, run, servers, freight, peers, folder, timeouts, elastic=elastic)
        send_parts(wire, msgspec.msgpack.encode(charter))
        if not isinstance(wire.receive_within(timeouts.join), Ready):
            raise JoinError(f"the office of machine {members.machine} did not open within {timeouts.join:g} s")
        wire.close()
    members.gather(b"", Intent.ALLOCATE)  # nobody talks to an office that is not open
    return [address for address, *_ in offices], process


def _charter(
    members: Members,
    run: str,
    servers: list[int],
    freight: Freight,
    peers: list[Peer],
    folder: Path | None,
    timeouts: Timeouts,
    *,
    elastic: bool,
) -> Charter:
    layout = freight.layout
    parameters: list[Span] = [(0, 0)] * len(layout.slots)
    for at, flat in _flats(layout):
        for slot in flat.slots:
            start = at + slot.offset * flat.dtype.itemsize
            parameters[slot.index] = (start, start + slot.count * flat.dtype.itemsize)
    shards = [
        [
            (at + flat.shards[server][0] * flat.dtype.itemsize, at + flat.shards[server][1] * flat.dtype.itemsize)
            for at, flat in _flats(layout)
        ]
        for server in range(len(servers))
    ]
    return Charter(
        run=run,
        machine=members.machine,
        peers=peers,
        ranks=members.machines,
        servers=servers,
        room=capacity(members.size),
        timeouts=timeouts,
        coordinator=run,
        folder=None if folder is None else str(folder),
        buffer=layout.size,
        slot=freight.slot,
        parameters=[] if freight.compressed else parameters,
        gradients=[[(0, freight.slot)] for _ in servers] if freight.compressed else shards,
        versions=shards,
        state=freight.state,
        table=SLOT,
        flags=len(layout.slots),
        elastic=elastic,
    )


def _flats(layout: Layout) -> list[tuple[int, Any]]:
    """Each flat with where it begins, in bytes."""
    places, at = [], 0
    for flat in layout.flats:
        places.append((at, flat))
        at += flat.size
    return places
