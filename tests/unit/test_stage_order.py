"""The stages of a pipeline go through its workers on several machines by the links between these."""

from __future__ import annotations

import pytest

from paceline.collectives.links import LinkMatrix
from paceline.config import parse_strategy
from paceline.errors import UsageError
from paceline.strategies.stage_order import stage_order


def matrix(size: int, *slow: tuple[int, int]) -> LinkMatrix:
    bandwidth = [
        [float("inf") if a == b else 6e6 if (a, b) in slow or (b, a) in slow else 1e8 + a + b for b in range(size)]
        for a in range(size)
    ]
    return LinkMatrix([[1e-4] * size for _ in range(size)], bandwidth)


@pytest.mark.parametrize(
    ("stages", "slow", "order"),
    [
        ([[0, 1, 2]], (), [0, 1, 2]),
        ([[0, 1, 2]], ((0, 1),), [0, 2, 1]),
        ([[0, 1, 2]], ((0, 1), (0, 2)), [0, 1, 2]),  # whatever the order, one of them is crossed
        ([[0, 0, 1, 1]], ((0, 1),), [0, 1, 2, 3]),
        ([[0, 1, 0, 1]], (), [0, 2, 1, 3]),
        ([[0, 1, 2], [3, 4, 5]], ((3, 4),), [0, 2, 1]),  # all replicas have one order
        ([[0, 1]], ((0, 1),), [0, 1]),
    ],
)
def test_neighbours_are_on_one_machine_or_over_a_fast_link(
    stages: list[list[int]], slow: tuple[tuple[int, int], ...], order: list[int]
) -> None:
    said: list[str] = []
    machines = 1 + max(map(max, stages))
    assert stage_order(stages, matrix(machines, *slow), said.append) == order
    assert bool(said) == (order != sorted(order))


@pytest.mark.parametrize("spec", ["pipeline:stages=3,order=0+1", "mesh:data=2,pipeline=2,order=1+0"])
def test_an_order_names_each_place_once_and_begins_with_the_first(spec: str) -> None:
    with pytest.raises(UsageError, match="it must have each number from 0 to"):
        parse_strategy(spec)
