"""How fast the loss falls, by updates, gradients per update and staleness: learned from short runs.

After n updates of K gradients each, on average tau updates old, the loss is taken to be

    floor + noise / K + height * (1 + x / scale) ** -power,    x = n * K ** gain / (1 + penalty * tau)

More gradients in an update make its direction better (gain; 0 would be no use, 1 as good as that many updates) and
leave less noise at the end; stale ones are worth less (penalty). What short runs do not tell stays near what is usual,
and is uncertain accordingly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.simulate.calibrate import Calibration
from paceline.simulate.result import Result

Numbers = NDArray[np.float64]

_POINTS = 40
"""Means of the loss that a run gives, at most."""
_SAMPLES = 400
"""Of what the parameters may be."""
_USUAL = {"power": (0.0, 0.4), "gain": (-0.7, 1.0), "penalty": (math.log(0.05), 1.2), "noise": (math.log(0.02), 1.0)}
"""Mean and spread before anything is known: logarithms, but of the gain, which is as logarithm of its odds."""


class Reached(msgspec.Struct, frozen=True):
    """When a loss is reached: what is likely, and what lies in 95 of 100 cases; None is never."""

    seconds: float | None
    low: float | None
    high: float | None
    updates: float | None


@dataclasses.dataclass(frozen=True)
class ObservedRun:
    """The losses of one run."""

    versions: Numbers
    losses: Numbers
    errors: Numbers
    gradients: float
    """Per update."""
    staleness: float


class Convergence:
    """What may be true of a model's training, as samples."""

    def __init__(self, best: Numbers, samples: Numbers, unit: float) -> None:
        self._best, self._samples, self._unit = best, samples, unit

    def loss(self, updates: Numbers, gradients: float, staleness: float) -> Numbers:
        """After so many updates, at best guess."""
        return _loss(self._best, updates, gradients, staleness, self._unit)

    def band(self, updates: Numbers, gradients: float, staleness: float) -> tuple[Numbers, Numbers]:
        """Between which the loss lies in 95 of 100 cases."""
        every = np.stack([_loss(one, updates, gradients, staleness, self._unit) for one in self._samples])
        low, high = np.quantile(every, [0.025, 0.975], axis=0)
        return low, high

    def updates_to(self, goal: float, gradients: float, staleness: float) -> tuple[float, Numbers]:
        """How many updates until this loss: at best guess, and of every sample. Infinite where it is never reached."""
        best = _updates(self._best, goal, gradients, staleness, self._unit)
        return best, np.array([_updates(one, goal, gradients, staleness, self._unit) for one in self._samples])

    def reach(self, goal: float, told: Result) -> Reached:
        """When a simulated run gets there."""
        gradients = told.minibatches_per_second * told.seconds / max(1, told.updates)
        best, every = self.updates_to(goal, gradients, told.staleness.mean)
        each = told.seconds_per_update
        low, high = np.quantile(every, [0.025, 0.975], method="nearest")
        return Reached(_finite(best * each), _finite(float(low) * each), _finite(float(high) * each), _finite(best))

    @property
    def words(self) -> str:
        gain, penalty = _unpack(self._best, self._unit)[4:6]
        return f"K gradients in an update are worth K^{gain:.2f} updates; each update of staleness costs {penalty:.0%}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _unpack(theta: Numbers, unit: float) -> tuple[float, float, float, float, float, float, float]:
    """floor, height, scale, power, gain, penalty, noise."""
    floor, height, scale, power, gain, penalty, noise = theta.tolist()
    return (
        unit * math.exp(floor),
        unit * math.exp(height),
        math.exp(scale),
        math.exp(power),
        1 / (1 + math.exp(-gain)),
        math.exp(penalty),
        unit * math.exp(noise),
    )


def _worth(gradients: float, staleness: float, gain: float, penalty: float) -> float:
    return float(gradients**gain / (1 + penalty * staleness))


def _loss(theta: Numbers, updates: Numbers, gradients: float, staleness: float, unit: float) -> Numbers:
    floor, height, scale, power, gain, penalty, noise = _unpack(theta, unit)
    x = updates * _worth(gradients, staleness, gain, penalty)
    return np.asarray(floor + noise / gradients + height * (1 + x / scale) ** -power)


def _updates(theta: Numbers, goal: float, gradients: float, staleness: float, unit: float) -> float:
    floor, height, scale, power, gain, penalty, noise = _unpack(theta, unit)
    left = (goal - floor - noise / gradients) / height
    if left <= 0:
        return math.inf
    if left >= 1:
        return 0.0
    return float(scale * (left ** (-1 / power) - 1) / _worth(gradients, staleness, gain, penalty))


def observed(run: Calibration) -> ObservedRun | None:
    """The losses that a run reported, as means of neighbouring ones, with how uncertain they are."""
    if len(run.losses) < 8:
        return None
    versions, losses = (np.array(column) for column in zip(*run.losses, strict=True))
    count = min(_POINTS, max(4, len(losses) // 4))
    # Finer at the beginning, where the loss falls fast.
    edges = np.unique((np.linspace(0, 1, count + 1) ** 1.5 * len(losses)).round().astype(int))
    parts = [slice(first, last) for first, last in itertools.pairwise(edges) if last > first]
    noise = float(np.median(np.abs(np.diff(losses)))) / 0.954 or 1e-3 * float(losses.std() + 1e-9)
    return ObservedRun(
        np.array([versions[part].mean() for part in parts]),
        np.array([losses[part].mean() for part in parts]),
        np.array([noise / math.sqrt(part.stop - part.start) for part in parts]),
        run.gradients,
        run.staleness,
    )


def fit_runs(runs: Sequence[Calibration]) -> Convergence:
    known = [found for run in runs if (found := observed(run)) is not None]
    if not known:
        raise UsageError(
            "the runs tell nothing about the loss; report it in the script with team.report(loss=…), at least 8 times"
        )
    return fit(known)


def fit(runs: Sequence[ObservedRun]) -> Convergence:
    """The most likely parameters, and samples of what else they may be."""
    from scipy.optimize import least_squares

    unit = float(max(run.losses.max() for run in runs)) or 1.0
    lowest = max(1e-6, float(min(run.losses.min() for run in runs)) / unit)
    reach = float(np.median([run.versions[-1] for run in runs])) + 1.0
    # Models are never quite right: what is left over is at least a hundredth of the loss.
    errors = [np.hypot(run.errors, 0.01 * run.losses) for run in runs]
    usual = np.array([math.log(0.3 * lowest), 0.0, math.log(reach / 4), *(mean for mean, _ in _USUAL.values())])
    spread = np.array([1.5, 0.5, 2.0, *(spread for _, spread in _USUAL.values())])

    def residuals(theta: Numbers) -> Numbers:
        parts = [
            (_loss(theta, run.versions, run.gradients, run.staleness, unit) - run.losses) / error
            for run, error in zip(runs, errors, strict=True)
        ]
        return np.concatenate([*parts, (theta - usual) / spread])

    found = least_squares(residuals, usual, method="trf", bounds=(usual - 8 * spread, usual + 8 * spread))
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    # Neighbouring means err together, so the fit is trusted as if there were fewer of them.
    count = sum(len(run.losses) for run in runs)
    misfit = max(1.0, float(2 * found.cost) / count)
    source = np.random.default_rng(0)
    samples = source.multivariate_normal(found.x, covariance * misfit, _SAMPLES)
    return Convergence(found.x, np.clip(samples, usual - 6 * spread, usual + 6 * spread), unit)
