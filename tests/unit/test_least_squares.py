"""The fit of a few parameters finds the minimum, and stays between its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.simulate.least_squares import Numbers, least_squares

WIDE = np.full(2, 100.0)


def test_a_linear_problem_has_its_exact_solution() -> None:
    source = np.random.default_rng(0)
    matrix, target = source.normal(size=(20, 2)), source.normal(size=20)
    found = least_squares(lambda x: matrix @ x - target, np.zeros(2), -WIDE, WIDE)
    exact, (cost,), *_ = np.linalg.lstsq(matrix, target)
    assert found.parameters == pytest.approx(exact)
    assert found.cost == pytest.approx(cost)
    assert found.jacobian == pytest.approx(matrix)


@pytest.mark.parametrize("start", [(-1.2, 1.0), (3.0, -3.0), (0.0, 0.0)])
def test_a_curved_valley_is_followed_to_its_end(start: tuple[float, float]) -> None:
    def valley(x: Numbers) -> Numbers:
        return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    found = least_squares(valley, np.array(start), -WIDE, WIDE)
    assert found.parameters == pytest.approx([1.0, 1.0], abs=1e-6)
    assert found.cost < 1e-10


def test_a_decay_is_found_in_its_noise() -> None:
    times = np.linspace(0, 5, 60)
    seen = 3 * np.exp(-0.7 * times) + 0.01 * np.random.default_rng(1).normal(size=60)
    found = least_squares(lambda x: x[0] * np.exp(-x[1] * times) - seen, np.ones(2), -WIDE, WIDE)
    assert found.parameters == pytest.approx([3.0, 0.7], abs=0.02)


def test_bounds_hold() -> None:
    found = least_squares(lambda x: x - np.array([5.0, 0.5]), np.zeros(2), np.zeros(2), np.ones(2))
    assert found.parameters == pytest.approx([1.0, 0.5])


def test_residuals_that_are_not_finite_are_stepped_back_from() -> None:
    with np.errstate(invalid="ignore", divide="ignore"):
        found = least_squares(lambda x: np.array([np.log(x[0]) + 3, x[1]]), np.array([4.0, 1.0]), -WIDE, WIDE)
    assert found.parameters == pytest.approx([np.exp(-3), 0.0], abs=1e-6)
