"""Workers that share the cores of a machine slow each other down, in a simulation and out of what was recorded."""

from pathlib import Path

import pytest

from paceline.config.distributions import Constant, Exponential, Gamma
from paceline.simulate.calibrate import calibrate
from paceline.simulate.cluster import Cores, SimulatedCluster
from paceline.simulate.predict import simulate

TWO = Cores(2)


def four(cores: Cores = TWO, factors: tuple[float, ...] = ()) -> SimulatedCluster:
    """Workers on two cores, each with steps of a second."""
    return SimulatedCluster(workers=4, compute=Constant(1.0), factors=factors, cores=cores, per_machine=4)


def seconds(spec: str, cluster: SimulatedCluster, updates: int = 400) -> float:
    told, _ = simulate(spec, cluster, updates=updates, seed=1)
    return told.seconds_per_update


@pytest.mark.parametrize("spec", ["sync", "all-reduce", "k-sync:k=2"])
def test_four_on_two_cores_take_twice_as_long(spec: str) -> None:
    assert seconds(spec, four()) == pytest.approx(2.0)


def test_a_core_each_is_enough() -> None:
    assert seconds("sync", SimulatedCluster(workers=4, compute=Constant(1.0), cores=Cores(4), per_machine=4)) == 1.0
    assert seconds("sync", SimulatedCluster(workers=4, compute=Constant(1.0), cores=Cores(1), per_machine=1)) == 1.0


def test_machines_have_cores_of_their_own() -> None:
    two = SimulatedCluster(workers=4, compute=Constant(1.0), cores=Cores(1), per_machine=2)
    assert seconds("sync", two) == pytest.approx(2.0)
    assert seconds("async", two) == pytest.approx(0.5, rel=0.02)


def test_who_sleeps_leaves_its_core_to_the_others() -> None:
    # The last one computes for a third of its steps, and sleeps for as long as it computed, twice.
    slow = four(Cores(2, (1.0, 1.0, 1.0, 1 / 3), (0.0, 0.0, 0.0, 2 / 3)), (1.0, 1.0, 1.0, 3.0))
    assert seconds("sync", slow) == pytest.approx(6.0)
    # Alone it would be three seconds; beside two that wait for it at the end the cores are free.
    assert seconds("k-sync:k=3", slow) == pytest.approx(2.0)


def test_who_waits_for_something_else_does_so_however_crowded_it_is() -> None:
    # Half a second of a core each, which takes a second, and then half a second of something else.
    assert seconds("sync", four(Cores(2, (0.5,) * 4))) == pytest.approx(1.5)


def test_a_drawn_length_holds_however_crowded_it_is() -> None:
    # The first needs a core for a tenth of a second only: 0.2 s at half the pace, then three share two cores.
    drawn = four(Cores(2, (0.1, 1.0, 1.0, 1.0), fixed=(True, False, False, False)))
    assert seconds("sync", drawn) == pytest.approx(0.2 + 0.9 * 3 / 2)
    assert not four(Cores(2, fixed=(True,) * 4)).shares_cores


def test_a_cancelled_step_leaves_its_core() -> None:
    # Two end at the same moment, at half the pace; were the cancelled ones left to run, all would take longer.
    told, _ = simulate("k-sync:k=1", four(factors=(1.0, 2.0, 2.0, 2.0)), updates=300)
    assert told.seconds_per_update == pytest.approx(2.0)


@pytest.mark.parametrize("spec", ["async", "k-batch-async:k=3", "ssp:s=2", "k-async:k=2", "groups:size=2"])
def test_cores_that_never_idle_do_as_much_as_they_can(spec: str) -> None:
    told, _ = simulate(
        spec, SimulatedCluster(workers=8, compute=Gamma(9.0, 1 / 9), cores=Cores(2), per_machine=8), updates=2000
    )
    assert told.minibatches_per_second == pytest.approx(2.0, rel=0.04)


@pytest.mark.parametrize(
    ("learned", "asked", "workers"),
    [
        ("async", "sync", 2),
        ("async", "k-sync:k=2", 3),
        ("sync", "async", 6),
        ("sync", "k-sync:k=2", 3),
        ("k-sync:k=3", "async", 6),
        ("all-reduce", "sync", 2),
        ("all-reduce", "async", 6),
    ],
)
def test_what_was_crowded_is_learned_without_the_crowd(tmp_path: Path, learned: str, asked: str, workers: int) -> None:
    def on(count: int) -> SimulatedCluster:
        steps = Exponential(0.01, 0.03)
        return SimulatedCluster(workers=count, compute=steps, cores=Cores(2), per_machine=count, update_seconds=0.0005)

    _, trace = simulate(learned, on(4), updates=1200, seed=3, trace=True)
    assert trace is not None
    trace.write(tmp_path, {"cores": 2})
    known = calibrate(tmp_path)
    assert known.cluster.compute.mean() == pytest.approx(0.04, rel=0.03)
    told = seconds(asked, known.for_workers(workers), 4000)
    assert told == pytest.approx(seconds(asked, on(workers), 4000), rel=0.04)
