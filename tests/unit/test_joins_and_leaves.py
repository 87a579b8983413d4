"""What policies, the ledger, loaders and streams make of workers that come and go."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.ledger import Ledger
from paceline.data.orphaned_samples import OrphanedSamples
from paceline.events import Leave
from paceline.events.reader import Reader
from paceline.events.recorder import Recorder
from paceline.parameters.model_buffers import ModelBuffers
from paceline.policies import Arrival, Order, Policy, parse_policy
from paceline.transport import Memory

POLICIES = [
    "sync",
    "async",
    "k-sync:k=3",
    "k-batch-sync:k=3",
    "k-async:k=3",
    "k-batch-async:k=3",
    "ssp:s=1",
    "groups:size=2",
    "groups:size=2,between=k-sync:k=2",
    "adaptive:of=k-sync,start=2",
    "auto",
]


class Troop:
    """Workers who push in any order, and come and go; nobody may wait for ever."""

    def __init__(self, spec: str, seed: int) -> None:
        self.policy: Policy = parse_policy(spec).for_workers(range(4))
        self.random = random.Random(seed)
        self.at = dict.fromkeys(range(4), 0)
        """Who computes, and on which version."""
        self.waiting: set[int] = set()
        self.ticket = 0
        self.open: set[int] = set()

    def follow(self, decision: Any) -> None:
        ended = {push.ticket for push in (*decision.use, *decision.drop)}
        assert len(ended) == len(decision.use) + len(decision.drop)
        assert ended <= self.open
        self.open -= ended
        for worker, order in decision.orders.items():
            if worker in self.waiting and order is not Order.WAIT:
                self.waiting.discard(worker)
                self.at[worker] = self.policy.version
            elif worker in self.at and order is Order.CANCEL:
                self.at[worker] = self.policy.version

    def push(self) -> None:
        worker = self.random.choice(sorted(self.at))
        self.ticket += 1
        self.open.add(self.ticket)
        version = self.at.pop(worker)
        self.waiting.add(worker)
        self.follow(self.policy.arrive(Arrival(self.ticket, worker, version)))

    def leave(self) -> None:
        worker = self.random.choice(sorted({*self.at, *self.waiting}))
        self.at.pop(worker, None)
        self.waiting.discard(worker)
        self.follow(self.policy.leave(worker))

    def join(self) -> None:
        worker = min(set(range(9)) - set(self.at) - self.waiting)
        self.at[worker] = self.policy.version
        self.follow(self.policy.join(worker))
        self.follow(self.policy.rest(worker))
        self.policy.wake(worker)

    @property
    def size(self) -> int:
        return len(self.at) + len(self.waiting)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spec", POLICIES)
def test_nobody_waits_for_ever_whoever_comes_and_goes(spec: str, seed: int) -> None:
    troop = Troop(spec, seed)
    for _ in range(400):
        what = troop.random.random()
        if what < 0.08 and troop.size > 1:
            troop.leave()
        elif what < 0.16 and troop.size < 8:
            troop.join()
        else:
            assert troop.at, f"all {troop.size} wait: {troop.policy.held}"
            troop.push()
        assert len(troop.policy.workers) == troop.size
    assert troop.policy.version > 30


def test_sync_needs_all_who_are_here() -> None:
    policy = parse_policy("sync").for_workers(range(2))
    policy.join(2)
    assert policy.k == 3
    assert not policy.arrive(Arrival(1, 0, 0)).use
    assert not policy.arrive(Arrival(2, 1, 0)).use
    assert len(policy.arrive(Arrival(3, 2, 0)).use) == 3
    policy.leave(0)
    assert policy.k == 2
    assert not policy.spare


def test_k_stays_and_is_reached_again() -> None:
    policy = parse_policy("k-async:k=2").for_workers(range(2))
    policy.leave(1)
    assert len(policy.arrive(Arrival(1, 0, 0)).use) == 1  # no more than that can come
    policy.join(1)
    assert not policy.arrive(Arrival(2, 0, 1)).use
    assert len(policy.arrive(Arrival(3, 1, 1)).use) == 2


def test_one_who_joins_is_in_the_smallest_group() -> None:
    policy: Any = parse_policy("groups:size=2").for_workers(range(4))
    policy.leave(3)
    policy.join(5)
    assert policy.members == {0: {0, 1}, 1: {2, 5}}
    for rank in (0, 1):
        policy.leave(rank)
    policy.join(6)
    assert policy.members == {0: {6}, 1: {2, 5}}
    assert policy.arrive(Arrival(1, 6, 0)).use


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_newcomer_gets_samples_of_the_running_epoch_and_none_is_given_twice(in_turns: bool) -> None:
    ledger = Ledger([0, 1], in_turns=in_turns)
    ledger.open(0, 0, list(range(40)), [4, 4], drop_last=False)
    for rank in (0, 1):
        ledger.enter(rank, 0)
    taken = [ledger.lease(rank, 0) for rank in (0, 1)]
    ledger.join(2)
    ledger.join(2)
    ledger.enter(2, 0)
    given: dict[int, int] = {0: 0, 1: 0, 2: 0}
    while any(leases := [ledger.lease(rank, 0) for rank in (0, 1, 2)]):
        taken += leases
        for rank, lease in enumerate(leases):
            given[rank] += lease is not None
    assert max(given.values()) - min(given.values()) <= 1
    keys = [key for lease in taken if lease for key in lease.keys]
    assert sorted(keys) == list(range(40))
    ledger.done([lease.number for lease in taken if lease])
    assert ledger.is_over(0)


def test_what_one_leaves_is_for_those_who_still_take_part() -> None:
    orphans = OrphanedSamples(3)
    orphans.begin(0)
    assert orphans.sharers(0) == [0, 1, 2]
    orphans.note(0, [[0], [1], [2]])
    orphans.note(1, [[3], [4], [5]])  # fetched ahead
    orphans.lose({1}, since=0, until=3, takers=[0, 2])
    orphans.note(2, [[6], [7], [8]])  # cut as before, so it may have been fetched elsewhere
    assert orphans.sharers(2) == [0, 1, 2]
    assert orphans.sharers(3) == [0, 2]
    assert orphans.takers == [0, 2]
    assert orphans.take() == [[1], [4], [7]]
    assert orphans.take() == []
    orphans.begin(3)
    assert orphans.sharers(3) == [0, 2]


def test_a_stream_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    path = tmp_path / "streams" / "1.jsonl"
    path.write_bytes(b'{"event":"leave","rank":1,"start":1.0}\n{"event":"lea')
    recorder = Recorder(tmp_path, 1)
    recorder.add(Leave(1, 2.0))
    recorder.close()
    events = [event for part in Reader(path).all() for event in part]
    assert [event.start for event in events] == [1.0, 2.0]


def test_the_rest_of_a_model_travels_whole() -> None:
    ours = [torch.arange(5.0), torch.tensor(3), torch.empty(0), torch.ones(2, 3, dtype=torch.float16)]
    theirs = [torch.zeros_like(tensor) for tensor in ours]
    rest = ModelBuffers(ours)
    memory = Memory.create(rest.size)
    rest.write(memory)
    ModelBuffers(theirs).read(memory)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_worker_that_joins_gets_parts_of_later_rounds_and_cuts_the_earlier_ones_alike() -> None:
    orphans = OrphanedSamples(3)
    orphans.begin(0)
    orphans.note(0, [[0], [1], [2]])
    orphans.lose({1}, since=0, until=1, takers=[0, 2])
    orphans.gain(1, 4)
    newcomer = OrphanedSamples(3)
    newcomer.restore(orphans.state())
    assert newcomer.note(0, [[0], [1], [2]]) == [[0], [1], [2]]
    for one in (orphans, newcomer):
        assert [one.sharers(number) for number in (0, 1, 3, 4)] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
        assert [one.takers_of(number) for number in (3, 4)] == [[0, 2], [0, 1, 2]]
        assert one.note(5, [[7], [8], [9]]) == [[7], [8], [9]]
        assert one.take() == [[1]], "what it has since is its own"
    orphans.lose({1}, since=6, until=7, takers=[0, 1, 2])
    orphans.note(6, [[10], [11], [12]])
    assert (orphans.sharers(7), orphans.takers_of(7), orphans.take()) == ([0, 2], [0, 2], [[11]])
    orphans.gain(1, None)
    assert orphans.sharers(8) == [0, 2], "all rounds of this epoch are cut"
    orphans.begin(9)
    assert orphans.sharers(9) == orphans.takers == [0, 1, 2]


def test_parts_that_were_fetched_far_ahead_are_not_forgotten() -> None:
    orphans = OrphanedSamples(2, ahead=100)
    orphans.begin(0)
    for number in range(100):
        orphans.note(number, [[2 * number], [2 * number + 1]])
    orphans.lose({1}, since=1, until=100, takers=[0])
    assert len(orphans.take()) == 99


def test_parts_of_a_worker_that_is_lost_again_are_left_once() -> None:
    orphans = OrphanedSamples(2)
    orphans.begin(0)
    for number in range(3):  # fetched ahead
        orphans.note(number, [[2 * number], [2 * number + 1]])
    orphans.lose({1}, since=0, until=3, takers=[0])
    orphans.gain(1, 3)
    orphans.note(3, [[6], [7]])
    assert orphans.take() == [[1], [3], [5]]
    orphans.lose({1}, since=1, until=4, takers=[0])
    assert (orphans.take(), orphans.sharers(4)) == ([[7]], [0])


def test_a_worker_that_joins_in_rounds_of_lost_samples_has_parts_of_the_next_epoch() -> None:
    orphans = OrphanedSamples(2)
    orphans.begin(0)
    orphans.note(0, [[0], [1]])
    orphans.lose({1}, since=0, until=1, takers=[0])
    orphans.gain(1, 3)  # the epoch has two rounds, and one more with the lost samples
    orphans.begin(2)
    assert orphans.sharers(2) == orphans.takers == [0, 1]


def test_a_worker_of_a_new_rank_has_parts_from_its_first_round_on() -> None:
    orphans = OrphanedSamples(2)
    orphans.begin(0)
    orphans.note(0, [[0], [1]])
    orphans.gain(3, 2)
    newcomer = OrphanedSamples(2)
    newcomer.restore(orphans.state())
    for one in (orphans, newcomer):
        assert [one.sharers(number) for number in (0, 1, 2)] == [[0, 1], [0, 1], [0, 1, 3]]
        assert (one.takers_of(1), one.takers_of(2)) == ([0, 1], [0, 1, 3])
    orphans.gain(2, None)
    orphans.note(2, [[2], [3], [], [4]])
    orphans.lose({3}, since=2, until=3, takers=[0, 1, 3])
    assert (orphans.take(), orphans.sharers(3)) == ([[4]], [0, 1])
    orphans.begin(4)
    assert orphans.sharers(4) == orphans.takers == [0, 1, 2]
