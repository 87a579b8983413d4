"""Messages over the network arrive whole, in any order that they are expected in; a lost worker is named."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamTimeout, WorkerLost
from paceline.transport.network_mailbox import NetworkMailbox

DTYPES = [torch.float32, torch.int64, torch.bfloat16]
SMALL = 0.3
"""Seconds."""


def linked() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@contextlib.contextmanager
def pair(barrier: float = 20.0) -> Iterator[tuple[NetworkMailbox, NetworkMailbox]]:
    sockets = linked()
    boxes = [
        NetworkMailbox(rank, {1 - rank: sockets[rank]}, ["one", "two"], [4, 7], Timeouts(barrier=barrier), DTYPES)
        for rank in range(2)
    ]
    try:
        yield boxes[0], boxes[1]
    finally:
        for box in boxes:
            box.close()


def test_messages_of_all_sizes_arrive_before_and_after_they_are_expected() -> None:
    sizes = [0, 1, 1000, 300_000, 3_000_000]
    values = [torch.arange(size, dtype=torch.int64) for size in sizes]
    with pair() as (one, other):
        sent = [one.send(1, value, tag) for tag, value in enumerate(values)]
        for tag in (3, 0, 4, 2, 1):
            place = torch.empty(sizes[tag], dtype=torch.int64)
            other.receive(0, place, tag).wait()
            assert torch.equal(place, values[tag])
        back = [one.receive(1, torch.empty(size, dtype=torch.int64), tag) for tag, size in enumerate(sizes)]
        sent += [other.send(0, value, tag) for tag, value in enumerate(values)]
        for transfer, value in zip(back, values, strict=True):
            transfer.wait()
            assert torch.equal(transfer.tensor, value)
            assert transfer.who == 7
        for sending in sent:
            sending.wait()


def test_messages_with_one_tag_keep_their_order() -> None:
    with pair() as (one, other):
        for number in range(20):
            one.send(1, torch.full((5,), float(number)), 9)
        place = torch.empty(5)
        for number in range(20):
            other.receive(0, place, 9).wait()
            assert place.tolist() == [number] * 5


@pytest.mark.parametrize("early", [True, False])
def test_a_message_of_another_size_or_dtype_is_a_mismatch(early: bool) -> None:
    with pair() as (one, other):
        if early:
            expected = other.receive(0, torch.empty(3), 1)
            one.send(1, torch.ones(4), 1).wait()
        else:
            one.send(1, torch.ones(4), 1).wait()
            expected = other.receive(0, torch.empty(3), 1)
        with pytest.raises(Mismatch, match=r"rank 4 sent 4 x torch.float32 to rank 7, which expects 3 x torch.float32"):
            expected.wait()
        wrong = other.receive(0, torch.empty(4, dtype=torch.bfloat16), 2)
        one.send(1, torch.ones(2), 2)  # as many bytes
        with pytest.raises(Mismatch):
            wrong.wait()


def test_another_worker_answers_while_its_script_does_something_else() -> None:
    with pair() as (one, other):
        other.answer = lambda question: memoryview(question[::-1] * 1_000_000)
        assert bytes(one.ask(1, b"abc")) == b"cba" * 1_000_000


def test_who_sends_nothing_is_named_after_the_timeout() -> None:
    with (
        pair(SMALL) as (_, other),
        pytest.raises(TeamTimeout, match=r"rank 7 waited .* for a message from rank 4 on one"),
    ):
        other.receive(0, torch.empty(3), 1).wait()


def test_what_a_lost_worker_has_sent_still_arrives() -> None:
    with pair() as (one, other):
        one.send(1, torch.ones(500_000), 1).wait()
        one.close()
        place = torch.empty(500_000)
        other.receive(0, place, 1).wait()
        assert place.sum() == 500_000
        with pytest.raises(WorkerLost, match="rank 4 on one died, or its connection was closed"):
            other.receive(0, place, 2).wait()
        with pytest.raises(WorkerLost, match="rank 4 on one"):
            other.check()


def test_a_worker_whose_script_has_ended_is_not_lost() -> None:
    with pair() as (one, other):
        one.bye()
        other.wait_for_bye(0, 20.0)
        other.check()
        one.answer = memoryview
        assert bytes(other.ask(0, b"still there")) == b"still there"
        with pytest.raises(WorkerLost, match="rank 4 on one has left the team: its script has ended"):
            other.receive(0, torch.empty(1), 2).wait()


def test_bytes_that_are_no_frame_end_the_connection() -> None:
    mine, theirs = linked()
    box = NetworkMailbox(0, {1: mine}, ["one", "two"], [0, 1], Timeouts(barrier=20.0), DTYPES)
    try:
        theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(WorkerLost, match="what came from two is not a frame of this team"):
            box.receive(1, torch.empty(1), 0).wait()
    finally:
        box.close()
        theirs.close()
