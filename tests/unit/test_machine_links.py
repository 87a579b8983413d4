"""Which way round a ring goes, how buffers are cut between machines, and what a connection carries."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
from helpers.in_memory import run_in_memory

from paceline.collectives.inter_machine import segments
from paceline.collectives.links import LinkMatrix, best_order, best_topology, measure, ring_links, tournament
from paceline.errors import JoinError, TeamError
from paceline.parameters.checkpoint_codec import pack, unpack
from paceline.parameters.layout import borders
from paceline.topologies import Link
from paceline.transport.channel import Channel
from paceline.transport.keys import Secret
from paceline.transport.peer_connections import FrameKind, PeerConnection, PeerConnections, compare_clocks, connect
from paceline.transport.poller import Poller


def matrix(size: int, slow: set[tuple[int, int]]) -> LinkMatrix:
    bandwidth = [
        [float("inf") if a == b else 1e6 if (a, b) in slow or (b, a) in slow else 1e9 for b in range(size)]
        for a in range(size)
    ]
    return LinkMatrix([[1e-4] * size for _ in range(size)], bandwidth)


@pytest.mark.parametrize("size", [4, 6, 9, 12])
def test_the_ring_follows_the_fast_links(size: int) -> None:
    # In the order of their numbers, every second link is slow.
    slow = {(number, (number + 1) % size) for number in range(0, size, 2)}
    order = best_order(matrix(size, slow))
    assert sorted(order) == list(range(size))
    assert order[0] == 0
    assert not any((a, b) in slow or (b, a) in slow for a, b in ring_links(order))


def test_equal_links_leave_the_order_alone() -> None:
    assert best_order(matrix(5, set())) == [0, 1, 2, 3, 4]


def test_large_tensors_go_around_the_ring_and_small_ones_do_not() -> None:
    links = matrix(8, set())
    assert best_topology(links, 1 << 30) == "ring"
    assert best_topology(links, 64) != "ring"
    assert best_topology(matrix(4, {(0, 1)}), 1 << 26) == "ring"  # the only one that can avoid the slow link


@pytest.mark.parametrize("size", range(2, 10))
def test_every_pair_connects_one_at_a_time(size: int) -> None:
    met = []
    for pairs in tournament(size):
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
        met += [tuple(sorted(pair)) for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(size) for b in range(a + 1, size)]


def test_links_are_measured_by_all() -> None:
    rows, _ = run_in_memory(4, measure, Link(latency=1e-5))
    links = LinkMatrix.of([row.encode() for row in rows])
    for a in range(4):
        assert links.bandwidth[a][a] == float("inf")
        assert all(links.bandwidth[a][b] > 0 and links.latency[a][b] > 0 for b in range(4) if b != a)


class Busy:
    """A channel of a worker whose machine is busy: it gets most messages 5 ms late."""

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size, self.send = channel.rank, channel.size, channel.send
        self._channel, self._count = channel, 0

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        self._channel.receive(peer, tensor)
        self._count += 1
        time.sleep(0.005 if self._count % 4 else 0.0)


def test_what_delays_most_messages_on_a_busy_machine_is_no_latency_of_a_link() -> None:
    rows, _ = run_in_memory(2, lambda channel: measure(channel if channel.rank else Busy(channel)), Link(latency=1e-5))
    assert rows[0].latency[1] < 0.0025
    assert rows[1].latency[0] < 0.0025


@pytest.mark.parametrize("counts", [[2, 2], [3, 1], [2, 3], [4, 1, 3], [1, 1, 1]])
@pytest.mark.parametrize("count", [0, 16, 160, 1600])
def test_segments_have_one_owner_on_each_machine(counts: list[int], count: int) -> None:
    ranks = iter(range(sum(counts)))
    machines = [[next(ranks) for _ in range(number)] for number in counts]
    bounds = [borders(count, torch.float32, number) for number in counts]
    found = segments(0, bounds, machines)
    covered = [index for segment in found for index in range(segment.start, segment.stop)]
    assert covered == list(range(count))
    for segment in found:
        for edges, owner, members in zip(bounds, segment.owners, machines, strict=True):
            place = members.index(owner)
            assert edges[place] <= segment.start < segment.stop <= edges[place + 1]


def test_a_checkpoint_travels_without_pickle() -> None:
    content = {
        "model": {"weight": torch.randn(3, 4), "empty": torch.empty(0, 2), "half": torch.ones(2).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99), "lr": 1e-3}]},
        "text": "epoch",
        "nothing": None,
    }
    again = unpack(pack(content))
    assert again["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]
    assert again["text"] == "epoch" and again["nothing"] is None
    for name, value in content["model"].items():
        assert again["model"][name].dtype == value.dtype
        assert torch.equal(again["model"][name], value)
    assert torch.equal(again["optimizer"]["state"][0]["step"], torch.tensor(3.0))


# -- connections -----------------------------------------------------------------------------------------------------


def pair() -> tuple[socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    left = socket.create_connection(server.getsockname())
    right, _ = server.accept()
    server.close()
    return left, right


def test_frames_of_any_length_arrive_in_order() -> None:
    sockets, pollers = pair(), (Poller(), Poller())
    left, right = (PeerConnection(pollers[end], sockets[end], "other", 5.0) for end in (0, 1))
    here, there = PeerConnections(pollers[0], {0: left}), PeerConnections(pollers[1], {0: right})
    sent = [b"", b"x", b"y" * 70_000, b"z" * 20_000_000, b"end"]
    for payload in sent:
        left.send(FrameKind.NOTES, payload)
    until = time.monotonic() + 20.0
    while len(right.frames) < len(sent) and time.monotonic() < until:
        here.move(0.01)
        there.move(0.01)
    assert [payload for _, payload in right.frames] == sent
    here.close()
    there.move(0.5)
    assert not right.open and right.ended


@pytest.mark.parametrize("damage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", None])
def test_what_is_no_frame_is_refused(damage: bytes | None) -> None:
    left, right = pair()
    if damage is None:
        sender = PeerConnection(Poller(), left, "right", 5.0)
        sender.send(FrameKind.NOTES, b"some words")
        text = bytearray(right.recv(1000))
        text[-1] ^= 1
        damage = bytes(text)
    poller = Poller()
    receiver = PeerConnection(poller, right, "left", 5.0)
    left.send(damage)
    poller.wait(5.0)
    with pytest.raises(TeamError, match=r"not a frame|damaged"):
        receiver.check()
    assert not receiver.open and not receiver.frames
    left.close()


def meet(secrets: list[Secret], patience: float = 5.0) -> list[PeerConnections | Exception]:
    """Leads on this machine that know these secrets."""
    ports: dict[int, int] = {}
    results: list[PeerConnections | Exception] = [JoinError("nothing")] * len(secrets)

    def find(other: int) -> int:
        until = time.monotonic() + 5.0
        while other not in ports and time.monotonic() < until:
            time.sleep(0.005)
        return ports[other]

    def lead(index: int) -> None:
        try:
            connections = connect(
                index, ["127.0.0.1"] * len(secrets), secrets[index], ports.__setitem__, find, (patience, 5.0)
            )
            compare_clocks(connections, index, 5.0)
            results[index] = connections
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=lead, args=(index,)) for index in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("key", [None, "ab" * 32])
def test_leads_are_connected_to_all_others(key: str | None) -> None:
    for index, connections in enumerate(meet([Secret.of(key, b"token")] * 4)):
        assert isinstance(connections, PeerConnections), connections
        assert list(connections.connections) == [other for other in range(4) if other != index]
        connections.close()


def test_who_does_not_know_the_key_stays_outside() -> None:
    member, keyless = Secret.of("ab" * 32, b"token"), Secret.of(None, b"token")
    assert member.proof != keyless.proof and member.encrypted
    for other in (keyless, Secret.of("cd" * 32, b"token"), Secret.of("ab" * 32, b"another token")):
        for secrets in ([member, other], [other, member]):
            results = meet(secrets, patience=0.7)
            assert all(isinstance(result, JoinError) for result in results), results
