"""Each policy against its row of the table, and against the policies that it equals."""

import math
import random
from collections.abc import Callable

import pytest
from helpers.policy_table import (
    AdaptiveRow,
    AsyncRow,
    GroupsRow,
    KAsyncRow,
    KBatchAsyncRow,
    KBatchSyncRow,
    KSyncRow,
    Row,
    SspRow,
    policy,
    tickets,
    walk,
)
from helpers.policy_team import Team

from paceline import config, policies
from paceline.errors import UsageError
from paceline.policies import Arrival, Groups, Order, parse_policy

FAMILIES: dict[str, Callable[[int, int], Row]] = {
    "k-sync": KSyncRow,
    "k-batch-sync": KBatchSyncRow,
    "k-async": KAsyncRow,
    "k-batch-async": KBatchAsyncRow,
}
DEPTH = {1: 12, 2: 12, 3: 9, 4: 7}
"""How many arrivals are tried in every order, by the number of workers."""

# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("workers", DEPTH)
def test_a_policy_with_k_does_what_the_table_says_in_every_order_of_arrivals(family: str, workers: int) -> None:
    most = 2 * workers + 1 if "batch" in family else workers  # it counts minibatches: more than one of each worker
    for k in range(1, most + 1):
        walk(policy(f"{family}:k={k}", workers), FAMILIES[family](workers, k), DEPTH[workers])


@pytest.mark.parametrize("workers", DEPTH)
def test_backup_is_k_sync_without_the_last_workers_in_every_order_of_arrivals(workers: int) -> None:
    for b in range(workers):
        walk(policy(f"backup:b={b}", workers), KSyncRow(workers, workers - b), DEPTH[workers])


@pytest.mark.parametrize("workers", DEPTH)
def test_sync_does_what_the_table_says_in_every_order_of_arrivals(workers: int) -> None:
    walk(policy("sync", workers), KSyncRow(workers, workers), 12)


@pytest.mark.parametrize("workers", DEPTH)
def test_async_does_what_the_table_says_in_every_order_of_arrivals(workers: int) -> None:
    walk(policy("async", workers), AsyncRow(workers), DEPTH[workers])


@pytest.mark.parametrize("workers", DEPTH)
@pytest.mark.parametrize("s", [0, 1, 2])
def test_ssp_does_what_the_table_says_in_every_order_of_arrivals(s: int, workers: int) -> None:
    walk(policy(f"ssp:s={s}", workers), SspRow(workers, s), DEPTH[workers])


@pytest.mark.parametrize("staleness", [None, 0, 1])
@pytest.mark.parametrize(
    ("between", "row"),
    [
        ("async", AsyncRow(2)),
        ("sync", KSyncRow(2, 2)),
        ("k-sync:k=1", KSyncRow(2, 1)),
        ("k-sync:k=2", KSyncRow(2, 2)),
        ("k-batch-sync:k=2", KBatchSyncRow(2, 2)),
        ("k-async:k=1", KAsyncRow(2, 1)),
        ("k-async:k=2", KAsyncRow(2, 2)),
        ("k-batch-async:k=2", KBatchAsyncRow(2, 2)),
        ("ssp:s=0", SspRow(2, 0)),
        ("ssp:s=1", SspRow(2, 1)),
        ("ssp:s=2", SspRow(2, 2)),
    ],
)
@pytest.mark.parametrize(("size", "sizes"), [(2, [2, 2]), (2, [2, 1]), (3, [3, 2])])
def test_groups_do_what_the_table_says_in_every_order_of_arrivals(
    size: int, sizes: list[int], between: str, row: Row, staleness: int | None
) -> None:
    bound = "" if staleness is None else f",staleness={staleness}"
    wanted = GroupsRow(sizes, row.clone(), math.inf if staleness is None else staleness)
    walk(policy(f"groups:size={size},between={between}{bound}", sum(sizes)), wanted, 10 if sum(sizes) < 5 else 7)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adaptive_policy_does_what_the_table_says_while_the_loss_falls(family: str, workers: int) -> None:
    for start in range(1, workers + 1):
        adaptive = policy(f"adaptive:of={family},start={start}", workers)
        walk(adaptive, AdaptiveRow(FAMILIES[family](workers, start)), 9, losses=2.5)


def test_the_walk_finds_a_policy_that_is_wrong() -> None:
    """Else it would prove nothing: rows of the table are unlike each other, and so is K."""
    rows = {f"{family}:k={k}": row(3, k) for family, row in FAMILIES.items() for k in (2, 3)}
    rows |= {"async": AsyncRow(3), "ssp:s=0": SspRow(3, 0), "ssp:s=1": SspRow(3, 1)}
    for spec in rows:
        for other, row in rows.items():
            if spec == other:
                walk(policy(spec, 3), row.clone(), 5)
            elif {spec, other} != {"k-sync:k=3", "k-async:k=3"}:
                with pytest.raises(AssertionError):
                    walk(policy(spec, 3), row.clone(), 5)


# -- policies that are equal -----------------------------------------------------------------------------------------


def race(one: str, other: str, workers: int, *, leave: bool = True) -> None:
    """Both see the same events, and say the same."""
    first, second = Team(one, workers), Team(other, workers)
    source = random.Random(f"{one} {other}")
    for _ in range(6):
        for _ in range(100):
            number = source.randrange(240)
            first.live([number], leave=leave)
            second.live([number], leave=leave)
            assert (first.version, first.open, first.here) == (second.version, second.open, second.here)
            assert (first.pushed, first.waiting) == (second.pushed, second.waiting)
        picks = [source.randrange(60) for _ in range(3 * workers)]
        for team in (first, second):
            team.end_epoch(picks)
            team.begin_epoch()
    assert first.version > 0


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_sync_is_k_sync_of_all(workers: int) -> None:
    race("sync", f"k-sync:k={workers}", workers)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_k_async_of_all_makes_the_updates_of_sync(workers: int) -> None:
    race("sync", f"k-async:k={workers}", workers, leave=False)


@pytest.mark.parametrize("other", ["k-async:k=1", "k-batch-async:k=1"])
@pytest.mark.parametrize("workers", [1, 3])
def test_async_is_its_k_forms_with_k_of_one(other: str, workers: int) -> None:
    race("async", other, workers)


def test_under_ssp_a_worker_that_had_nothing_to_compute_is_waited_for_again() -> None:
    running = policy("ssp:s=2", 2)
    for ticket in range(3):
        last = running.arrive(Arrival(ticket, 0, ticket))
    assert last.orders == {0: Order.WAIT}
    assert running.rest(1).orders == {0: Order.RENEW}, "the epoch is over for worker 1"
    running.wake(1)
    assert not running.may_begin(0), "it is three steps ahead of worker 1, which has samples again"
    assert running.may_begin(1)
    running.arrive(Arrival(4, 1, 3))
    assert running.may_begin(0)


def test_under_ssp_a_worker_that_rested_for_long_need_not_catch_up() -> None:
    running = policy("ssp:s=2", 2)
    running.rest(1)
    for ticket in range(50):
        assert running.arrive(Arrival(ticket, 0, ticket)).orders == {0: Order.RENEW}
    running.wake(1)
    assert not running.may_begin(0)
    running.arrive(Arrival(50, 1, 50))
    assert running.may_begin(0), "one step is enough"


@pytest.mark.parametrize(
    "between", ["async", "sync", "k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2", "ssp:s=1"]
)
def test_groups_of_one_are_the_policy_between_them(between: str) -> None:
    race(between, f"groups:size=1,between={between}", 4)


@pytest.mark.parametrize("between", ["async", "sync", "k-sync:k=1", "k-batch-async:k=1", "ssp:s=0"])
def test_one_group_of_all_is_sync(between: str) -> None:
    race("sync", f"groups:size=3,between={between}", 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adaptive_policy_is_its_inner_one_until_it_hears_of_a_loss(family: str) -> None:
    race(f"{family}:k=2", f"adaptive:of={family},start=2", 3)


# -- what can be lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "workers", "spare"),
    [
        ("sync", 1, False),
        ("sync", 3, False),
        ("k-sync:k=3", 3, False),
        ("k-sync:k=2", 3, True),
        ("k-async:k=3", 3, False),
        ("k-async:k=1", 3, True),
        ("k-batch-sync:k=3", 3, True),
        ("k-batch-sync:k=1", 1, False),
        ("k-batch-async:k=3", 3, True),
        ("async", 2, True),
        ("async", 1, False),
        ("ssp:s=0", 2, True),
        ("ssp:s=0", 1, False),
        ("groups:size=2", 4, True),
        ("groups:size=2,between=sync", 4, False),
        ("groups:size=2,between=k-async:k=1", 4, True),
        ("groups:size=4", 4, False),
        ("adaptive:of=k-sync", 3, True),
        ("adaptive:of=k-async,start=3", 3, False),
        ("adaptive:of=k-batch-sync,start=3", 3, True),
        ("adaptive:of=k-batch-async,start=3", 3, True),
        ("adaptive:of=k-batch-async", 1, False),
    ],
)
def test_a_run_survives_a_lost_worker_only_if_it_need_not_wait_for_all(spec: str, workers: int, spare: bool) -> None:
    assert policy(spec, workers).spare is spare


@pytest.mark.parametrize("spec", ["k-sync:k=2", "k-async:k=2", "async", "groups:size=1"])
def test_what_was_spare_once_stays_so_when_workers_go(spec: str) -> None:
    team = Team(spec, 3)
    team.leave(0)
    team.leave(1)
    assert team.policy.spare


@pytest.mark.parametrize(
    ("spec", "lockstep"),
    [
        ("sync", True),
        ("k-sync:k=4", True),
        ("k-sync:k=3", False),
        ("k-async:k=4", True),
        ("k-async:k=1", False),
        ("k-batch-sync:k=4", False),
        ("k-batch-async:k=4", False),
        ("async", False),
        ("ssp:s=0", False),
        ("groups:size=4", True),
        ("groups:size=2,between=sync", True),
        ("groups:size=2,between=k-sync:k=1", False),
        ("groups:size=2", False),
        ("adaptive:of=k-sync", False),
    ],
)
def test_a_run_can_be_repeated_only_if_every_update_is_of_one_gradient_from_each(spec: str, lockstep: bool) -> None:
    assert policy(spec, 4).lockstep is lockstep


# -- reasons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "pushes", "reason"),
    [
        ("sync", [0], "1 of 2 workers' gradients are here"),
        ("k-batch-sync:k=2", [0, 0], "2 of 2 minibatches are here"),
        ("async", [0], "every gradient is an update"),
        ("k-async:k=2", [0], "1 of 2 workers have pushed"),
        ("k-batch-async:k=2", [0], "1 of 2 minibatches are here"),
        ("ssp:s=0", [0], "every gradient is an update; its worker is 1 steps ahead of the slowest, and 0 are allowed"),
        ("groups:size=2", [1], "1 of 2 of group 0 have pushed"),
    ],
)
def test_a_reason_says_what_the_policy_counted(spec: str, pushes: list[int], reason: str) -> None:
    team = Team(spec, 2)
    assert [team.push(rank).reason for rank in pushes][-1] == reason


def test_a_gradient_that_is_dropped_is_told_why() -> None:
    team = Team("k-sync:k=1", 2)
    team.push(0)
    decision = team.push(1, late=True)
    assert tickets(decision.drop) == [1]
    assert decision.reason == "computed on version 0, and version 1 is the newest"


def test_who_left_is_named() -> None:
    assert "worker 3 has gone" in Team("groups:size=1,between=k-async:k=4", 4).leave(3).reason
    groups = Team("groups:size=2", 4)
    groups.leave(2)
    assert "worker 3 has gone" in groups.leave(3).reason


# -- what can not be -------------------------------------------------------------------------------------------------


def one_sentence(error: UsageError, strategy: config.Strategy) -> str:
    message = str(error)
    assert message.startswith(f"strategy '{strategy}': ")
    assert "\n" not in message
    assert not message.endswith(".")
    return message.removeprefix(f"strategy '{strategy}': ")


@pytest.mark.parametrize(
    ("spec", "workers", "about"),
    [
        ("k-sync:k=0", 2, "k is 0, with 2 workers; it must be a whole number from 1 to 2"),
        ("k-sync:k=3", 2, "k is 3, with 2 workers; it must be a whole number from 1 to 2"),
        ("k-batch-sync:k=-1", 2, "k is -1; it must be a whole number of at least 1"),
        ("k-async:k=2", 1, "k is 2, with 1 workers; it must be 1"),
        ("k-batch-async:k=0", 8, "k is 0; it must be a whole number of at least 1"),
        ("ssp:s=-1", 2, "s is -1; it must be a whole number of steps, 0 or more"),
        ("backup:b=2", 2, "b is 2, with 2 workers; it must be a whole number from 0 to 1"),
        ("backup:b=-1", 2, "b is -1, with 2 workers"),
        ("groups:size=0", 4, "size is 0"),
        ("groups:size=-2", 4, "size is -2"),
        ("groups:size=8", 4, "size is 8, with 4 workers; it must be a whole number from 1 to 4"),
        ("groups:size=2,between=k-sync:k=3", 4, "k is 3, with 2"),
        ("groups:size=2,staleness=-1", 4, "staleness is -1"),
        ("adaptive:start=0", 2, "start is 0, with 2 workers; it must be a whole number from 1 to 2"),
        ("adaptive:of=k-sync,start=3", 2, "start is 3, with 2 workers"),
        ("sync", 0, "a policy needs at least one worker"),
        ("groups:size=1", 0, "a policy needs at least one worker"),
        ("all-reduce", 2, "policy"),
    ],
)
def test_a_policy_that_can_not_be_is_one_sentence(spec: str, workers: int, about: str) -> None:
    strategy = config.parse_strategy(spec)
    with pytest.raises(UsageError) as caught:
        parse_policy(strategy).for_workers(range(workers))
    assert about in one_sentence(caught.value, strategy)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (policies.KSync, "k"),
        (policies.KBatchSync, "k"),
        (policies.KAsync, "k"),
        (policies.KBatchAsync, "k"),
        (policies.Backup, "b"),
        (policies.Ssp, "s"),
        (policies.Groups, "size"),
        (policies.Adaptive, "start"),
    ],
)
def test_what_is_no_whole_number_is_refused(kind: Callable[..., config.Strategy], option: str, value: object) -> None:
    strategy = kind(**{option: value})
    with pytest.raises(UsageError) as caught:
        parse_policy(strategy).for_workers(range(2))
    assert one_sentence(caught.value, strategy).startswith(f"{option} is {value!r}")


def test_a_newcomer_comes_into_the_smallest_group() -> None:
    groups = policy("groups:size=2", 4)
    assert isinstance(groups, Groups)
    groups.leave(2)
    groups.join(4)
    assert groups.group_of[4] == 1
    assert groups.members == {0: {0, 1}, 1: {3, 4}}
