"""A policy that begins as async and goes on as what was chosen."""

import pytest
from helpers.policy_table import policy

from paceline.policies import Arrival, Async, Auto, Decision, KSync, Order, Policy, Sync, parse_policy


def push(auto: Policy, ticket: int, worker: int, version: int) -> Decision:
    return auto.arrive(Arrival(ticket, worker, version))


def test_it_begins_as_async() -> None:
    auto = policy("auto", 3)
    assert isinstance(auto, Auto)
    assert isinstance(auto.inner, Async)
    decision = push(auto, 0, 1, 0)
    assert [one.ticket for one in decision.use] == [0]
    assert decision.orders == {1: Order.RENEW}
    assert (auto.version, auto.k) == (1, 1)
    assert auto.cancels
    assert not auto.chosen


def test_with_the_next_update_it_is_what_was_chosen() -> None:
    auto = Auto().for_workers(range(3))
    push(auto, 0, 0, 0)
    auto.become(KSync(k=2))
    assert isinstance(auto.inner, Async)
    decision = push(auto, 1, 1, 0)
    assert [one.ticket for one in decision.use] == [1]
    # What the others compute is of an older version, which K-sync does not take.
    assert decision.orders == {0: Order.CANCEL, 1: Order.RENEW, 2: Order.CANCEL}
    assert auto.chosen
    assert isinstance(auto.inner, KSync)
    assert (auto.version, auto.k) == (2, 2)
    assert push(auto, 2, 0, 2).orders == {0: Order.WAIT}
    done = push(auto, 3, 2, 2)
    assert [one.ticket for one in done.use] == [2, 3]
    assert auto.version == 3
    assert done.orders == {0: Order.RENEW, 2: Order.RENEW, 1: Order.CANCEL}


def test_a_policy_that_takes_old_gradients_cancels_nobody() -> None:
    auto = Auto().for_workers(range(3))
    auto.become(parse_policy("k-async:k=2"))
    assert push(auto, 0, 0, 0).orders == {0: Order.RENEW}
    assert push(auto, 1, 1, 0).orders == {1: Order.WAIT}
    assert {one.ticket for one in push(auto, 2, 2, 0).use} == {1, 2}


def test_who_has_nothing_to_compute_is_known_afterwards() -> None:
    auto = Auto().for_workers(range(3))
    auto.rest(2)
    auto.become(Sync())
    decision = push(auto, 0, 0, 0)
    assert 2 not in decision.orders
    assert auto.resting == {2}
    assert push(auto, 1, 0, 1).use == ()
    assert len(push(auto, 2, 1, 1).use) == 2  # not three: one rests


def test_who_has_left_is_not_asked_for() -> None:
    auto = Auto().for_workers(range(4))
    auto.leave(3)
    given: list[set[int]] = []

    class Watched(Sync):
        def begin(self) -> None:
            given.append(set(self.workers))
            super().begin()

    auto.become(Watched())
    push(auto, 0, 0, 0)
    assert given == [{0, 1, 2}]
    assert auto.workers == {0, 1, 2}


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=1", "async", "ssp:s=1", "groups:size=2", "k-batch-sync:k=2"])
def test_it_can_spare_whom_the_inner_one_can(spec: str) -> None:
    auto = Auto().for_workers(range(4))
    assert auto.spare
    auto.become(parse_policy(spec))
    push(auto, 0, 0, 0)
    assert auto.spare == policy(spec, 4).spare
