"""Rendezvous of the members of a team through torch's key-value store at MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import time
from collections.abc import Callable

import msgspec
from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.config import Place, Timeouts
from paceline.errors import JoinError, UsageError, names
from paceline.transport.keys import VARIABLE, fingerprint, is_loopback

_READ = 2.0
"""Seconds in which a member that has joined reads why its team fails."""


class MemberEntry(msgspec.Struct, frozen=True):
    """One member's entry in the store."""

    machine: str
    host: str
    """The address from which it reaches the store."""
    master: str
    """The address at which it reaches the store."""
    name: str
    """Random, and unique to this process."""
    key: str = ""
    """The fingerprint of its key, for this call of rank 0; empty without a key."""


class MemberList(msgspec.Struct, frozen=True):
    """The machines of all ranks; the same for all members."""

    machines: list[list[int]] = []
    """The ranks on each machine, in rising order; rank 0's machine is the first."""
    hosts: list[str] = []
    """Per machine, the address at which the others reach it."""
    token: bytes = b""
    """Identity shared by all members of the team."""
    names: list[str] = []
    """Names of all processes, by rank."""
    error: str = ""
    """The reason if the members could not be found; then the fields above are empty."""
    missing: list[int] = []

    def machine_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.machines) if rank in ranks)


def open_store(place: Place, timeouts: Timeouts) -> Store:
    """torch's key-value store at MASTER_ADDR and MASTER_PORT, hosted by torchrun's agent or else by rank 0."""
    host, port = _master(place)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        host,
        port,
        place.world_size,
        is_master=place.rank == 0 and not hosted,
        timeout=datetime.timedelta(seconds=timeouts.join),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PrefixStore("paceline", store)


def find_members(
    place: Place, store: Store, machine: str, key: str | None, timeouts: Timeouts
) -> tuple[MemberList, Store]:
    """Exchange entries with the other members; returns their list, and a part of the store for this team alone.

    Rank 0 publishes a call, the others answer it. After a restart the store may still hold entries of an earlier team,
    and machines need not agree on the number of restarts. So every call has a random name, and a member accepts a list
    only if its own name is in it. Entries have the key's fingerprint, so that other keys are refused before machines
    try to connect.
    """
    entry = MemberEntry(machine, *addresses(*_master(place)), secrets.token_hex(8))
    if place.rank == 0:
        call = secrets.token_hex(8)
        own: Store = PrefixStore(call, store)
        own.set("member/0", _signed(entry, key, call))
        store.set("call", call)
        roster = _collect(place, own, timeouts)
        own.set("roster", msgspec.json.encode(roster).decode())
        if roster.error:
            _wait_until_read(place, own)
    else:
        try:
            roster, own = _answer(place, store, entry, key, timeouts)
        except DistError as error:
            raise JoinError(f"rank {place.rank} has lost the store of rank 0: {error}", [0]) from None
    if roster.error:
        raise JoinError(roster.error, roster.missing)
    return roster, own


def _signed(entry: MemberEntry, key: str | None, call: str) -> str:
    return msgspec.json.encode(msgspec.structs.replace(entry, key=fingerprint(key, call))).decode()


def _answer(
    place: Place, store: Store, entry: MemberEntry, key: str | None, timeouts: Timeouts
) -> tuple[MemberList, Store]:
    """Answer every call of rank 0 until one of its lists has this member."""
    # A little longer than rank 0 waits for the last member, since it then names the missing ones.
    until = time.monotonic() + timeouts.join + 2.0
    answered = ""
    pause = 0.01
    while time.monotonic() < until:
        call = store.get("call").decode() if store.check(["call"]) else ""
        own = PrefixStore(call, store)
        if call and call != answered:
            own.set(f"member/{place.rank}", _signed(entry, key, call))
            answered = call
        if call and own.check(["roster"]):
            roster = msgspec.json.decode(own.get("roster"), type=MemberList)
            if roster.error:
                own.set(f"read/{place.rank}", "")
            if roster.error or entry.name in roster.names:
                return roster, own
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)
    raise JoinError(f"rank {place.rank} got no answer from rank 0 in {timeouts.join:g} s", [0])


def _wait_until_read(place: Place, store: Store) -> None:
    """Waits until all others have read why the team fails: the store may end with this process."""
    others = [f"read/{rank}" for rank in range(1, place.world_size)]
    with contextlib.suppress(DistError):  # some have not come, or are gone
        store.wait(others, datetime.timedelta(seconds=_READ))


def _collect(place: Place, store: Store, timeouts: Timeouts) -> MemberList:
    entries: list[MemberEntry] = []
    until = time.monotonic() + timeouts.join
    for rank in range(place.world_size):
        try:
            store.wait([f"member/{rank}"], datetime.timedelta(seconds=max(0.05, until - time.monotonic())))
        except DistStoreError:
            missing = [other for other in range(rank, place.world_size) if not store.check([f"member/{other}"])]
            error = (
                f"rank 0 waited {timeouts.join:g} s for {names(missing or [rank])} to join; "
                "raise it with --timeout if they only need longer"
            )
            return MemberList(error=error, missing=missing or [rank])
        entries.append(msgspec.json.decode(store.get(f"member/{rank}"), type=MemberEntry))
        if error := _unlike(entries[0], entries[rank], rank):
            return MemberList(error=error, missing=[rank])
    places = list(dict.fromkeys(entry.machine for entry in entries))
    machines = [[rank for rank, entry in enumerate(entries) if entry.machine == where] for where in places]
    hosts = [_reachable(entries, ranks) for ranks in machines]
    return MemberList(machines, hosts, secrets.token_bytes(32), [entry.name for entry in entries])


def _unlike(first: MemberEntry, other: MemberEntry, rank: int) -> str:
    """One sentence if a member of another machine than rank 0's has another key; empty if not."""
    if other.key == first.key or other.machine == first.machine:
        return ""
    if first.key and other.key:
        differ = f"rank {rank} on {other.host} and rank 0 on {first.host} have different keys"
    else:
        ones = (f"rank {rank} on {other.host}", f"rank 0 on {first.host}")
        without, has = ones if first.key else reversed(ones)
        differ = f"{without} has no key, which {has} has"
    return f"{differ}; set the same {VARIABLE} on every machine"


def _reachable(entries: list[MemberEntry], ranks: list[int]) -> str:
    """The address of a machine; if it knows itself only as loopback, the address that the others use."""
    own = entries[ranks[0]]
    if is_loopback(own.host):
        elsewhere = [entry.master for entry in entries if entry.machine != own.machine]
        return next((address for address in elsewhere if not is_loopback(address)), own.host)
    return own.host


def _master(place: Place) -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError(
            f"WORLD_SIZE is {place.world_size}, but MASTER_ADDR and MASTER_PORT do not name rank 0's host and port; "
            "start the script with paceline run or torchrun"
        ) from None


def addresses(host: str, port: int) -> tuple[str, str]:
    """The address of this machine towards the store, and the address of the store."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: the kernel only chooses the route
                return str(probe.getsockname()[0]), str(address[0])
        except OSError:
            continue
    return "127.0.0.1", "127.0.0.1"


def exchange_ports(store: Store, timeouts: Timeouts) -> tuple[Callable[[int, int], None], Callable[[int], int]]:
    """Functions by which the leads of the machines publish their ports and find those of the others."""

    def publish(machine: int, port: int) -> None:
        store.set(f"connection/{machine}", str(port))

    def find(machine: int) -> int:
        try:
            return int(store.get(f"connection/{machine}"))
        except DistStoreError as error:
            raise JoinError(f"got no answer from machine {machine} in {timeouts.join:g} s: {error}") from None

    return publish, find
