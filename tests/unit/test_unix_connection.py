"""Messages between processes of a machine: whole, in order, and never into the void."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.errors import JoinError, TeamError
from paceline.transport import Memory
from paceline.transport.unix_connection import Closed, Listener, UnixConnection, connect, new_address


class Word(msgspec.Struct, frozen=True, tag=True, array_like=True):
    text: bytes
    number: int = 0


class Other(msgspec.Struct, frozen=True, tag=True, array_like=True):
    values: list[int]


Kinds = Word | Other
Pair = tuple[UnixConnection[Kinds], UnixConnection[Kinds]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = [UnixConnection[Kinds](end, Kinds) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def in_child(work: Callable[[], None]) -> int:
    """Do this in a process of its own, which then ends at once."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


# -- whole and in order ----------------------------------------------------------------------------------------------


def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    ours, theirs = pair
    source = random.Random(1)
    sent = [
        Word(source.randbytes(source.choice([0, 1, 50, 3000, 100_000])), number)
        if number % 3
        else Other([number] * source.randrange(200))
        for number in range(300)
    ]

    def send() -> None:
        for message in sent:
            ours.send(message)

    thread = threading.Thread(target=send)
    thread.start()
    assert [theirs.receive() for _ in sent] == sent
    thread.join()
    assert theirs.receive_within(0) is None


def test_both_ways_at_once(pair: Pair) -> None:
    ours, theirs = pair
    ours.send(Word(b"question"))
    theirs.send(Word(b"answer"))
    assert theirs.receive() == Word(b"question")
    assert ours.receive() == Word(b"answer")


def test_the_longest_message_is_let_through_and_a_longer_one_refused_in_one_sentence(pair: Pair) -> None:
    ours, theirs = pair
    most = 1 << 17
    room = most - len(msgspec.msgpack.encode(Word(b"x" * 100_000))) + 100_000
    ours.send(Word(b"y" * room))
    assert theirs.receive() == Word(b"y" * room)
    with pytest.raises(TeamError, match=rf"^a message of {most + 1} bytes is too long; {most} are allowed$"):
        ours.send(Word(b"y" * (room + 1)))
    ours.send(Word(b"after"))
    assert theirs.receive() == Word(b"after")


def test_nothing_in_time_is_none_and_what_comes_late_is_not_lost(pair: Pair) -> None:
    ours, theirs = pair
    start = time.monotonic()
    assert theirs.receive_within(0.05) is None
    assert theirs.receive_within(-1.0) is None
    assert time.monotonic() - start >= 0.05
    ours.send(Word(b"late"))
    assert theirs.receive_within(5.0) == Word(b"late")


# -- descriptors -----------------------------------------------------------------------------------------------------


def test_memory_travels_beside_a_message(pair: Pair) -> None:
    ours, theirs = pair
    memories = [Memory.create(4096) for _ in range(3)]
    for number, memory in enumerate(memories):
        memory.bytes(0, 1)[0] = number + 1
    ours.send(Word(b"here"), [memory.descriptor for memory in memories])
    ours.send(Word(b"plain"))
    message, descriptors = theirs.receive_with_descriptors(5)
    assert message == Word(b"here")
    received = [Memory.inherited(descriptor) for descriptor in descriptors]
    assert [memory.bytes(0, 1)[0] for memory in received] == [1, 2, 3]
    received[0].bytes(1, 1)[0] = 99
    assert memories[0].bytes(1, 1)[0] == 99
    assert theirs.receive_with_descriptors(5) == (Word(b"plain"), [])
    for memory in (*memories, *received):
        memory.close_descriptor()


def test_descriptors_do_not_leak_into_other_programs(pair: Pair) -> None:
    ours, theirs = pair
    memory = Memory.create(4096)
    ours.send(Word(b""), [memory.descriptor])
    _, (descriptor,) = theirs.receive_with_descriptors(1)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    memory.close_descriptor()


# -- the other end is gone -------------------------------------------------------------------------------------------


def test_when_the_other_end_is_closed_what_it_has_sent_still_comes(pair: Pair) -> None:
    ours, theirs = pair
    ours.send(Word(b"last"))
    assert theirs.open
    ours.close()
    assert not theirs.open
    assert theirs.receive_within(1.0) == Word(b"last")
    for attempt in (theirs.receive, lambda: theirs.receive_within(1.0), lambda: theirs.receive_with_descriptors(1)):
        with pytest.raises(Closed, match="the other end is gone"):
            attempt()
    with pytest.raises(Closed, match="the other end is gone"):
        theirs.send(Word(b"hello?"))


@pytest.mark.parametrize("how", ["receive", "within", "descriptors"])
def test_it_is_closed_too_when_the_other_end_had_not_read_everything(pair: Pair, how: str) -> None:
    ours, theirs = pair
    ours.send(Word(b"never read"))
    theirs.close()
    attempts: dict[str, Callable[[], object]] = {
        "receive": ours.receive,
        "within": lambda: ours.receive_within(1.0),
        "descriptors": lambda: ours.receive_with_descriptors(1),
    }
    with pytest.raises(Closed, match="the other end is gone"):
        attempts[how]()


def test_a_connection_that_was_closed_here_is_closed(pair: Pair) -> None:
    ours, _ = pair
    ours.close()
    with pytest.raises(Closed):
        ours.send(Word(b"x"))
    with pytest.raises(Closed):
        ours.receive()


def test_a_killed_process_is_noticed_while_one_waits_for_it() -> None:
    address = new_address()
    listener = Listener(address)

    def other() -> None:
        connection = connect(address, Kinds, 10.0)
        connection.send(Word(b"here"))
        time.sleep(60)

    pid = in_child(other)
    connection = listener.accept(Kinds, 10.0)
    assert connection is not None
    assert connection.receive_within(10.0) == Word(b"here")
    killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(Closed):
        connection.receive_within(30.0)
    os.waitpid(pid, 0)
    listener.close()
    connection.close()


# -- finding each other ----------------------------------------------------------------------------------------------


def test_who_connects_may_come_before_the_listener() -> None:
    address = new_address()
    listeners: list[Listener] = []
    starter = threading.Timer(0.1, lambda: listeners.append(Listener(address)))
    starter.start()
    connection = connect(address, Kinds, 10.0)
    starter.join()
    accepted = listeners[0].accept(Kinds, 10.0)
    assert accepted is not None
    connection.send(Word(b"hello"))
    assert accepted.receive() == Word(b"hello")
    for end in (connection, accepted, listeners[0]):
        end.close()


def test_nobody_there_is_one_sentence_after_the_time_given() -> None:
    start = time.monotonic()
    with pytest.raises(JoinError, match=r"^the server did not start within 0.1 s$"):
        connect(new_address(), Kinds, 0.1)
    assert time.monotonic() - start >= 0.1


def test_nobody_comes_is_none() -> None:
    listener = Listener(new_address())
    assert listener.accept(Kinds, 0.05) is None
    assert listener.accept(Kinds, 0.0) is None
    listener.close()


def test_addresses_are_never_the_same_and_in_no_file_system() -> None:
    addresses = {new_address() for _ in range(100)}
    assert len(addresses) == 100
    address = addresses.pop()
    listener = Listener(address)
    assert f"@{address}" in Path("/proc/net/unix").read_text()
    listener.close()
    assert f"@{address}" not in Path("/proc/net/unix").read_text()


def test_another_user_is_turned_away_and_the_next_one_of_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    address = new_address()
    listener = Listener(address)
    stranger = connect(address, Kinds, 5.0)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.transport.unix_connection.os.geteuid", lambda: os.getuid() + 1)
        assert listener.accept(Kinds, 5.0) is None
    with pytest.raises(Closed):
        stranger.receive_within(5.0)
    friend = connect(address, Kinds, 5.0)
    accepted = listener.accept(Kinds, 5.0)
    assert accepted is not None
    friend.send(Word(b"hello"))
    assert accepted.receive_within(5.0) == Word(b"hello")
    for end in (stranger, friend, accepted, listener):
        end.close()
