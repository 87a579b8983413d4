import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.split import even, proportional, scaled

workers = st.integers(1, 12)
totals = st.integers(0, 3000)
paces = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12)


@given(totals, workers)
def test_an_even_split_gives_everything_away_and_differs_by_one_at_most(total: int, size: int) -> None:
    shares = even(total, size)
    assert len(shares) == size
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(totals, paces)
def test_a_proportional_split_gives_everything_away(total: int, speeds: list[float]) -> None:
    shares = proportional(total, speeds)
    assert len(shares) == len(speeds)
    assert sum(shares) == total
    assert min(shares) >= 0


@given(totals, paces)
def test_everybody_gets_a_sample_if_there_are_enough(total: int, speeds: list[float]) -> None:
    assert min(proportional(total, speeds)) >= 1 or total < len(speeds)


@given(totals, paces)
def test_a_share_is_within_one_sample_of_its_proportion(total: int, speeds: list[float]) -> None:
    exact = [total * speed / sum(speeds) for speed in speeds]
    if min(exact) < 1:
        return
    shares = proportional(total, speeds)
    assert all(abs(share - wanted) < 1 + 1e-9 for share, wanted in zip(shares, exact, strict=True))


@given(totals, paces)
def test_whoever_is_faster_never_gets_less(total: int, speeds: list[float]) -> None:
    shares = proportional(total, speeds)
    if total <= len(speeds):
        return
    by_pace = sorted(zip(speeds, shares, strict=True))
    for (slow, few), (fast, many) in itertools.pairwise(by_pace):
        assert few <= many or slow == fast


@given(totals, paces, st.floats(0.1, 10.0))
def test_only_the_proportion_of_paces_counts(total: int, speeds: list[float], factor: float) -> None:
    before, after = proportional(total, speeds), proportional(total, [speed * factor for speed in speeds])
    assert all(abs(one - other) <= 1 for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("total", "speeds", "shares"),
    [
        (100, [4.0, 1.0], [80, 20]),
        (10, [1.0, 1.0, 1.0], [4, 3, 3]),
        (10, [1000.0, 1.0, 1.0], [8, 1, 1]),
        (7, [1.0, 2.0, 4.0], [1, 2, 4]),
        (3, [9.0, 1.0, 1.0], [1, 1, 1]),
        (8, [1.0, 0.0], [4, 4]),
        (0, [2.0, 1.0], [0, 0]),
    ],
)
def test_proportions_come_out_as_one_would_say(total: int, speeds: list[float], shares: list[int]) -> None:
    assert proportional(total, speeds) == shares


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(0, 1600))
def test_a_last_batch_keeps_the_proportions(shares: list[int], total: int) -> None:
    parts = scaled(shares, total)
    assert sum(parts) == total
    assert min(parts) >= 1 or total < len(shares)
    exact = [total * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(part - wanted) < 1 + 1e-9 for part, wanted in zip(parts, exact, strict=True))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_a_full_batch_is_split_exactly_as_the_shares_say(shares: list[int]) -> None:
    assert scaled(shares, sum(shares)) == shares
