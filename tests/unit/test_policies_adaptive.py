"""K that grows as the loss falls."""

import itertools
import math

import pytest
from helpers.policy_table import policy
from helpers.policy_team import Team

from paceline.policies import KAsync, KBatchAsync, KBatchSync, KSync, Policy, best_k

KINDS: dict[str, type[Policy]] = {
    "k-sync": KSync,
    "k-batch-sync": KBatchSync,
    "k-async": KAsync,
    "k-batch-async": KBatchAsync,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values())
every_family = pytest.mark.parametrize("family", KINDS)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (KSync, {2: 1.376, 4: 1.871, 10: 2.741, 100: 5.714}),
        *((kind, {2: 1.414, 4: 2.0, 10: 3.162, 100: 8.0}) for kind in (KBatchSync, KAsync, KBatchAsync)),
    ],
)
def test_k_follows_the_published_rule(kind: type[Policy], wanted: dict[int, float]) -> None:
    for fallen, k in wanted.items():
        assert best_k(kind, 1, 8, 2.5, 2.5 / fallen) == pytest.approx(k, abs=5e-4)


@every_kind
@pytest.mark.parametrize(("start", "workers"), [(1, 8), (3, 8), (7, 8), (8, 8), (1, 1), (1, 2), (5, 64)])
def test_k_begins_where_it_was_told_and_ends_at_all_workers(kind: type[Policy], start: int, workers: int) -> None:
    assert best_k(kind, start, workers, 0.7, 0.7) == pytest.approx(start)
    asked = [best_k(kind, start, workers, 0.7, 0.7 / 1.5**n) for n in range(250)]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(asked))
    assert asked[-1] == pytest.approx(workers)
    assert best_k(kind, start, workers, 0.7, 0.0) == workers


@every_family
def test_k_grows_as_the_loss_falls_and_never_shrinks(family: str) -> None:
    adaptive = policy(f"adaptive:of={family}", 8)
    seen = []
    for loss in (2.0, 1.9, 0.5, 3.0, 0.2, 0.02, 0.5, 1e-4, 2.0, 0.0):
        adaptive.observe(loss)
        seen.append(adaptive.k)
    grows = [1, 1, 1, 1, 2, 5, 5, 7, 7, 8] if family == "k-sync" else [1, 1, 2, 2, 3, 8, 8, 8, 8, 8]
    assert seen == grows


@every_family
def test_a_loss_that_is_no_number_changes_nothing(family: str) -> None:
    adaptive = policy(f"adaptive:of={family}", 8)
    for loss in (math.nan, math.inf, -math.inf):
        adaptive.observe(loss)
        assert adaptive.k == 1
    for loss in (8.0, math.nan, 2.0, math.inf, -math.inf):
        adaptive.observe(loss)
    assert adaptive.k == int(best_k(KINDS[family], 1, 8, 8.0, 2.0)) == (1 if family == "k-sync" else 2)


@every_family
@pytest.mark.parametrize(
    "losses",
    [(-1.0, 1.0), (-1.0, -2.0, 0.5), (0.0, 1.0), (1.0, 1e-20), (1.0, 1e-200), (1e308, 1e-308), (1e-308, 1e308)],
)
def test_any_loss_that_is_a_number_leaves_k_one_that_can_be(family: str, losses: tuple[float, ...]) -> None:
    """Some losses are negative, and some fall to almost nothing."""
    adaptive = policy(f"adaptive:of={family}", 8)
    seen = [1]
    for loss in losses:
        adaptive.observe(loss)
        seen.append(adaptive.k)
    assert seen == sorted(seen)
    assert seen[-1] <= 8
    if losses[0] == 1.0:
        assert seen[-1] == pytest.approx(8, abs=1)


@every_family
def test_updates_are_of_the_k_that_has_grown(family: str) -> None:
    team = Team(f"adaptive:of={family}", 4)
    sizes = []
    for loss in (9.0, 1.0, 1e-6):
        team.policy.observe(loss)
        while not (decision := team.push(team.computing[0])).use:
            pass
        sizes.append(len(decision.use))
    assert sizes == ([1, 2, 3] if family == "k-sync" else [1, 3, 4])


def test_groups_hear_of_the_loss_too() -> None:
    groups = policy("groups:size=2,between=adaptive:of=k-async", 8)
    assert groups.k == 1
    groups.observe(4.0)
    groups.observe(1.0)
    assert groups.k == 2


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=2", "async", "ssp:s=1", "groups:size=1"])
def test_other_policies_do_not_listen_to_the_loss(spec: str) -> None:
    one = policy(spec, 3)
    before = one.k
    one.observe(1.0)
    one.observe(1e-9)
    assert one.k == before
