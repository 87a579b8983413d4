"""Nonlinear least squares by the Levenberg-Marquardt method, for a handful of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_STEPS = 200
"""The most steps; a fit takes about ten."""
_SMALL = 1e-9
"""Relative change of the parameters below which the fit is done."""
_DIFFERENCE = 6e-6
"""Step of a central difference, relative to the parameter."""


class Fit(NamedTuple):
    """The parameters of the least squares."""

    parameters: Numbers
    jacobian: Numbers
    """Derivatives of the residuals by the parameters."""
    cost: float
    """The sum of the squares."""


def least_squares(residuals: Callable[[Numbers], Numbers], start: Numbers, low: Numbers, high: Numbers) -> Fit:
    """Minimises the sum of squared residuals from a start, between bounds.

    Every step solves the linearised problem, damped so far that the sum falls: a small step down the slope where the
    problem is far from linear, a Newton step close to the minimum.
    """
    at = np.clip(start, low, high)
    found = residuals(at)
    cost, damping, worse = float(found @ found), 1e-3, 2.0
    jacobian = _jacobian(residuals, at)
    for _ in range(_STEPS):
        step = _step(jacobian, found, damping, at, low, high)
        if float(np.linalg.norm(step)) <= _SMALL * (1 + float(np.linalg.norm(at))):
            break
        trial, expected = residuals(at + step), found + jacobian @ step
        lower = float(trial @ trial)
        if not lower < cost:  # also where it is not a number
            damping, worse = damping * worse, 2 * worse
            continue
        gained = min(1.0, (cost - lower) / max(cost - float(expected @ expected), 1e-300))
        damping, worse = max(1e-12, damping * max(1 / 3, 1 - (2 * gained - 1) ** 3)), 2.0
        at, found, cost = at + step, trial, lower
        jacobian = _jacobian(residuals, at)
    return Fit(at, jacobian, cost)


def _step(jacobian: Numbers, found: Numbers, damping: float, at: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """The damped step of the linearised problem; parameters that it would take over a bound stay there."""
    slope, curvature = jacobian.T @ found, jacobian.T @ jacobian
    free = ~(((at <= low) & (slope > 0)) | ((at >= high) & (slope < 0)))
    step = np.zeros_like(at)
    inner = curvature[np.ix_(free, free)]
    step[free] = -np.linalg.solve(inner + damping * np.eye(len(inner)), slope[free])
    return np.asarray(np.clip(at + step, low, high) - at)


def _jacobian(residuals: Callable[[Numbers], Numbers], at: Numbers) -> Numbers:
    columns = []
    for index, value in enumerate(at.tolist()):
        step = np.zeros_like(at)
        step[index] = _DIFFERENCE * max(1.0, abs(value))
        columns.append((residuals(at + step) - residuals(at - step)) / (2 * step[index]))
    return np.stack(columns, axis=1)
