"""What is learned from the events of a run is what the run was made with."""

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.config.distributions import Constant, Exponential, Gamma
from paceline.errors import UsageError
from paceline.events import Compute, Join, Metric, Pull, Push, Update
from paceline.simulate.calibrate import Calibration, calibrate, survival
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import simulate
from paceline.topologies import Link


def recorded(folder: Path, strategy: str, cluster: SimulatedCluster, updates: int = 1500, seed: int = 1) -> Calibration:
    """What is learned from a simulated run, whose truth is known."""
    _, trace = simulate(strategy, cluster, updates=updates, seed=seed, trace=True)
    assert trace is not None
    trace.write(folder, {})
    return calibrate(folder)


def test_steps_and_their_jitter_are_found(tmp_path: Path) -> None:
    known = recorded(tmp_path, "async", SimulatedCluster(workers=4, compute=Gamma(4.0, 0.01)))
    assert known.cluster.compute.mean() == pytest.approx(0.04, rel=0.03)
    assert known.jitter == pytest.approx(0.5, rel=0.08)
    assert known.uneven == {}
    assert known.cluster.workers == 4
    assert known.strategy == "async"
    assert known.gradients == pytest.approx(1.0)
    assert known.staleness == pytest.approx(3.0, rel=0.02)


def test_persistent_unevenness_is_told_from_jitter(tmp_path: Path) -> None:
    on = SimulatedCluster(workers=4, compute=Exponential(0.02, 0.02), factors=(1.0, 1.0, 4.0, 1.0))
    known = recorded(tmp_path, "async", on)
    assert list(known.uneven) == [2]
    assert known.uneven[2] == pytest.approx(4.0, rel=0.1)
    assert known.cluster.compute.mean() == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_luck_is_not_called_unevenness(tmp_path: Path, seed: int) -> None:
    known = recorded(tmp_path, "async", SimulatedCluster(workers=6, compute=Exponential(0.05)), updates=600, seed=seed)
    assert known.uneven == {}


def test_two_speeds_are_both_kept(tmp_path: Path) -> None:
    on = SimulatedCluster(workers=4, compute=Exponential(0.004, 0.03), factors=(2.0, 1.0, 2.0, 1.0))
    known = recorded(tmp_path, "async", on)
    told, _ = simulate("async", known.for_workers(6), updates=6000)
    truth, _ = simulate("async", SimulatedCluster(workers=6, compute=on.compute, factors=(2.0, 1.0) * 3), updates=6000)
    assert told.seconds_per_update == pytest.approx(truth.seconds_per_update, rel=0.03)


LINKED = SimulatedCluster(workers=4, compute=Exponential(0.03, 0.03), link=Link(0.002), update_seconds=0.001)


@functools.cache
def truth(asked: str) -> float:
    return simulate(asked, LINKED, updates=4000, seed=6)[0].seconds_per_update


@pytest.mark.parametrize("learned", ["async", "sync", "k-sync:k=3", "k-batch-sync:k=4", "k-async:k=2", "ssp:s=2"])
def test_one_policy_is_predicted_from_another(tmp_path: Path, learned: str) -> None:
    known = recorded(tmp_path, learned, LINKED)
    for asked in ("sync", "k-sync:k=2", "async", "k-batch-async:k=3"):
        told, _ = simulate(asked, known.cluster, updates=4000, seed=5)
        assert told.seconds_per_update == pytest.approx(truth(asked), rel=0.06), asked


def test_messages_and_updates_are_found(tmp_path: Path) -> None:
    on = SimulatedCluster(workers=3, compute=Exponential(0.01, 0.05), link=Link(0.004), update_seconds=0.002, size=1e6)
    known = recorded(tmp_path, "async", on)
    assert known.cluster.link.latency == pytest.approx(0.004, rel=0.3)
    assert known.cluster.update_seconds == pytest.approx(0.002, rel=0.01)
    assert known.cluster.size == 1e6


def test_a_slow_link_is_found_where_it_is(tmp_path: Path) -> None:
    slow = Link(0.05)
    on = SimulatedCluster(workers=3, compute=Exponential(0.01, 0.05), link=Link(0.001), links=((1, slow),))
    known = recorded(tmp_path, "async", on)
    links = dict(known.cluster.links)
    assert links[1].latency == pytest.approx(0.05, rel=0.1)
    assert 0 not in links
    assert 2 not in links


def test_cancelled_steps_count_as_longer_than_they_were_seen() -> None:
    source = np.random.default_rng(0)
    truth, limits = source.exponential(1.0, 20_000), source.exponential(1.0, 20_000)
    ended, left = truth[truth <= limits], limits[truth > limits]
    assert ended.mean() < 0.6
    assert survival(ended.tolist(), left.tolist()).mean() == pytest.approx(1.0, rel=0.05)
    assert survival([3.0, 1.0], []).tolist() == [1.0, 3.0]


def test_more_workers_are_like_most_of_them(tmp_path: Path) -> None:
    on = SimulatedCluster(workers=4, compute=Exponential(0.004, 0.03), factors=(5.0, 1.0, 1.0, 1.0))
    known = recorded(tmp_path, "async", on)
    more = known.for_workers(8)
    assert more.workers == 8
    assert more.factors[0] == pytest.approx(5.0, rel=0.1)
    assert more.factors[1:] == (1.0,) * 7
    assert known.for_workers(2).factors == more.factors[:2]
    assert known.for_workers(None) is known.cluster
    with pytest.raises(UsageError, match="at least 1"):
        known.for_workers(0)


def test_losses_are_taken_along(tmp_path: Path) -> None:
    _, trace = simulate("async", SimulatedCluster(workers=2, compute=Constant(0.1)), updates=100, trace=True)
    assert trace is not None
    trace.events += [Metric(0, n * 0.1, n, {"loss": 2.0 / (n + 1), "accuracy": 0.5}) for n in range(50)]
    trace.events.append(Metric(0, 6.0, 51, {"loss": None}))
    trace.write(tmp_path, {})
    known = calibrate(tmp_path)
    assert known.losses == [(float(n), 2.0 / (n + 1)) for n in range(50)]
    assert "learned from 100 updates of 2 workers under async" in known.description
    assert known.summary["workers"] == 2


def event_file(path: Path, *events: Any) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return path


def test_too_little_is_said_to_be(tmp_path: Path) -> None:
    few = [Join(0, 0.0, 1, "h", "cpu", "async", 0.0), Compute(0, 1.0, 0.5, 0, 1, 4), Update(-1, 1.5, 0.1, 1)]
    with pytest.raises(UsageError, match="too few steps"):
        calibrate(event_file(tmp_path / "few.jsonl", *few))
    with pytest.raises(UsageError, match="there is no run"):
        calibrate(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not the folder of a run"):
        calibrate(tmp_path / "empty")


def test_streams_of_a_run_that_was_killed_are_enough(tmp_path: Path) -> None:
    streams = tmp_path / "streams"
    streams.mkdir()
    events: list[Any] = [Join(0, 0.0, 1, "h", "cpu", "async", 0.0)]
    served: list[Any] = []
    for n in range(30):
        events += [Compute(0, 1.0 + n, 0.8, n, 1, 4), Pull(0, 1.8 + n, 0.1, n + 1)]
        served += [
            Push(0, 1.85 + n, n, n, 0, 4, [], 100, 0, "used", ""),
            Update(-1, 1.86 + n, 0.01, n + 1, pushes=[n]),
        ]
    event_file(streams / "0.jsonl", *events)
    event_file(streams / "-1.jsonl", *served)
    known = calibrate(tmp_path)
    # Between the version's coming and the next step's beginning the script does something for 0.1 s, too.
    assert known.cluster.compute.mean() == pytest.approx(0.9)
    assert known.cluster.link.latency == pytest.approx(0.05)
    assert known.cluster.batch == 4
