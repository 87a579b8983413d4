"""Starts a machine's relay from its first worker, and tells all workers where the relays are."""

from __future__ import annotations

import subprocess
from typing import Any

import msgspec

from paceline.cluster.membership import Members
from paceline.cluster.servers import start_relay
from paceline.config import RunSpec
from paceline.errors import JoinError
from paceline.relay.messages import RelayAddress, RelayBind, RelayBound, RelayConfig, TransferLayout
from paceline.server.memory import RunMemory
from paceline.server.messages import Ready
from paceline.server.parts import send_parts
from paceline.transport import BarrierKind
from paceline.transport.keys import demand_key, key_of_run
from paceline.transport.unix_connection import connect, new_address


def open_relay(
    members: Members,
    spec: RunSpec,
    layout: TransferLayout,
    memory: RunMemory,
    coordinator: str,
    launched_key: str | None,
) -> tuple[list[str], subprocess.Popen[bytes] | None]:
    """The addresses of all machines' relays, and this machine's relay if this worker has started it.

    coordinator: its address, which also names the run.
    """
    key = key_of_run(launched_key)
    demand_key(key, members.hosts)
    patience, machine = spec.timeouts.join, members.machine
    connection: Any = None
    process = None
    payload = b""
    if members.rank == members.machines[machine][0]:
        address = new_address()
        process = start_relay(address, patience)
        connection = connect(address, RelayBound | Ready, patience)
        connection.send(RelayBind(coordinator, machine, members.hosts[machine], key), memory.descriptors)
        bound = connection.receive_within(patience)
        if not isinstance(bound, RelayBound):
            raise JoinError(f"the relay of machine {machine} did not start within {patience:g} s")
        payload = msgspec.msgpack.encode((address, bound.control, bound.bulk))
    payloads = members.gather(payload, BarrierKind.ALLOCATE)
    relays = [msgspec.msgpack.decode(payloads[ranks[0]], type=tuple[str, int, int]) for ranks in members.machines]
    if connection is not None:
        peers = [RelayAddress(host, *ports) for host, (_, *ports) in zip(members.hosts, relays, strict=True)]
        config = RelayConfig(spec=spec, machine=machine, peers=peers, coordinator=coordinator, layout=layout)
        send_parts(connection, msgspec.msgpack.encode(config))
        if not isinstance(connection.receive_within(patience), Ready):
            raise JoinError(f"the relay of machine {machine} did not open within {patience:g} s")
        connection.close()
    members.gather(b"", BarrierKind.ALLOCATE)  # no worker connects to a relay that is not open
    return [address for address, *_ in relays], process
