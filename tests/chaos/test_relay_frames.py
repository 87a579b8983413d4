"""Whatever comes over the network, a relay lives on, changes nothing for what it refuses, and counts it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.cluster.servers import start_relay
from paceline.config import OptimizerSpec, ParameterSpec, RunSpec, Timeouts
from paceline.events import Refused, decode
from paceline.parameters.worker_table import WorkerTable
from paceline.relay.messages import (
    Chunk,
    Fetch,
    RelayAddress,
    RelayBind,
    RelayBound,
    RelayConfig,
    ToCoordinator,
    ToMember,
    TransferEnd,
    TransferLayout,
)
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.server.messages import Hello, Ready
from paceline.server.parts import send_parts
from paceline.transport import Memory
from paceline.transport.handshake import begin_call
from paceline.transport.keys import Secret, new_key
from paceline.transport.links import CHUNK
from paceline.transport.poller import Poller
from paceline.transport.tcp_connection import FrameHeader, TcpConnection
from paceline.transport.unix_connection import UnixConnection, connect, new_address

WORKERS = 2
SIZE = 1 << 16
PARAMETERS = 4
_encode = msgspec.msgpack.encode


class Client:
    """A connection to a relay that sends whatever it is given."""

    def __init__(self, port: int, secret: Secret, name: str) -> None:
        self._poller = Poller()
        self._acks: deque[list[Any]] = deque()
        handshake = begin_call("127.0.0.1", port, secret, name)
        try:
            handshake.complete(time.monotonic() + 20.0)
        except OSError:
            handshake.close()
            raise
        self.connection = TcpConnection(
            self._poller, handshake.socket, "relay", 60.0, 1 << 16, self._acks.append, lambda _: None
        )
        assert self.receive()  # how far the receiver is

    def send(self, parts: list[Any]) -> None:
        until = time.monotonic() + 20.0
        self.connection.send(parts)
        while len(self.connection._outgoing) > 256 and time.monotonic() < until:
            self._poller.wait(0.1)
        self._poller.wait()

    def receive(self, seconds: float = 30.0) -> list[Any] | None:
        """The next acknowledgement, or None if the connection ended, or none came in time."""
        until = time.monotonic() + seconds
        while not self._acks and self.connection.open and time.monotonic() < until:
            self._poller.wait(0.1)
        return self._acks.popleft() if self._acks else None

    def drain(self) -> None:
        while self.connection.pending and self.connection.open:
            self._poller.wait(0.1)
        self._acks.clear()

    def close(self) -> None:
        self.connection.close()
        self._poller.close()


class Rig:
    """A real relay, of machine 0, whose only peer is this test."""

    def __init__(self, folder: Path) -> None:
        self.run, self.key, self.folder = new_address(), new_key(), folder
        self.secret = Secret.of(self.key, self.run)
        self.memories = RunMemory(
            gradients=Memory.create(WORKERS * SIZE),
            versions=Memory.create((WORKERS + 2) * SIZE),
            table=Memory.create(WorkerTable.memory_size(WORKERS, PARAMETERS)),
            flags=Memory.create(SharedFlags.memory_size(WORKERS)),
            buffers=Memory.create(64),
            state=Memory.create(SIZE),
            kept=Memory.create(SIZE),
            record=Memory.create(SIZE),
        )
        source = random.Random(7)
        for memory in self.memories:
            memory.map[:] = source.randbytes(memory.size)
        address = new_address()
        self.process: subprocess.Popen[bytes] = start_relay(address, 20.0)
        connection: UnixConnection[Any] = connect(address, RelayBound | Ready, 20.0)
        connection.send(RelayBind(self.run, 0, "127.0.0.1", self.key), self.memories.descriptors)
        self.bound = connection.receive_within(20.0)
        assert isinstance(self.bound, RelayBound)
        self.ports = {"control": self.bound.control, "bulk": self.bound.bulk}
        spec = RunSpec(
            machines=((0,), (1,)),
            capacity=WORKERS,
            servers=(0,),
            strategy="async",
            timeouts=Timeouts(barrier=120.0, join=120.0),
            folder=str(folder),
            optimizers=(OptimizerSpec("torch.optim.sgd", "SGD", [{}], {}),),
            parameters=(ParameterSpec("weight", (1,), (1,), "float32", 0),) * PARAMETERS,
        )
        config = RelayConfig(
            spec=spec,
            machine=0,
            peers=[RelayAddress("127.0.0.1", self.bound.control, self.bound.bulk), RelayAddress("127.0.0.9", 1, 1)],
            coordinator=self.run,
            layout=TransferLayout(
                version=SIZE,
                gradient=SIZE,
                parameters=[(0, SIZE)],
                gradients=[[(0, SIZE)]],
                versions=[[(0, SIZE)]],
                state=[[(0, SIZE)]],
                kept=[[]],
            ),
        )
        send_parts(connection, _encode(config))
        assert isinstance(connection.receive_within(20.0), Ready)
        connection.close()
        # A worker keeps it open.
        self.worker: UnixConnection[Any] = connect(address, Ready, 20.0)
        self.worker.send(Hello(0, os.getpid()))
        self.numbers = dict.fromkeys(self.ports, 0)

    def member(self, link: str) -> Client:
        """A connection with the right key, as machine 1's."""
        return Client(self.ports[link], self.secret, f"1 {link}")

    def head(self, link: str, message: bytes, payload: bytes | None, ahead: int = 1) -> FrameHeader:
        check = zlib.crc32(message) ^ zlib.crc32(payload or b"")
        return FrameHeader(self.run, 1, self.numbers[link] + ahead, len(message) + len(payload or b""), check)

    def contents(self) -> list[int]:
        return [zlib.crc32(memory.map) for memory in self.memories]

    def memory(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmRSS"))

    def refused(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        path = self.folder / "streams" / "relay-0.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(msgspec.MsgspecError):
                event = decode(line)
                if isinstance(event, Refused):
                    counts[event.why] += event.count
        return counts

    def wait_refused(self, count: int, seconds: float = 60.0) -> Counter[str]:
        until = time.monotonic() + seconds
        while (counts := self.refused()).total() < count and time.monotonic() < until:
            assert self.process.poll() is None, "the relay has died"
            time.sleep(0.1)
        return counts

    def close(self) -> None:
        self.worker.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def _frames(rig: Rig, source: random.Random) -> Iterator[list[bytes]]:
    """What a member could send that has gone mad: each of these must be refused."""
    messages = [
        Chunk("gradient", 1, 0, 1),
        Chunk("version", 0, 0, 1, 0),
        TransferEnd("gradient", 1, 1),
        ToCoordinator(1, _encode(Hello(1, 1))),
        Fetch(1, 0, 0),
    ]
    nan = b"\x00\x00\xc0\x7f" * (SIZE // 4)
    while True:
        message = _encode(source.choice(messages))
        payload = source.choice([None, source.randbytes(256), nan])
        head = rig.head("bulk", message, payload)
        parts = [_encode(head), message, *([] if payload is None else [payload])]
        kind = source.randrange(8)
        if kind == 0:  # a bit
            which = source.randrange(1, len(parts))
            damaged = bytearray(parts[which])
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
            parts[which] = bytes(damaged)
        elif kind == 1:  # cut
            which = source.randrange(len(parts))
            parts[which] = parts[which][: source.randrange(len(parts[which]))]
        elif kind == 2:  # huge lengths
            parts[0] = _encode(msgspec.structs.replace(head, size=source.choice([1 << 62, 1 << 40, head.size + 1])))
        elif kind == 3:  # another run, or machine
            other = source.choice([{"run": "another"}, {"sender": 7}, {"sender": -1}])
            parts[0] = _encode(msgspec.structs.replace(head, **other))
        elif kind == 4:  # too many parts, or too few
            parts = source.choice([parts[:1], [*parts, b"", b""]])
        elif kind == 5:  # what no head is
            parts[0] = source.choice([b"", b"\xc1", source.randbytes(12), _encode(["a", "b"]), _encode({"run": 1})])
        elif kind == 6:  # out of turn
            parts[0] = _encode(rig.head("bulk", message, payload, source.choice([2, 5, 1 << 40])))
        else:  # checksums of something else
            parts[0] = _encode(msgspec.structs.replace(head, check=head.check ^ 1))
        yield parts


def test_tens_of_thousands_of_mutated_frames_change_nothing(rig: Rig) -> None:
    before, start = rig.contents(), rig.memory()
    client = rig.member("bulk")
    count = 100_000
    for number, frame in enumerate(_frames(rig, random.Random(1))):
        if number == count:
            break
        client.send(frame)
    client.drain()
    counts = rig.wait_refused(count)
    assert counts.total() == count, counts
    assert len(counts) >= 6, counts
    assert rig.contents() == before
    assert rig.memory() < start + (64 << 20)
    # It lives, and takes what is right: a gradient of machine 1's worker.
    payload = bytes(SIZE)
    message = _encode(Chunk("gradient", 1, 0, 1))
    client.send([_encode(rig.head("bulk", message, payload)), message, payload])
    until = time.monotonic() + 30.0
    gradients = rig.memories.gradients
    while time.monotonic() < until and any(gradients.map[SIZE : 2 * SIZE]):
        time.sleep(0.02)
    assert not any(gradients.map[SIZE : 2 * SIZE])
    assert rig.contents()[1:] == before[1:]
    client.close()


WRONG = [
    (Chunk("gradient", 0, 0, 1), bytes(SIZE)),  # not its worker
    (Chunk("gradient", 1, 64, 1), bytes(SIZE)),  # beyond the end
    (Chunk("gradient", 1, 0, 1), bytes(SIZE // 2)),  # of half the elements, or of another dtype
    (Chunk("gradient", 1, 0, 1), bytes(SIZE + 4)),
    (Chunk("gradient", 1, -64, 1), bytes(SIZE)),
    (Chunk("gradient", 1 << 40, 0, 1), bytes(SIZE)),
    (Chunk("gradient", 1, 0, 1), None),
    (Chunk("loaded", 1, 0, 1, 99), bytes(SIZE)),
    (Chunk("placed", 1, 64, 1), bytes(SIZE)),
    (Chunk("anything", 1, 0, 1), bytes(SIZE)),
    (ToMember(0, _encode(Ready())), None),  # only home may
    (ToCoordinator(0, _encode(Hello(0, 1))), None),  # not its worker
    (ToCoordinator(1, b"\xc1"), None),
    (ToCoordinator(-1, b""), None),
    (Fetch(1, 99, 0), None),
]


def test_what_is_well_formed_and_wrong_is_refused_one_by_one(rig: Rig) -> None:
    before = rig.contents()
    client = rig.member("bulk")
    for place, (message, payload) in enumerate(WRONG):
        text = _encode(message)
        client.send([_encode(rig.head("bulk", text, payload)), text, *([] if payload is None else [payload])])
        rig.numbers["bulk"] += 1
        counts = rig.wait_refused(place + 1)
        assert counts.total() == place + 1, (message, counts)
        assert rig.contents() == before, message
    # And a second time the same number.
    rig.numbers["bulk"] -= 1
    text = _encode(TransferEnd("gradient", 1, 1))
    client.send([_encode(rig.head("bulk", text, None)), text])
    assert rig.wait_refused(len(WRONG) + 1)["seen before"] == 1
    client.close()


def test_strangers_at_the_port_get_nothing_and_are_counted(rig: Rig) -> None:
    before, start = rig.contents(), rig.memory()
    port = rig.ports["bulk"]
    hello = b"\x16\x03\x01" + (200).to_bytes(2, "big") + b"\x01" + (196).to_bytes(3, "big") + b"\x03\x03"
    knocks = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(4096),
        b"\xff" * 200,
        b"\x16\x03\x01\xff\xff" + b"\x01\xff\xff\xff" + bytes(300),  # TLS that promises more than it may
        hello + os.urandom(194),  # a greeting of nonsense
        b"pl08" + os.urandom(80),  # a proof without encryption
    ]
    answers = []
    for text in knocks:
        with socket.create_connection(("127.0.0.1", port), 5.0) as stranger:
            stranger.sendall(text)
            stranger.settimeout(1.0)
            heard = b""
            with contextlib.suppress(OSError):
                while piece := stranger.recv(4096):
                    heard += piece
            answers.append(len(heard))
    assert max(answers) < 200  # its own greeting at most
    # With another run's key, or none, the connection ends at the proof; as another machine, right after it.
    for secret in (Secret.of(new_key(), rig.run), Secret.of(rig.key, "another run"), Secret.of(None, rig.run)):
        with pytest.raises(OSError):
            Client(port, secret, "1 bulk")
    counts = rig.wait_refused(len(knocks) + 3)
    assert counts == {"not a member": len(knocks) + 3}, counts
    for name in ("7 bulk", "1 control", "bulk", ""):
        with pytest.raises(AssertionError):
            Client(port, rig.secret, name)
    counts = rig.wait_refused(len(knocks) + 7)
    assert counts["from a machine that is not in the run"] == 4, counts
    assert rig.contents() == before
    assert rig.memory() < start + (32 << 20)
    assert rig.process.poll() is None


def test_those_who_drip_are_shown_the_door_while_others_are_served(rig: Rig) -> None:
    drips = [socket.create_connection(("127.0.0.1", rig.ports["bulk"]), 5.0) for _ in range(20)]
    ended = threading.Event()

    def drip() -> None:
        greeting = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)  # as TLS begins
        for place in itertools.count():
            if ended.wait(0.2):
                return
            for number, one in enumerate(drips[5:]):  # the first five say nothing at all
                with contextlib.suppress(OSError):
                    one.send(b"\xff" if number < 5 else greeting[place : place + 1])

    threading.Thread(target=drip, daemon=True).start()
    client = rig.member("bulk")
    message, payload = _encode(Chunk("gradient", 1, 0, 1)), bytes(SIZE)
    client.send([_encode(rig.head("bulk", message, payload)), message, payload])
    assert client.receive()  # acknowledged
    assert not any(rig.memories.gradients.map[SIZE : 2 * SIZE])
    for one in drips:  # all are closed after a few seconds; none is waited for longer than this
        one.settimeout(30.0)
        with contextlib.suppress(ConnectionError):
            while one.recv(4096):
                pass
    ended.set()
    for one in drips:
        one.close()
    assert rig.wait_refused(len(drips)) == {"not a member": len(drips)}
    client.close()


def test_more_than_a_frame_may_hold_ends_the_connection_and_nothing_else(rig: Rig) -> None:
    before, start = rig.contents(), rig.memory()
    client = rig.member("bulk")
    client.send([b"x", b"y", bytes(64 * CHUNK)])
    assert rig.wait_refused(1) == {"not a frame": 1}
    assert client.receive() is None and not client.connection.open
    assert rig.contents() == before
    assert rig.memory() < start + (96 << 20)
    other = rig.member("control")
    message = _encode(Fetch(1, 0, 0))
    other.send([_encode(rig.head("control", message, None)), message])
    assert other.receive()
    other.close()
    client.close()
