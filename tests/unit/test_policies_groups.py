"""Groups: how members count as one, and what becomes of a group when its members rest, wake and leave."""

import pytest
from helpers.policy_team import Team

from paceline.policies import Decision, Order


def used(decision: Decision) -> list[int]:
    return sorted(push.worker for push in decision.use)


def test_a_group_that_is_complete_is_named_as_one() -> None:
    team = Team("groups:size=2,between=k-async:k=2", 4)
    assert team.push(1).together == ()
    assert [push.worker for push in team.push(0).together] == [0, 1]
    assert team.push(2).together == ()
    assert [push.worker for push in team.push(3).together] == [2, 3]


def test_groups_are_of_neighbours_by_rank() -> None:
    team = Team("groups:size=3", 6)
    for rank in (0, 2, 3, 5):
        assert team.push(rank).use == ()
    assert [push.worker for push in team.push(1).use] == [0, 1, 2]
    assert [push.worker for push in team.push(4).use] == [3, 4, 5]


def test_members_start_together_on_the_version_that_the_group_was_given() -> None:
    team = Team("groups:size=2", 4)
    team.push(0)
    assert team.push(1).orders == {0: Order.RENEW, 1: Order.RENEW}
    team.push(2)
    assert {push.version for push in team.push(3).use} == {0}
    assert [worker.version for worker in team.here.values()] == [1, 1, 2, 2]


def test_a_cancelled_group_starts_anew_and_what_its_members_pushed_is_dropped() -> None:
    team = Team("groups:size=2,between=k-sync:k=1", 4)
    team.push(2)
    team.push(0)
    decision = team.push(1)
    assert used(decision) == [0, 1]
    assert [push.worker for push in decision.drop] == [2]
    assert {decision.orders[2], decision.orders[3]} == {Order.CANCEL}
    assert team.computing == [0, 1, 2, 3]


def test_a_group_too_stale_is_dropped_whole_and_starts_on_the_newest_version() -> None:
    team = Team("groups:size=2,staleness=1", 4)
    for rank in (0, 1, 0, 1, 2):
        team.push(rank)
    decision = team.push(3)
    assert sorted(push.worker for push in decision.drop) == [2, 3]
    assert decision.orders == {2: Order.RENEW, 3: Order.RENEW}
    assert decision.reason == "the gradient of group 1 is 2 updates old, and 1 are allowed"
    team.push(2)
    assert used(team.push(3)) == [2, 3]


def test_a_group_is_as_stale_as_the_oldest_of_its_gradients() -> None:
    team = Team("groups:size=2,staleness=1", 4)
    team.rest(1)
    for rank in (2, 3, 2, 3):
        team.push(rank)
    team.wake(1)
    team.push(1)
    assert sorted(push.version for push in team.push(0).drop) == [0, 2]


# -- rest ------------------------------------------------------------------------------------------------------------


def test_a_group_is_complete_without_members_that_rest() -> None:
    team = Team("groups:size=3", 6)
    team.push(0)
    team.rest(1)
    assert used(team.rest(2)) == [0]
    assert used(team.push(0)) == [0]
    team.rest(0)
    team.push(3)
    team.push(4)
    assert used(team.push(5)) == [3, 4, 5]


def test_a_group_at_rest_is_not_waited_for() -> None:
    team = Team("groups:size=2,between=k-async:k=2", 4)
    team.push(2)
    team.push(3)
    team.rest(0)
    assert team.waiting == {2, 3}
    assert used(team.rest(1)) == [2, 3]
    assert team.waiting == set()


@pytest.mark.parametrize("between", ["k-sync:k=2", "k-async:k=2", "ssp:s=0"])
def test_a_member_that_wakes_while_its_group_waits_does_not_make_the_group_push_twice(between: str) -> None:
    team = Team(f"groups:size=2,between={between}", 4)
    team.push(0)
    team.rest(1)
    assert team.waiting == {0}
    version = team.version
    team.wake(1)
    decision = team.push(1)
    assert decision.use == ()
    assert team.version == version
    team.push(2)
    assert set(used(team.push(3))) <= {0, 2, 3}
    assert team.computing == [0, 1, 2, 3]


# -- leave -----------------------------------------------------------------------------------------------------------


def test_a_group_is_complete_without_members_that_have_gone() -> None:
    team = Team("groups:size=2", 4)
    team.push(0)
    assert used(team.leave(1)) == [0]
    assert used(team.push(0)) == [0]


def test_a_group_of_which_all_have_gone_is_not_waited_for() -> None:
    team = Team("groups:size=2,between=k-async:k=2", 4)
    team.push(2)
    team.push(3)
    team.leave(0)
    assert used(team.leave(1)) == [2, 3]


@pytest.mark.parametrize("between", ["sync", "k-async:k=2"])
def test_a_group_is_not_waited_for_when_only_members_at_rest_are_left_of_it(between: str) -> None:
    team = Team(f"groups:size=2,between={between}", 4)
    team.push(2)
    team.push(3)
    team.rest(0)
    assert used(team.leave(1)) == [2, 3]
    assert team.waiting == set()


def test_what_a_member_pushed_before_it_left_counts_with_its_group() -> None:
    team = Team("groups:size=2", 4)
    team.push(0)
    team.leave(0)
    assert used(team.push(1)) == [0, 1]


def test_what_a_member_pushed_before_it_left_counts_if_the_other_rests() -> None:
    team = Team("groups:size=2", 4)
    team.push(0)
    team.leave(0)
    assert used(team.rest(1)) == [0]


def test_what_a_member_pushed_before_it_left_counts_if_the_other_leaves_too() -> None:
    team = Team("groups:size=2", 4)
    team.push(0)
    team.leave(0)
    assert used(team.leave(1)) == [0]


def test_what_a_member_pushed_before_it_left_is_dropped_if_its_group_is_cancelled() -> None:
    team = Team("groups:size=2,between=k-sync:k=1", 4)
    team.push(0)
    team.leave(0)
    team.push(2)
    assert [push.worker for push in team.push(3).drop] == [0]
    assert team.open == {}
