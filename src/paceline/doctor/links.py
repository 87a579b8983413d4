"""Measurement of the links between workers, one pair at a time, over plain TCP.

Each worker listens on the loopback if all are on one machine; otherwise on all addresses, and only if a key is set. A
connection must prove that it knows the key (or, on one machine, a token of the lead): both sides answer a challenge
before a byte is measured.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.cluster.process_set import machine
from paceline.cluster.rendezvous import addresses, open_store
from paceline.config import Place, Timeouts
from paceline.doctor.findings import Finding, LinkFindings, Machine, limits, ok
from paceline.errors import JoinError, UsageError
from paceline.transport.handshake import Handshake
from paceline.transport.keys import VARIABLE as KEY
from paceline.transport.keys import Secret, is_loopback

_SMALL, _LARGE = 64, 4 << 20
_PINGS, _SPAN = 200, 0.12
"""Round trips at most, and seconds for which each kind of message is sent."""
_PATIENCE = 30.0
_WORD = 32
_UNEVEN = 4.0
"""A link that is so many times slower than the median is reported."""
_SLOWER = 2.0
"""A host whose best link is so many times slower than the others' is reported."""


class _Card(msgspec.Struct):
    """A worker's address, and the findings of its machine."""

    host: str
    address: str
    port: int
    findings: Machine | None


_Row = dict[int, tuple[float, float, float]]
"""One worker's links to workers of a lower rank: seconds of latency, bytes per second to them and back."""


class NetworkProbe:
    """One worker's part in measuring the links between all."""

    def __init__(self, place: Place) -> None:
        self.place = place
        try:
            self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError):
            raise UsageError(
                "WORLD_SIZE is set, but not MASTER_ADDR and MASTER_PORT; use torchrun or --workers"
            ) from None
        try:
            store = open_store(place, Timeouts(join=120.0))
        except RuntimeError as error:
            raise JoinError(f"rank {place.rank} did not find rank 0 at {self._host}:{self._port}: {error}") from None
        self._store = PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def measure(
        self, findings: Machine | None, tick: Callable[[str], None] = lambda _words: None
    ) -> tuple[list[Machine], LinkFindings] | None:
        """Measure together with the others; returns all results on rank 0, None elsewhere.

        tick: is told what is measured.
        """
        rank, size = self.place.rank, self.place.world_size
        machines = self._exchange("machine", machine())
        one = len(set(machines)) == 1
        key = os.environ.get(KEY, "").encode()
        word = self._exchange("word", secrets.token_hex(_WORD) if rank == 0 else "")[0]
        secret = Secret.of(None, key + word.encode())  # plain TCP is measured
        silent = not one and not key
        address, self._master = ("127.0.0.1", "127.0.0.1") if one or silent else addresses(self._host, self._port)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        where = address if one or silent else ""  # else all addresses of the same family
        with socket.create_server((where, 0), family=family) as listener:
            listener.settimeout(_PATIENCE)
            card = _Card(socket.gethostname(), address, listener.getsockname()[1], findings)
            cards = [msgspec.json.decode(text, type=_Card) for text in self._exchange("card", _json(card))]
            row = {} if silent else self._take_turns(listener, cards, secret, tick)
        self._store.set(f"row/{rank}", _json(row))
        if rank:
            return None
        # Rank 0 ends last: the store may be in its process.
        rows = [msgspec.json.decode(self._get(f"row/{other}"), type=_Row) for other in range(size)]
        return [card.findings for card in cards if card.findings is not None], _links(cards, rows, machines)

    def _take_turns(
        self, listener: socket.socket, cards: list[_Card], secret: Secret, tick: Callable[[str], None]
    ) -> _Row:
        """Measure the pairs one after the other, so that they do not disturb each other."""
        row: _Row = {}
        for low in range(self.place.world_size):
            for high in range(low + 1, self.place.world_size):
                tick(f"measuring the link between rank {low} and rank {high}")
                if self.place.rank == high:
                    card = cards[low]
                    # The lead's machine may know itself only as loopback, which is another machine here.
                    address = self._master if is_loopback(card.address) else card.address
                    with socket.create_connection((address, card.port), _PATIENCE) as connection:
                        _greet(connection, secret, first=True)
                        row[low] = _lead(connection)
                elif self.place.rank == low:
                    with _caller(listener, secret) as connection:
                        _follow(connection)
                self._exchange(f"turn/{low}/{high}", "")
        return row

    def _exchange(self, name: str, text: str) -> list[str]:
        """The texts of all workers, by rank."""
        self._store.set(f"{name}/{self.place.rank}", text or " ")
        return [self._get(f"{name}/{rank}").strip() for rank in range(self.place.world_size)]

    def _get(self, name: str) -> str:
        try:
            return str(self._store.get(name).decode())
        except RuntimeError as error:
            raise JoinError(f"a worker did not publish '{name}' for the measurement: {error}") from None


# -- one pair --------------------------------------------------------------------------------------------------------


def _greet(connection: socket.socket, secret: Secret, first: bool) -> None:
    """Both prove that they know the secret, as on all connections between machines."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    Handshake(connection, secret, "doctor" if first else None).complete(time.monotonic() + _PATIENCE)
    connection.settimeout(_PATIENCE)


@contextlib.contextmanager
def _caller(listener: socket.socket, secret: Secret) -> Iterator[socket.socket]:
    """The first connection that authenticates itself; others are closed."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        connection, _ = listener.accept()
        try:
            _greet(connection, secret, first=False)
        except OSError:
            connection.close()
            continue
        with connection:
            yield connection
        return
    raise JoinError(f"no worker connected within {_PATIENCE:g} s")


def _lead(connection: socket.socket) -> tuple[float, float, float]:
    """Seconds for a short message one way, and bytes per second in both directions."""
    small, large = bytes(_SMALL), bytes(_LARGE)
    times: list[float] = []
    until = time.perf_counter() + _SPAN
    while len(times) < _PINGS and (len(times) < 5 or time.perf_counter() < until):
        start = time.perf_counter()
        connection.sendall(b"p" + small[1:])
        _read(connection, _SMALL)
        times.append(time.perf_counter() - start)
    rates = {}
    for order in (b"o", b"b"):
        moved, start = 0, time.perf_counter()
        while moved == 0 or time.perf_counter() - start < _SPAN:
            connection.sendall(order + small[1:])
            if order == b"o":
                connection.sendall(large)
                _read(connection, _SMALL)
            else:
                _read(connection, _LARGE)
            moved += _LARGE
        rates[order] = moved / (time.perf_counter() - start)
    connection.sendall(b"e" + small[1:])
    return statistics.median(times) / 2, rates[b"o"], rates[b"b"]


def _follow(connection: socket.socket) -> None:
    small, large = bytes(_SMALL), bytes(_LARGE)
    while True:
        match _read(connection, _SMALL)[:1]:
            case b"p":
                connection.sendall(small)
            case b"o":
                _read(connection, _LARGE)
                connection.sendall(small)
            case b"b":
                connection.sendall(large)
            case _:
                return


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("the other worker has gone")
        done += count
    return bytes(data)


# -- findings --------------------------------------------------------------------------------------------------------


def _links(cards: list[_Card], rows: list[_Row], machines: list[str]) -> LinkFindings:
    size = len(cards)
    latency: list[list[float | None]] = [[None] * size for _ in range(size)]
    bandwidth: list[list[float | None]] = [[None] * size for _ in range(size)]
    for high, row in enumerate(rows):
        for low, (seconds, out, back) in row.items():
            latency[high][low] = latency[low][high] = seconds
            bandwidth[high][low], bandwidth[low][high] = out, back
    # Hosts may have the same name, so several have their addresses beside it.
    several = len(set(machines)) > 1
    hosts = [f"{card.host} ({card.address})" if several else card.host for card in cards]
    places = [machines.index(machine) for machine in machines]
    findings = judge(latency, bandwidth, [hosts[place] for place in places])
    return LinkFindings(hosts=hosts, latency=latency, bandwidth=bandwidth, findings=findings)


def judge(
    latency: list[list[float | None]], bandwidth: list[list[float | None]], hosts: list[str] | None = None
) -> list[Finding]:
    """Findings about the links: slow hosts are named and, between others, links much slower than the median.

    hosts: the host of each worker; None if each has its own.
    """
    if not any(value for row in bandwidth for value in row):
        found = "not measured: workers on several machines listen only if a key is set"
        return [limits("links", found, f"set {KEY} to the same secret on all machines")]
    times = {(a, b): value for a, row in enumerate(latency) for b, value in enumerate(row) if value is not None}
    rates = {(a, b): value for a, row in enumerate(bandwidth) for b, value in enumerate(row) if value is not None}
    middle, rate = statistics.median(times.values()), statistics.median(rates.values())
    found = f"latency {middle * 1e6:.0f} µs, bandwidth {rate / 1e6:,.0f} MB/s (median)"
    narrow = _slow_hosts(rates, hosts) if hosts is not None else {}
    others = {rank for rank in range(len(latency)) if hosts is None or hosts[rank] not in narrow}
    slow = [pair for pair, value in rates.items() if value * _UNEVEN < rate and others.issuperset(pair)]
    late = [pair for pair, value in times.items() if value > middle * _UNEVEN and pair[0] < pair[1]]
    if not slow and not late and not narrow:
        return [ok("links", found)]
    change = "look at these links, or choose a policy that does not wait for them (k-async, k-sync)"
    named = [
        f"{host} is slow: at most {own / 1e6:,.3g} MB/s to and from any other, which have {usual / 1e6:,.3g} MB/s"
        for host, (own, usual) in narrow.items()
    ]
    named += [f"{a} to {b} carries {rates[a, b] / 1e6:,.0f} MB/s" for a, b in slow]
    named += [f"{a} and {b} are {times[a, b] * 1e6:,.0f} µs apart" for a, b in late]
    more = f", and {len(named) - 6} more" if len(named) > 6 else ""
    return [limits("links", f"{found}; {'; '.join(named[:6])}{more}", change)]


def _slow_hosts(rates: dict[tuple[int, int], float], hosts: list[str]) -> dict[str, tuple[float, float]]:
    """Hosts whose best link is much slower than the others' best: bytes per second of it, and of the others'.

    A link is as slow as the slower of its two hosts, so a host is judged by its best one. Of two hosts that are on
    one link only, nobody can tell which is slow.
    """
    best: dict[str, float] = {}
    for (a, b), rate in rates.items():
        if hosts[a] != hosts[b]:
            for host in (hosts[a], hosts[b]):
                best[host] = max(best.get(host, 0.0), rate)
    found = {}
    for host, own in best.items():
        others = [rate for other, rate in best.items() if other != host]
        usual = statistics.median(others)
        if len(others) > 1 and own * _SLOWER < usual:
            found[host] = (own, usual)
    return found


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
