"""Both ends of a connection prove that they know the run's key, to each other and to nobody in between."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from paceline.transport import handshake as module
from paceline.transport.handshake import Handshake
from paceline.transport.keys import Secret, new_key

KEY = "5a" * 32
MEMBER = Secret.of(KEY, "run")


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """Two pairs of connected sockets: a caller and a listener with somebody in between."""
    made = [*socket.socketpair(), *socket.socketpair()]
    yield made
    for one in made:
        one.close()


def outcome(caller: Handshake, listener: Handshake, seconds: float = 5.0) -> list[bool | str]:
    """Of each end: True if it is satisfied, False if it waits, or why it has given up."""
    found: list[bool | str] = [False, False]
    until = time.monotonic() + seconds
    while False in found and time.monotonic() < until:
        for index, end in enumerate((caller, listener)):
            if found[index] is False:
                try:
                    found[index] = end.advance()
                except OSError as error:
                    found[index] = str(error)
                    end.close()
    return found


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_members_are_satisfied_and_only_with_a_key_nobody_can_read_them(
    ends: list[socket.socket], key: str | None
) -> None:
    secret = Secret.of(key, "run")
    caller, listener = Handshake(ends[0], secret, "3 bulk"), Handshake(ends[1], secret)
    assert outcome(caller, listener) == [True, True]
    assert listener.name == "3 bulk"
    encrypted = [isinstance(end.socket, ssl.SSLSocket) for end in (caller, listener)]
    assert encrypted == [key is not None] * 2
    for end in (caller, listener):
        end.close()


@pytest.mark.parametrize("other", [Secret.of(new_key(), "run"), Secret.of(KEY, "another run")])
@pytest.mark.parametrize("calls", [False, True])
def test_neither_end_is_satisfied_with_a_stranger(ends: list[socket.socket], other: Secret, calls: bool) -> None:
    caller = Handshake(ends[0], other if calls else MEMBER, "0")
    listener = Handshake(ends[1], MEMBER if calls else other)
    assert True not in outcome(caller, listener)


def test_a_proof_is_worth_nothing_to_somebody_in_the_middle(ends: list[socket.socket]) -> None:
    """It speaks TLS with both ends, as anybody can, and passes on all that they say, proofs and all."""
    caller, listener = Handshake(ends[0], MEMBER, "0"), Handshake(ends[3], MEMBER)
    middle = [
        module._context(True).wrap_socket(ends[1], server_side=True, do_handshake_on_connect=False),
        module._context(False).wrap_socket(ends[2], do_handshake_on_connect=False),
    ]
    for one in middle:
        one.setblocking(False)
    ready = [False, False]
    found: list[bool | str] = [False, False]
    passed = [0, 0]
    until = time.monotonic() + 5.0
    while found[1] is False and time.monotonic() < until:
        for index, end in enumerate((caller, listener)):
            if found[index] is False:
                try:
                    found[index] = end.advance()
                except OSError as error:
                    found[index] = str(error)
                    end.close()
        for index, one in enumerate(middle):
            with contextlib.suppress(OSError):
                if not ready[index]:
                    one.do_handshake()
                    ready[index] = True
                if all(ready) and (text := one.recv(1000)):
                    middle[1 - index].sendall(text)
                    passed[index] += len(text)
    assert ready == [True, True] and all(passed), "it was not in the middle"
    assert found[1] == "the caller is not a member of the run"
    assert found[0] is not True
    for one in middle:
        one.close()
