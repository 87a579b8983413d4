"""Starts a machine's relay from its first worker, and tells all workers where the relays are."""

from __future__ import annotations

import subprocess
from typing import Any

import msgspec

from paceline.cluster.membership import Members
from paceline.cluster.rendezvous import addresses
from paceline.cluster.servers import start_relay
from paceline.config import Launch, RunSpec, parse_door
from paceline.errors import JoinError, UsageError
from paceline.relay.door import MachineHere, PlacesGiven, call
from paceline.relay.messages import RelayAddress, RelayBind, RelayBound, RelayConfig, TransferLayout
from paceline.server.memory import RunMemory
from paceline.server.messages import Ready
from paceline.server.parts import send_parts
from paceline.transport import BarrierKind
from paceline.transport.keys import demand_key, is_loopback, key_of_run
from paceline.transport.unix_connection import connect, new_address


def open_relay(
    members: Members,
    spec: RunSpec,
    layout: TransferLayout,
    memory: RunMemory,
    coordinator: str,
    launch: Launch,
) -> tuple[list[str], subprocess.Popen[bytes] | None]:
    """The addresses of all machines' relays, and this machine's relay if this worker has started it.

    coordinator: its address, which also names the run.
    """
    key = key_of_run(launch.key)
    demand_key(key, members.hosts)
    address, door = members.hosts[members.machine], None
    if launch.open is not None and members.machine == 0:
        own, door = parse_door(launch.open, "--open")
        address = own or (address if not is_loopback(address) else "0.0.0.0")  # with a key only
    patience, machine = spec.timeouts.join, members.machine
    connection: Any = None
    process = None
    payload = b""
    if members.rank == members.machines[machine][0]:
        unix = new_address()
        bind = RelayBind(coordinator, machine, address, key, door)
        process, connection, bound = _start(unix, bind, memory, patience)
        payload = msgspec.msgpack.encode((unix, bound.control, bound.bulk))
    payloads = members.gather(payload, BarrierKind.ALLOCATE)
    relays = [msgspec.msgpack.decode(payloads[ranks[0]], type=tuple[str, int, int]) for ranks in members.machines]
    if connection is not None:
        peers = [RelayAddress(host, *ports) for host, (_, *ports) in zip(members.hosts, relays, strict=True)]
        peers += [RelayAddress("", 0, 0)] * (len(spec.machines) - len(peers))  # of machines that may join
        config = RelayConfig(spec=spec, machine=machine, peers=peers, coordinator=coordinator, layout=layout)
        _open(connection, config, patience)
    members.gather(b"", BarrierKind.ALLOCATE)  # no worker connects to a relay that is not open
    return [address for address, *_ in relays], process


def _start(
    unix: str, bind: RelayBind, memory: RunMemory, patience: float
) -> tuple[subprocess.Popen[bytes], Any, RelayBound]:
    """Starts a relay at a Unix address; returns its process, the connection to it, and its ports."""
    process = start_relay(unix, patience)
    connection = connect(unix, RelayBound | Ready, patience)
    connection.send(bind, memory.descriptors)
    bound = connection.receive_within(patience)
    if not isinstance(bound, RelayBound):
        raise JoinError(f"the relay of machine {bind.machine} did not start within {patience:g} s")
    if bound.trouble:
        raise UsageError(bound.trouble)
    return process, connection, bound


def _open(connection: Any, config: RelayConfig, patience: float) -> None:
    """Lets a relay connect to the others."""
    send_parts(connection, msgspec.msgpack.encode(config))
    if not isinstance(connection.receive_within(patience), Ready):
        raise JoinError(f"the relay of machine {config.machine} did not open within {patience:g} s")
    connection.close()


class JoiningPlan(msgspec.Struct, frozen=True):
    """What the workers of a machine that joins a run get from their launcher, in a file."""

    door: str
    """The address and port of the run's door."""
    places: PlacesGiven


def open_joining_relay(launch: Launch, plan: JoiningPlan, memory: RunMemory) -> subprocess.Popen[bytes]:
    """Opens the relay of a machine that joins a running team, with this memory."""
    config, key = plan.places.config, key_of_run(launch.key)
    patience = config.spec.timeouts.join
    host, port = parse_door(plan.door, "--join")
    own, there = addresses(host, port)
    assert launch.joins is not None
    bind = RelayBind(config.coordinator, config.machine, own, key)
    process, connection, bound = _start(launch.joins, bind, memory, patience)
    call(plan.door, key, MachineHere(config.machine, RelayAddress(own, bound.control, bound.bulk)), patience)
    # The coordinator's machine is reached as its door was.
    peers = [RelayAddress(there, config.peers[0].control, config.peers[0].bulk), *config.peers[1:]]
    _open(connection, msgspec.structs.replace(config, peers=peers), patience)
    return process
