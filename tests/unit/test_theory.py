"""Formulas and simulations give what the literature, and an independent count, say."""

import math
import statistics
import time
from collections.abc import Sequence

import pytest

from paceline.config.distributions import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    Gamma,
    Lognormal,
    Pareto,
    parse_distribution,
)
from paceline.errors import UsageError
from paceline.policies import parse_policy
from paceline.schedules import PassTimes, bubble, kept_in_flight, step_seconds
from paceline.simulate import predict as asked
from paceline.simulate import theory
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.engine import EventLoop
from paceline.simulate.result import Result

EXP, SHIFTED = Exponential(1.0), Exponential(1.0, 1.0)


def simulate(
    spec: str,
    workers: int,
    compute: Distribution,
    *,
    updates: int,
    seed: int = 0,
    factors: Sequence[float] | None = None,
) -> Result:
    cluster = SimulatedCluster(workers=workers, compute=compute, factors=tuple(factors or ()))
    return asked.simulate(spec, cluster, updates=updates, seed=seed)[0]


def predict(spec: str, workers: int, compute: Distribution) -> asked.Theory:
    return asked.predict(spec, SimulatedCluster(workers=workers, compute=compute))


# P, K: exp(1) for K-sync and K-async, for both batch forms; 1+exp(1) for K-sync, K-batch-sync, K-async, K-batch-async
TABLE = [
    (4, 1, 0.250, 0.250, 1.250, 1.250, 0.500, 0.500),
    (4, 2, 0.583, 0.500, 1.583, 1.580, 1.139, 1.000),
    (4, 3, 1.083, 0.750, 2.083, 2.019, 1.925, 1.500),
    (4, 4, 2.083, 1.000, 3.083, 2.553, 3.083, 2.000),
    (8, 1, 0.125, 0.125, 1.125, 1.125, 0.250, 0.250),
    (8, 2, 0.268, 0.250, 1.268, 1.268, 0.533, 0.500),
    (8, 4, 0.635, 0.500, 1.635, 1.632, 1.240, 1.000),
    (8, 6, 1.218, 0.750, 2.218, 2.130, 2.052, 1.500),
    (8, 8, 2.718, 1.000, 3.718, 2.670, 3.718, 2.000),
    (16, 1, 0.0625, 0.0625, 1.063, 1.063, 0.125, 0.125),
    (16, 4, 0.278, 0.250, 1.278, 1.277, 0.552, 0.500),
    (16, 8, 0.663, 0.500, 1.663, 1.661, 1.287, 1.000),
    (16, 12, 1.297, 0.750, 2.297, 2.197, 2.129, 1.500),
    (16, 16, 3.381, 1.000, 4.381, 2.715, 4.381, 2.000),
    (64, 1, 0.0156, 0.0156, 1.016, 1.016, 0.0313, 0.0313),
    (64, 8, 0.132, 0.125, 1.132, 1.132, 0.265, 0.250),
    (64, 16, 0.285, 0.250, 1.285, 1.285, 0.567, 0.500),
    (64, 32, 0.685, 0.500, 1.685, 1.686, 1.307, 1.000),
    (64, 48, 1.363, 0.750, 2.363, 2.254, 2.192, 1.500),
    (64, 64, 4.744, 1.000, 5.744, 2.742, 5.744, 2.000),
]
FAMILIES = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


def cells() -> list[tuple[str, int, int, Exponential, float]]:
    known = []
    for workers, k, one, batch, *shifted in TABLE:
        known += [(family, workers, k, EXP, batch if "batch" in family else one) for family in FAMILIES]
        known += [(family, workers, k, SHIFTED, value) for family, value in zip(FAMILIES, shifted, strict=True)]
    return known


def simulated() -> list[tuple[str, int, int, Exponential, float]]:
    """Of the families that take long, each line of the table with one of both distributions, in turn."""
    lines = [(workers, k) for workers, k, *_ in TABLE]
    return [
        cell
        for cell in cells()
        if cell[0] in ("k-sync", "k-batch-async") or lines.index(cell[1:3]) % 2 == (cell[3] is SHIFTED)
    ]


@pytest.mark.parametrize(("family", "workers", "k", "compute", "value"), simulated())
def test_a_simulation_gives_the_table_s_value(
    family: str, workers: int, k: int, compute: Exponential, value: float
) -> None:
    updates = max(1000, 40_000 // k) if family == "k-async" else 20_000
    told = simulate(f"{family}:k={k}", workers, compute, updates=updates, seed=1)
    rounding = 0.0006 if value < 0.1 else 0.0006 + 0.0025
    assert abs(told.seconds_per_update - value) <= max(0.01 * value, 3 * told.standard_error + rounding)


@pytest.mark.parametrize(("family", "workers", "k", "compute", "value"), cells())
def test_where_there_is_a_formula_it_gives_the_table_s_value(
    family: str, workers: int, k: int, compute: Exponential, value: float
) -> None:
    told = predict(f"{family}:k={k}", workers, compute).seconds_per_update
    no_form = compute is SHIFTED and ((family == "k-batch-sync" and k > 1) or (family == "k-async" and 1 < k < workers))
    assert (told is None) == no_form
    assert told is None or told == pytest.approx(value, abs=0.0006)


@pytest.mark.parametrize(("workers", "k"), [(4, 1), (4, 2), (8, 4), (16, 8), (64, 48)])
def test_staleness_is_what_the_formulas_say(workers: int, k: int) -> None:
    one = simulate(f"k-async:k={k}", workers, SHIFTED, updates=20_000 // k, seed=2)
    assert one.staleness.mean == pytest.approx(workers / k - 1, rel=0.02)
    many = simulate(f"k-batch-async:k={k}", workers, SHIFTED, updates=10_000, seed=2)
    assert many.staleness.mean == pytest.approx((workers - 1) / k, rel=0.02)


SSP = {
    ("exp(1)", 4): (2.083, 1.514, 1.337, 1.199, 1.110, 1.058),
    ("exp(1)", 8): (2.719, 1.793, 1.510, 1.296, 1.161, 1.083),
    ("exp(1)", 16): (3.379, 2.083, 1.688, 1.392, 1.213, 1.110),
    ("exp(1)", 64): (4.746, 2.676, 2.053, 1.591, 1.313, 1.161),
    ("1+exp(1)", 64): (5.743, 3.317, 2.712, 2.351, 2.170, 2.085),
    ("1+exp(1)", 8): (3.723, 2.565, 2.321, 2.170, 2.086, 2.043),
}


@pytest.mark.parametrize(("compute", "workers"), SSP)
@pytest.mark.parametrize(("place", "bound"), list(enumerate((0, 1, 2, 4, 8, 16))))
def test_bounded_staleness_gives_the_table_s_value(compute: str, workers: int, place: int, bound: int) -> None:
    # Several short runs, because neighbouring updates depend on each other for long: what one run says of its own error
    # is too little. Per step of one worker, of which so many make that many updates.
    drawn = parse_distribution(compute)
    runs = [simulate(f"ssp:s={bound}", workers, drawn, updates=4000 * workers, seed=seed) for seed in range(6)]
    values = [run.seconds_per_update * workers for run in runs]
    value, error = SSP[compute, workers][place], statistics.stdev(values) / math.sqrt(len(values))
    assert statistics.mean(values) == pytest.approx(value, abs=max(0.01 * value, 3 * error + 0.003))


@pytest.mark.parametrize(("count", "size", "value"), [(4, 4, 0.521), (8, 8, 0.340)])
def test_groups_give_their_value(count: int, size: int, value: float) -> None:
    spec, workers = f"groups:size={size},between=async", count * size
    assert predict(spec, workers, EXP).seconds_per_update == pytest.approx(value, abs=0.0006)
    told = simulate(spec, workers, EXP, updates=20_000, seed=4)
    assert abs(told.seconds_per_update - value) <= max(0.01 * value, 3 * told.standard_error + 0.0005)
    assert predict(spec, workers, EXP).staleness == count - 1
    assert told.staleness.mean == pytest.approx(count - 1, rel=0.01)


@pytest.mark.parametrize(("workers", "k", "value"), [(8, 4, 1.300), (64, 48, 1.731), (64, 64, 7.875)])
def test_heavy_tails_have_a_formula_too(workers: int, k: int, value: float) -> None:
    assert theory.k_sync(Pareto(1.0, 2.5), workers, k) == pytest.approx(value, abs=0.0006)
    told = simulate(f"k-sync:k={k}", workers, Pareto(1.0, 2.5), updates=20_000, seed=5)
    assert abs(told.seconds_per_update - value) <= max(0.01 * value, 3 * told.standard_error)


def test_with_heavy_tails_to_wait_for_the_old_ones_is_slower_than_to_cancel_them() -> None:
    told = simulate("k-async:k=48", 64, Pareto(1.0, 2.5), updates=2000, seed=6)
    assert told.seconds_per_update == pytest.approx(1.735, rel=0.01)


def test_sync_over_async_is_p_times_its_harmonic_number() -> None:
    sync = theory.k_sync(EXP, 8, 8)
    assert sync is not None
    assert sync / theory.k_batch_async(EXP, 8, 1) == pytest.approx(8 * theory.harmonic(8))


@pytest.mark.parametrize("spec", ["sync", "k-sync:k=3", "k-batch-sync:k=3", "async", "k-batch-async:k=3", "ssp:s=2"])
def test_the_quick_way_gives_what_the_event_loop_gives(spec: str) -> None:
    quick = simulate(spec, 5, Gamma(2.0, 0.5), updates=8000, seed=7)
    slow = EventLoop(
        parse_policy(spec).for_workers(range(5)), SimulatedCluster(workers=5, compute=Gamma(2.0, 0.5)), 8
    ).run(8000, spec)
    error = 4 * math.hypot(quick.standard_error, slow.standard_error)
    assert quick.seconds_per_update == pytest.approx(slow.seconds_per_update, abs=error)
    assert quick.staleness.mean == pytest.approx(slow.staleness.mean, abs=0.05)
    assert quick.minibatches_per_second == pytest.approx(slow.minibatches_per_second, rel=0.03)
    assert sum(quick.waiting) == pytest.approx(sum(slow.waiting), abs=0.05)
    assert sum(quick.computing) == pytest.approx(sum(slow.computing), abs=0.05)


def test_many_minibatches_of_many_workers_are_no_more_work_than_they_are() -> None:
    began = time.process_time()
    told = simulate("k-batch-sync:k=1000", 1000, SHIFTED, updates=200, seed=1)
    assert told.seconds_per_update == pytest.approx(2.75, rel=0.01)
    assert time.process_time() - began < 5.0  # a thousand draws of each worker would take some twenty


def test_a_slow_worker_holds_up_only_who_waits_for_it() -> None:
    factors = [1.0, 1.0, 1.0, 4.0]
    told = {
        spec: simulate(spec, 4, Constant(1.0), updates=400, factors=factors)
        for spec in ("sync", "k-sync:k=3", "async", "ssp:s=2")
    }
    assert told["sync"].seconds_per_update == pytest.approx(4.0)
    assert told["k-sync:k=3"].seconds_per_update == pytest.approx(1.0)
    assert told["async"].seconds_per_update == pytest.approx(1 / 3.25, rel=0.02)
    assert told["ssp:s=2"].seconds_per_update == pytest.approx(1.0, rel=0.02)
    assert told["sync"].waiting == pytest.approx([0.75, 0.75, 0.75, 0.0], abs=0.01)


def test_the_same_seed_gives_the_same_and_another_does_not() -> None:
    one, two, three = (simulate("k-async:k=2", 4, EXP, updates=200, seed=seed) for seed in (1, 1, 2))
    assert one == two != three


# -- pipelines ------------------------------------------------------------------------------------------


def test_pipelines_take_what_their_formulas_say() -> None:
    assert [step_seconds(name, 8, 32, PassTimes(1, 2)) for name in ("gpipe", "1f1b")] == [117, 117]
    assert [bubble(name, 8, 32) for name in ("gpipe", "1f1b")] == pytest.approx([0.1795] * 2, abs=5e-5)
    assert [step_seconds("interleaved", 8, 32, PassTimes(1, 2), chunks) for chunks in (2, 4)] == [106.5, 101.25]
    even = PassTimes(1, 1, 1)
    ideal, left, plain = (step_seconds(name, 8, 32, even) for name in ("zero-bubble-2p", "zero-bubble", "1f1b"))
    assert (ideal, plain) == (96, 117)
    assert left == pytest.approx(96 + (117 - 96) / 3)
    assert kept_in_flight("1f1b", 4, 8) == [4, 3, 2, 1]
    assert kept_in_flight("gpipe", 4, 8) == [8, 8, 8, 8]


# -- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("0.1", Constant(0.1)),
        ("exp(1)", Exponential(1.0)),
        ("0.05 + exp(0.1)", Exponential(0.1, 0.05)),
        ("pareto(1,2.5)", Pareto(1.0, 2.5)),
        ("gamma(2,0.5)", Gamma(2.0, 0.5)),
        ("lognormal(1,0.3)", Lognormal(1.0, 0.3)),
        ("1e-3+exp(2e-3)", Exponential(2e-3, 1e-3)),
    ],
)
def test_a_distribution_is_a_name_with_numbers(spec: str, value: object) -> None:
    assert parse_distribution(spec) == value
    assert parse_distribution(str(value)) == value


@pytest.mark.parametrize(
    "spec", ["", "0", "-1", "exp(0)", "exp(-1)", "pareto(1)", "weibull(1,2)", "exp(1", "gamma(0,1)"]
)
def test_what_is_no_distribution_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="is not a distribution of seconds; there are SECONDS, constant"):
        parse_distribution(spec)


@pytest.mark.parametrize(
    "of",
    [Constant(2.0), SHIFTED, Pareto(1.0, 3.5), Gamma(2.0, 0.5), Lognormal(1.0, 0.3), Empirical((1.0, 2.0, 6.0))],
)
def test_draws_have_the_mean_of_their_distribution(of: Exponential) -> None:
    import numpy as np

    draws = of.draw(np.random.default_rng(0), (500, 400))
    assert draws.shape == (500, 400)
    assert (draws > 0).all()
    assert float(draws.mean()) == pytest.approx(of.mean(), rel=0.01)
