"""Links between machines: in order, each once, whole, also when connections break; and only for members."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.hosts import Proxy

from paceline.errors import UsageError
from paceline.transport import handshake
from paceline.transport.keys import Secret, check_key, demand_key, key_of_run, new_key
from paceline.transport.links import CHUNK, LinkReceiver, LinkSender, RejectCounter
from paceline.transport.poller import Poller

RUN = "some-run"


class Pair:
    """A sender and a receiver, with a proxy in between."""

    def __init__(self, key: str | None = None, window: int = 4 * CHUNK, sender_key: str | None = "same") -> None:
        self.here, self.there = Poller(), Poller()
        self.said: list[str] = []
        self.refusals = RejectCounter(self.said.append)
        self.came: list[tuple[int, bytes, bytes | None]] = []
        self.receiver = LinkReceiver(self.there, "bulk", self.refusals, self._take)
        self.port = port = self.receiver.bind("127.0.0.1", Secret.of(key, RUN))
        self.receiver.open(RUN, {1: "10.0.0.9"})
        self.reads = True
        self.proxy = Proxy(("127.0.0.1", port))
        mine = Secret.of(key if sender_key == "same" else sender_key, RUN)
        self.sender = LinkSender(self.here, "bulk", 1, RUN, mine, window)
        self.sender.connect("127.0.0.1", self.proxy.port)

    def _take(self, machine: int, message: bytes, payload: Any) -> None:
        if message == b"bad":
            raise ValueError("what nobody wants")
        self.came.append((machine, message, None if payload is None else bytes(payload)))

    def turn(self) -> None:
        self.sender.tick(0.5)
        self.here.wait()
        if self.reads:
            self.there.wait()
            self.receiver.tick()
        time.sleep(0.001)

    def until(self, over: Callable[[], bool], seconds: float = 10.0) -> bool:
        end = time.monotonic() + seconds
        while not over() and time.monotonic() < end:
            self.turn()
        return over()

    def close(self) -> None:
        self.proxy.close()
        self.sender.close()
        self.receiver.close()
        self.here.close()
        self.there.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*arguments: Any, **options: Any) -> Pair:
        made.append(Pair(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_all_comes_in_order_and_once(pair: Callable[..., Pair], keyed: bool) -> None:
    link = pair(new_key() if keyed else None)
    for number in range(20):
        link.sender.send(str(number).encode(), bytes([number]) * 1000)
    assert link.until(lambda: link.sender.idle and len(link.came) == 20)
    assert link.came == [(1, str(n).encode(), bytes([n]) * 1000) for n in range(20)]
    assert not link.refusals


@pytest.mark.parametrize("keyed", [False, True])
def test_what_was_lost_with_a_connection_comes_again(pair: Callable[..., Pair], keyed: bool) -> None:
    link = pair(new_key() if keyed else None)
    link.proxy.delay = 0.01  # so that there is always something under way
    sent = drops = 0
    while len(link.came) < 60:
        while link.sender.room > 0 and sent < 60:
            link.sender.send(str(sent).encode(), bytes(CHUNK // 8))
            sent += 1
        link.turn()
        if len(link.came) >= 12 * (drops + 1) and drops < 4:  # in the middle of what is under way
            drops += link.proxy.drop()
    assert link.until(lambda: link.sender.idle)
    assert drops == 4
    assert link.sender.again > 0
    assert [int(message) for _, message, _ in link.came] == list(range(60))


@pytest.mark.parametrize("keyed", [False, True])
def test_damage_is_noticed_and_mended(pair: Callable[..., Pair], keyed: bool) -> None:
    link = pair(new_key() if keyed else None)
    link.sender.send(b"first")
    assert link.until(lambda: link.sender.idle)
    link.proxy.corrupt = 0.2
    for number in range(40):
        link.sender.send(str(number).encode(), bytes(50_000))
        link.turn()
    link.until(lambda: link.proxy.corrupted > 5, 3.0)
    link.proxy.corrupt = 0.0
    assert link.until(lambda: link.sender.idle, 20.0)
    assert link.proxy.corrupted > 0
    assert [int(message) for _, message, _ in link.came[1:]] == list(range(40))
    assert all(payload == bytes(50_000) for _, _, payload in link.came[1:])


def test_a_slow_reader_bounds_what_is_under_way(pair: Callable[..., Pair]) -> None:
    link = pair(window=2 * CHUNK)
    link.sender.send(b"first")
    assert link.until(lambda: link.sender.idle)
    link.reads = False
    sent = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        if link.sender.room > 0:
            link.sender.send(b"x", bytes(CHUNK))
            sent += 1
        link.turn()
    assert sent <= 3


def test_what_the_reader_refuses_is_counted_and_does_not_come_again(pair: Callable[..., Pair]) -> None:
    link = pair()
    link.sender.send(b"bad")
    link.sender.send(b"good")
    assert link.until(lambda: link.sender.idle)
    assert [message for _, message, _ in link.came] == [b"good"]
    assert link.refusals == {"what nobody wants": 1}
    assert len(link.said) == 1


@pytest.mark.parametrize("other", [None, "0" * 64])
def test_whoever_has_not_the_key_is_refused_and_counted(pair: Callable[..., Pair], other: str | None) -> None:
    link = pair(new_key(), sender_key=other)
    link.sender.send(b"let me in")
    assert link.until(lambda: link.refusals["not a member"] >= 1)
    assert not link.until(lambda: bool(link.came), 0.5)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.9"])
def test_a_call_that_breaks_off_is_no_refusal_if_it_is_of_a_host_of_the_run(
    pair: Callable[..., Pair], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    link = pair(new_key())
    link.receiver.open(RUN, {1: host})
    silent = socket.create_connection(("127.0.0.1", link.port))  # as one whose cable was pulled
    closed = socket.create_connection(("127.0.0.1", link.port))
    closed.close()
    expected = 0 if host == "127.0.0.1" else 2
    assert link.until(lambda: link.refusals.total() == 2, 1.0) == (expected == 2)
    assert link.refusals["not a member"] == expected
    with socket.create_connection(("127.0.0.1", link.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert link.until(lambda: link.refusals["not a member"] == expected + 1), "what no member sends always is one"
    silent.close()


def test_keys_belong_to_their_run_and_are_checked() -> None:
    key = new_key()
    assert check_key(key) == key
    assert Secret.of(key, "a") != Secret.of(key, "b")
    assert Secret.of(key, "a") == Secret.of(key, "a") != Secret.of(None, "a")
    secret = Secret.of(key, "a")
    assert secret.answer(b"caller", b"x") != secret.answer(b"listener", b"x") != secret.answer(b"listener", b"y")
    for wrong in ("", "abc", "g" * 64, key.upper() + "0"):
        with pytest.raises(UsageError, match="64 hexadecimal digits") as caught:
            check_key(wrong)
        assert not wrong or wrong not in str(caught.value)


def test_the_key_comes_from_the_launcher_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = new_key(), new_key()
    monkeypatch.delenv("PACELINE_KEY", raising=False)
    assert key_of_run(None) is None
    monkeypatch.setenv("PACELINE_KEY", second)
    assert (key_of_run(first), key_of_run(None)) == (first, second)


def test_without_a_key_there_is_only_loopback() -> None:
    demand_key(None, ["127.0.0.1", "127.0.0.1"])
    demand_key(new_key(), ["10.0.0.1", "10.0.0.2"])
    with pytest.raises(UsageError, match="paceline key"):
        demand_key(None, ["10.0.0.1", "10.0.0.2"])


def test_a_sender_forgets_what_was_under_way_to_a_receiver_that_was_killed(pair: Callable[..., Pair]) -> None:
    made = pair()
    lives: list[int] = []
    made.sender.reborn = lives.append
    made.sender.send(b"first")
    assert made.until(lambda: made.sender.idle)
    made.receiver.close()
    made.sender.send(b"lost with it")
    made.receiver = LinkReceiver(made.there, "bulk", made.refusals, made._take, 1)
    made.proxy._target = ("127.0.0.1", made.receiver.bind("127.0.0.1", Secret.of(None, RUN)))
    made.receiver.open(RUN, {1: "10.0.0.9"})
    assert made.until(lambda: bool(lives))
    made.sender.send(b"second")
    assert made.until(lambda: made.sender.idle)
    assert lives == [1]
    assert [message for _, message, _ in made.came] == [b"first", b"second"]


def test_a_receiver_takes_a_sender_that_was_killed_from_its_beginning(pair: Callable[..., Pair]) -> None:
    made = pair()
    lives: list[tuple[int, int]] = []
    made.receiver.reborn = lambda *life: lives.append(life)
    made.sender.send(b"first")
    assert made.until(lambda: made.sender.idle)
    made.sender.close()
    made.sender = LinkSender(made.here, "bulk", 1, RUN, Secret.of(None, RUN), 4 * CHUNK, 1)
    made.sender.connect("127.0.0.1", made.proxy.port)
    made.sender.send(b"second")
    assert made.until(lambda: made.sender.idle)
    assert lives == [(1, 1)]
    assert [message for _, message, _ in made.came] == [b"first", b"second"]
    assert not made.refusals
