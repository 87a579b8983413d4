"""What holds in every run under every policy, whoever pushes, rests, wakes or leaves."""

import random

import pytest
from helpers.policy_team import Team
from hypothesis import given, settings
from hypothesis import strategies as st

PLAIN = [
    ("sync", 1),
    ("sync", 3),
    ("k-sync:k=1", 3),
    ("k-sync:k=2", 4),
    ("k-batch-sync:k=1", 2),
    ("k-batch-sync:k=3", 3),
    ("async", 3),
    ("k-async:k=2", 3),
    ("k-async:k=4", 4),
    ("k-batch-async:k=1", 2),
    ("k-batch-async:k=3", 4),
    ("ssp:s=0", 3),
    ("ssp:s=2", 3),
]
ADAPTIVE = [
    ("adaptive:of=k-sync", 4),
    ("adaptive:of=k-batch-sync", 3),
    ("adaptive:of=k-async,start=2", 4),
    ("adaptive:of=k-batch-async", 3),
]
GROUPS = [
    ("groups:size=1,between=k-async:k=2", 3),
    ("groups:size=2", 4),
    ("groups:size=2,staleness=0", 4),
    ("groups:size=2,between=sync", 4),
    ("groups:size=2,between=k-sync:k=1", 4),
    ("groups:size=2,between=k-sync:k=2", 6),
    ("groups:size=2,between=k-batch-sync:k=2", 4),
    ("groups:size=2,between=k-async:k=2", 4),
    ("groups:size=3,between=k-async:k=2,staleness=1", 6),
    ("groups:size=2,between=k-batch-async:k=2", 4),
    ("groups:size=2,between=ssp:s=0", 4),
    ("groups:size=2,between=ssp:s=1", 6),
    ("groups:size=3,between=async", 3),
]
EVERY = PLAIN + ADAPTIVE + GROUPS
every = pytest.mark.parametrize(("spec", "workers"), EVERY)
short_runs = st.lists(st.integers(0, 239), max_size=25)


@every
def test_every_push_is_used_once_or_dropped_once_or_held(spec: str, workers: int) -> None:
    """The team checks it at every push, and that versions rise by one and that updates are of K."""
    team = Team(spec, workers)
    source = random.Random(1)
    for _ in range(1500):
        if team.computing:
            team.push(source.choice(team.computing), late=source.random() < 0.2)
    assert team.version > 1500 / (4 * workers)
    assert len(team.open) < 2 * workers


@every
def test_what_a_policy_says_it_holds_is_what_has_come_and_was_not_used(spec: str, workers: int) -> None:
    team = Team(spec, workers)
    source = random.Random(2)
    for _ in range(200):
        team.push(source.choice(team.computing))
        assert sorted(push.ticket for push in team.policy.held) == sorted(team.open)


@every
@settings(max_examples=12)
@given(events=short_runs)
def test_nobody_waits_for_ever_whoever_rests_between_steps(spec: str, workers: int, events: list[int]) -> None:
    team = Team(spec, workers)
    team.live(events, leave=False)
    held_up = team.waiting - team.resting
    team.released.clear()
    team.all_push_in_turn(rounds=3 * workers + 3)
    assert held_up <= team.released
    team.end_epoch(events)


@every
@settings(max_examples=20)
@given(events=short_runs)
def test_nobody_waits_for_ever_when_workers_leave(spec: str, workers: int, events: list[int]) -> None:
    team = Team(spec, workers)
    team.live(events)
    held_up = team.waiting - team.resting
    team.released.clear()
    team.all_push_in_turn(rounds=3 * workers + 3)
    assert held_up <= team.released
    team.end_epoch(events)


@every
@settings(max_examples=12)
@given(events=short_runs)
def test_a_worker_that_waits_may_be_given_rest_too(spec: str, workers: int, events: list[int]) -> None:
    """The last samples are given out while somebody waits: all rest at once, and nothing stays behind."""
    team = Team(spec, workers)
    team.live(events, rest_at_any_time=True)
    for rank in team.active:
        team.rest(rank)
    assert team.open == {}
    assert team.waiting == set() == team.policy.waiting
    team.begin_epoch(reversed(list(team.here)))
    assert team.computing == sorted(team.here)
    team.all_push_in_turn(rounds=2)
    team.end_epoch()


@every
def test_long_runs_of_many_epochs_lose_nothing(spec: str, workers: int) -> None:
    team = Team(spec, workers)
    source = random.Random(3)
    for _ in range(12):
        team.live((source.randrange(240) for _ in range(100)), leave=False)
        team.end_epoch(source.randrange(60) for _ in range(100))
        team.begin_epoch(source.sample(range(workers), workers))
    assert team.computing == list(range(workers))


# -- the end of an epoch, one by one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=3", "k-async:k=3"])
def test_who_waits_is_let_go_when_the_others_have_nothing_left_to_compute(spec: str) -> None:
    team = Team(spec, 3)
    team.push(0)
    assert team.rest(1).use == ()
    decision = team.rest(2)
    assert [push.worker for push in decision.use] == [0]
    assert team.computing == [0]


@pytest.mark.parametrize("spec", ["k-batch-sync:k=3", "k-batch-async:k=3"])
def test_minibatches_that_are_too_few_are_used_when_nobody_computes_any_more(spec: str) -> None:
    team = Team(spec, 3)
    team.push(0)
    team.push(0)
    assert team.rest(1).use == team.rest(2).use == ()
    assert [push.worker for push in team.rest(0).use] == [0, 0]


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=2", "k-async:k=2", "k-batch-sync:k=2", "k-batch-async:k=2"])
def test_what_a_worker_pushed_before_it_left_still_counts(spec: str) -> None:
    team = Team(spec, 2)
    team.push(0)
    assert team.leave(0).use == ()
    assert [push.worker for push in team.push(1).use] == [0, 1]


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=2", "k-async:k=2", "k-batch-sync:k=2", "k-batch-async:k=2"])
def test_nothing_is_updated_when_nothing_has_come(spec: str) -> None:
    team = Team(spec, 2)
    assert team.leave(0).use == team.rest(1).use == ()


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=2", "k-async:k=2", "ssp:s=0"])
def test_a_worker_in_place_of_a_lost_one_is_waited_for(spec: str) -> None:
    team = Team(spec, 2)
    team.leave(1)
    team.push(0)
    team.here[1] = type(team.here[0])(team.version)
    team.policy.join(1)
    team.push(0)
    assert team.waiting == {0}
    team.push(1)
    assert team.waiting == set()


# -- the bound of ssp ------------------------------------------------------------------------------------------------


def keeps_the_bound(team: Team, s: int, source: random.Random, pushes: int) -> None:
    """From where all begin level: whoever computes its step n, all have finished n - 1 - s."""
    finished = dict.fromkeys(team.here, 0)
    for _ in range(pushes):
        rank = source.choice(team.computing)
        team.push(rank)
        finished[rank] += 1
        assert all(finished[one] - s <= min(finished.values()) for one in team.computing), finished


@pytest.mark.parametrize("s", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_nobody_starts_a_step_too_far_ahead_of_the_slowest(workers: int, s: int) -> None:
    team = Team(f"ssp:s={s}", workers)
    keeps_the_bound(team, s, random.Random(s), 2000)


@pytest.mark.parametrize("s", [0, 1, 3])
def test_a_slowest_worker_holds_up_the_others_after_so_many_steps(s: int) -> None:
    team = Team(f"ssp:s={s}", 3)
    for rank in (0, 1):
        while rank in team.computing:
            team.push(rank)
    assert team.version == 2 * (s + 1)
    assert team.push(2).orders.keys() == {0, 1, 2}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("s", [0, 1])
def test_in_a_new_epoch_one_step_of_a_worker_that_rested_is_enough(s: int, order: tuple[int, int]) -> None:
    """One did many steps while the other had none to compute: that is no debt, but the bound holds at the border."""
    team = Team(f"ssp:s={s}", 2)
    team.rest(1)
    for _ in range(5):
        team.push(0)
    team.rest(0)
    team.begin_epoch(order)
    assert [team.policy.may_begin(rank) for rank in (0, 1)] == [False, True]
    team.push(1)
    assert team.policy.may_begin(0)


def test_a_worker_that_wakes_is_not_waited_for_longer_than_the_others() -> None:
    team = Team("ssp:s=1", 3)
    team.rest(2)
    for _ in range(10):
        team.push(0)
        team.push(1)
    team.wake(2)
    assert team.push(0).orders[0].value == "wait"  # it counts as two steps behind, and this is the third
    team.push(1)
    assert team.waiting == {0, 1}
    team.push(2)
    team.push(2)
    assert team.waiting == set()
