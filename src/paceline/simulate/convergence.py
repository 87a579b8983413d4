"""The fall of the loss with updates, gradients per update and staleness, fitted to short runs.

After n updates of K gradients each, on average tau updates old, the loss is taken to be

    floor + noise / K + height * (1 + x / scale) ** -power,    x = n * K ** gain / (1 + penalty * tau)

More gradients in an update make its direction better (gain; 0 would be no use, 1 as good as that many updates) and
leave less noise at the end; stale ones are worth less (penalty). Parameters that short runs
do not determine stay near the prior, and are as uncertain as it is.
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
from paceline.simulate.least_squares import least_squares
from paceline.simulate.result import Result

Numbers = NDArray[np.float64]

_POINTS = 40
"""The most means of the loss that are taken from a run."""
_SAMPLES = 400
"""Samples of the parameters' posterior."""
_PRIOR = {"power": (0.0, 0.4), "gain": (-0.7, 1.0), "penalty": (math.log(0.05), 1.2), "noise": (math.log(0.02), 1.0)}
"""Prior mean and spread, of logarithms; of the gain, of its log odds."""


class TimeToLoss(msgspec.Struct, frozen=True):
    """The time at which a loss is reached: the best estimate and the 95 % interval. None is never."""

    seconds: float | None
    low: float | None
    high: float | None
    updates: float | None


@dataclasses.dataclass(frozen=True)
class ObservedRun:
    """The losses of one run, with standard errors."""

    versions: Numbers
    losses: Numbers
    errors: Numbers
    gradients: float
    """Mean gradients per update."""
    staleness: float


class Convergence:
    """A fitted convergence model: the best parameters, and samples of their posterior."""

    def __init__(self, best: Numbers, samples: Numbers, unit: float) -> None:
        self._best, self._samples, self._unit = best, samples, unit

    def loss(self, updates: Numbers, gradients: float, staleness: float) -> Numbers:
        """The loss after these numbers of updates, by the best parameters."""
        return _loss(self._best, updates, gradients, staleness, self._unit)

    def band(self, updates: Numbers, gradients: float, staleness: float) -> tuple[Numbers, Numbers]:
        """The 95 % interval of the loss after these numbers of updates."""
        every = np.stack([_loss(one, updates, gradients, staleness, self._unit) for one in self._samples])
        low, high = np.quantile(every, [0.025, 0.975], axis=0)
        return low, high

    def updates_to(self, goal: float, gradients: float, staleness: float) -> tuple[float, Numbers]:
        """Updates until this loss, by the best parameters and by each sample; infinite if it is never reached."""
        best = _updates(self._best, goal, gradients, staleness, self._unit)
        return best, np.array([_updates(one, goal, gradients, staleness, self._unit) for one in self._samples])

    def reach(self, goal: float, result: Result) -> TimeToLoss:
        """The time at which a simulated run reaches a loss."""
        gradients = result.minibatches_per_second * result.seconds / max(1, result.updates)
        best, every = self.updates_to(goal, gradients, result.staleness.mean)
        each = result.seconds_per_update
        low, high = np.quantile(every, [0.025, 0.975], method="nearest")
        return TimeToLoss(_finite(best * each), _finite(float(low) * each), _finite(float(high) * each), _finite(best))

    @property
    def description(self) -> str:
        """One sentence for people."""
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
    """The losses that a run reported, averaged over neighbours, with standard errors; None if there are too few."""
    if len(run.losses) < 8:
        return None
    versions, losses = (np.array(column) for column in zip(*run.losses, strict=True))
    count = min(_POINTS, max(4, len(losses) // 4))
    # Finer at the start, where the loss falls fast.
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
    """Fits the runs that reported a loss."""
    known = [found for run in runs if (found := observed(run)) is not None]
    if not known:
        raise UsageError(
            "the runs reported no loss; report it in the script with team.report(loss=…), at least 8 times"
        )
    return fit(known)


def fit(runs: Sequence[ObservedRun]) -> Convergence:
    """Fits the parameters by least squares, and samples them from the covariance of the fit."""
    unit = float(max(run.losses.max() for run in runs)) or 1.0
    lowest = max(1e-6, float(min(run.losses.min() for run in runs)) / unit)
    reach = float(np.median([run.versions[-1] for run in runs])) + 1.0
    # No model is exact: residuals are at least a hundredth of the loss, and a ten-thousandth of the largest one.
    errors = [np.sqrt(run.errors**2 + (0.01 * run.losses) ** 2 + (1e-4 * unit) ** 2) for run in runs]
    prior = np.array([math.log(0.3 * lowest), 0.0, math.log(reach / 4), *(mean for mean, _ in _PRIOR.values())])
    spread = np.array([1.5, 0.5, 2.0, *(spread for _, spread in _PRIOR.values())])

    def residuals(theta: Numbers) -> Numbers:
        parts = [
            (_loss(theta, run.versions, run.gradients, run.staleness, unit) - run.losses) / error
            for run, error in zip(runs, errors, strict=True)
        ]
        return np.concatenate([*parts, (theta - prior) / spread])

    found = least_squares(residuals, prior, prior - 8 * spread, prior + 8 * spread)
    covariance = np.linalg.inv(found.jacobian.T @ found.jacobian)
    # Errors of neighbouring means are correlated, so the covariance is widened by the misfit.
    count = sum(len(run.losses) for run in runs)
    misfit = max(1.0, found.cost / count)
    source = np.random.default_rng(0)
    samples = source.multivariate_normal(found.parameters, covariance * misfit, _SAMPLES)
    return Convergence(found.parameters, np.clip(samples, prior - 6 * spread, prior + 6 * spread), unit)
