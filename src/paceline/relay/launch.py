"""How a worker of a team over machines finds its machine's relay, and opens it if it is the first there."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.membership import Members
from paceline.cluster.servers import start_relay
from paceline.config import Timeouts, capacity
from paceline.errors import JoinError
from paceline.parameters.hyperparameters import SLOT
from paceline.parameters.layout import Layout
from paceline.relay.messages import RelayAddress, RelayBind, RelayBound, RelayConfig, Span
from paceline.server.messages import Ready, send_parts
from paceline.transport import BarrierKind, Memory
from paceline.transport.keys import demand_key, key_of_run
from paceline.transport.unix_connection import connect, new_address


@dataclasses.dataclass(frozen=True, slots=True)
class TransferLayout:
    """What of a model travels, and where it lies."""

    layout: Layout
    slot: int
    """Bytes of a gradient as it is pushed."""
    compressed: bool
    state: list[list[Span]]


def open_relay(
    members: Members,
    run: str,
    launched: str | None,
    servers: list[int],
    transfer_layout: TransferLayout,
    memories: list[Memory],
    folder: Path | None,
    timeouts: Timeouts,
    *,
    elastic: bool,
) -> tuple[list[str], subprocess.Popen[bytes] | None]:
    """The addresses of the machines' relays; and the relay itself, if this worker has started its machine's."""
    key = key_of_run(launched)
    demand_key(key, members.hosts)
    here = members.machines[members.machine]
    connection: Any = None
    process = None
    word = b""
    if members.rank == here[0]:
        address = new_address()
        process = start_relay(address, timeouts.join)
        connection = connect(address, RelayBound | Ready, timeouts.join)
        begin = RelayBind(run, members.machine, members.hosts[members.machine], key)
        connection.send(begin, [memory.descriptor for memory in memories])
        bound = connection.receive_within(timeouts.join)
        if not isinstance(bound, RelayBound):
            raise JoinError(f"the relay of machine {members.machine} did not start within {timeouts.join:g} s")
        word = msgspec.msgpack.encode((address, bound.control, bound.bulk))
    words = members.gather(word, BarrierKind.ALLOCATE)
    relays = [msgspec.msgpack.decode(words[ranks[0]], type=tuple[str, int, int]) for ranks in members.machines]
    if connection is not None:
        peers = [RelayAddress(host, *ports) for host, (_, *ports) in zip(members.hosts, relays, strict=True)]
        config = _relay_config(members, run, servers, transfer_layout, peers, folder, timeouts, elastic=elastic)
        send_parts(connection, msgspec.msgpack.encode(config))
        if not isinstance(connection.receive_within(timeouts.join), Ready):
            raise JoinError(f"the relay of machine {members.machine} did not open within {timeouts.join:g} s")
        connection.close()
    members.gather(b"", BarrierKind.ALLOCATE)  # nobody talks to a relay that is not open
    return [address for address, *_ in relays], process


def _relay_config(
    members: Members,
    run: str,
    servers: list[int],
    transfer_layout: TransferLayout,
    peers: list[RelayAddress],
    folder: Path | None,
    timeouts: Timeouts,
    *,
    elastic: bool,
) -> RelayConfig:
    layout = transfer_layout.layout
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
    return RelayConfig(
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
        slot=transfer_layout.slot,
        parameters=[] if transfer_layout.compressed else parameters,
        gradients=[[(0, transfer_layout.slot)] for _ in servers] if transfer_layout.compressed else shards,
        versions=shards,
        state=transfer_layout.state,
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
