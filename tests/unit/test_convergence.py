"""How a loss falls is learned from what runs reported, and foretold with an honest interval."""

import math

import numpy as np
import pytest

from paceline.config.distributions import Constant
from paceline.errors import UsageError
from paceline.simulate.calibrate import Calibration
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.convergence import fit, fit_runs, observed
from paceline.simulate.predict import simulate

FLOOR, NOISE, HEIGHT, SCALE, POWER, GAIN, PENALTY = 0.2, 0.08, 2.0, 60.0, 1.2, 0.4, 0.15


def truth(updates: np.ndarray, gradients: float, staleness: float) -> np.ndarray:
    x = updates * gradients**GAIN / (1 + PENALTY * staleness)
    return np.asarray(FLOOR + NOISE / gradients + HEIGHT * (1 + x / SCALE) ** -POWER)


def run(gradients: float, staleness: float, updates: int = 400, noise: float = 0.03, seed: int = 0) -> Calibration:
    """A run that reported the loss after every other update."""
    versions = np.arange(0, updates, 2.0)
    losses = truth(versions, gradients, staleness) + noise * np.random.default_rng(seed).standard_normal(len(versions))
    return Calibration(
        cluster=SimulatedCluster(workers=4),
        strategy="",
        updates=updates,
        seconds_per_update=0.1,
        losses=list(zip(versions.tolist(), losses.tolist(), strict=True)),
        uneven={},
        jitter=0.0,
        gradients=gradients,
        staleness=staleness,
    )


def when(goal: float, gradients: float, staleness: float) -> float:
    every = np.arange(0.0, 20_000.0)
    reached = np.flatnonzero(truth(every, gradients, staleness) <= goal)
    return float(every[reached[0]]) if len(reached) else math.inf


@pytest.mark.parametrize(("gradients", "staleness"), [(1.0, 3.0), (4.0, 0.0), (2.0, 1.5)])
def test_what_was_seen_is_given_back(gradients: float, staleness: float) -> None:
    model = fit_runs([run(1.0, 3.0), run(4.0, 0.0, seed=1)])
    for goal in (1.2, 0.8, 0.6):
        best, _ = model.updates_to(goal, gradients, staleness)
        assert best == pytest.approx(when(goal, gradients, staleness), rel=0.2)


def test_a_policy_that_was_not_seen_is_foretold_within_its_interval() -> None:
    model = fit_runs([run(1.0, 3.0), run(4.0, 0.0, seed=1)])
    for gradients, staleness in ((2.0, 0.0), (2.0, 1.5), (4.0, 0.75)):
        best, every = model.updates_to(0.7, gradients, staleness)
        wanted = when(0.7, gradients, staleness)
        assert best == pytest.approx(wanted, rel=0.25)
        low, high = np.quantile(every, [0.025, 0.975])
        assert low <= wanted <= high


def test_little_data_makes_wide_intervals() -> None:
    def width(updates: int) -> float:
        _, every = fit_runs([run(1.0, 3.0, updates), run(4.0, 0.0, updates, seed=1)]).updates_to(0.6, 2.0, 1.0)
        low, high = np.quantile(every, [0.025, 0.975], method="nearest")
        return float(high / low)

    assert width(60) > 1.3 * width(600)


def test_one_run_alone_says_little_about_staleness() -> None:
    one = fit_runs([run(1.0, 0.0)])
    both = fit_runs([run(1.0, 0.0), run(1.0, 6.0, seed=1)])
    spread = []
    for model in (one, both):
        low, high = np.quantile(model.updates_to(0.8, 1.0, 6.0)[1], [0.16, 0.84], method="nearest")
        spread.append(math.log(high / low))
    assert spread[0] > 2 * spread[1]


def test_a_loss_below_the_floor_is_never_reached() -> None:
    model = fit_runs([run(1.0, 3.0, 3000), run(4.0, 0.0, 3000, seed=1)])
    told, _ = simulate("async", SimulatedCluster(workers=4, compute=Constant(0.1)), updates=100)
    never = model.reach(0.001, told)
    assert never.seconds is None
    at_once = model.reach(50.0, told)
    assert at_once.seconds == 0.0


def test_seconds_are_updates_times_their_length() -> None:
    model = fit_runs([run(1.0, 3.0), run(4.0, 0.0, seed=1)])
    slow, _ = simulate("sync", SimulatedCluster(workers=4, compute=Constant(0.4)), updates=100)
    fast, _ = simulate("sync", SimulatedCluster(workers=4, compute=Constant(0.1)), updates=100)
    one, other = model.reach(0.8, slow), model.reach(0.8, fast)
    assert one.seconds is not None
    assert other.seconds is not None
    assert one.updates == other.updates
    assert one.seconds == pytest.approx(4 * other.seconds)
    assert one.low is not None
    assert one.high is not None
    assert one.low <= one.seconds <= one.high


def test_the_band_holds_the_curve() -> None:
    model = fit_runs([run(1.0, 3.0), run(4.0, 0.0, seed=1)])
    updates = np.linspace(0, 800, 9)
    low, high = model.band(updates, 2.0, 1.0)
    middle = model.loss(updates, 2.0, 1.0)
    assert (low <= middle + 1e-9).all()
    assert (middle <= high + 1e-9).all()
    assert "gradients in an update are worth" in model.description


def test_without_losses_there_is_nothing_to_learn() -> None:
    silent = run(1.0, 0.0)
    silent.losses.clear()
    assert observed(silent) is None
    with pytest.raises(UsageError, match="report it"):
        fit_runs([silent])


def test_a_loss_that_does_not_fall_is_survived() -> None:
    flat = run(1.0, 0.0)
    flat.losses[:] = [(version, 1.0) for version, _ in flat.losses]
    seen = observed(flat)
    assert seen is not None
    model = fit([seen])
    assert math.isfinite(float(model.loss(np.array([100.0]), 1.0, 0.0)[0]))


def test_the_time_to_a_loss_is_found_though_the_loss_falls_to_nothing() -> None:
    exact = run(1.0, 0.0)
    exact.losses[:] = [(version, 8.0 * math.exp(-version / 20) + 1e-14) for version, _ in exact.losses]
    seen = observed(exact)
    assert seen is not None
    found, _ = fit([seen]).updates_to(0.5, 1.0, 0.0)
    assert found == pytest.approx(20 * math.log(16), rel=0.1)
