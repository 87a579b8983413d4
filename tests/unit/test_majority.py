"""Of a team over machines at most one part goes on by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from paceline.transport.majority import Membership

MACHINES = range(5)


def _parts(of: Iterable[int]) -> list[frozenset[int]]:
    machines = list(of)
    return [frozenset(part) for size in range(len(machines) + 1) for part in itertools.combinations(machines, size)]


def _goes_on(membership: Membership, part: frozenset[int], left: frozenset[int]) -> bool:
    return membership.votes(part, left, {rank: rank for rank in MACHINES})[2]


@pytest.mark.parametrize("size", range(1, 6))
def test_of_two_parts_at_most_one_goes_on_whatever_each_knows_of_those_who_left(size: int) -> None:
    membership = Membership(frozenset(range(size)), 0)
    for left in _parts(membership.ranks):
        there = membership.ranks - left
        for part in _parts(there):
            for known, other_known in itertools.product(_parts(left), repeat=2):
                both = _goes_on(membership, part, known) and _goes_on(membership, there - part, other_known)
                assert not both, (left, part)


def test_the_larger_part_goes_on_and_of_two_halves_that_of_the_hub() -> None:
    membership = Membership(frozenset({0, 1, 2, 3}), 1)
    assert _goes_on(membership, frozenset({0, 2, 3}), frozenset())
    assert _goes_on(membership, frozenset({1, 2}), frozenset())
    assert not _goes_on(membership, frozenset({0, 3}), frozenset())
    assert not _goes_on(membership, frozenset({1}), frozenset())


def test_machines_that_all_have_left_do_not_count() -> None:
    membership = Membership(frozenset({0, 1, 2}), 0)
    assert membership.votes({2}, {0, 1}, {0: 0, 1: 1, 2: 2}) == (1, 1, True)
    assert membership.votes({2}, {0}, {0: 0, 1: 1, 2: 2}) == (1, 2, False)


def test_a_machine_counts_while_one_of_its_workers_is_there() -> None:
    machine_of = {0: 0, 1: 0, 2: 1, 3: 2}
    assert Membership(frozenset(machine_of), 0).votes({1, 2}, (), machine_of) == (2, 3, True)
