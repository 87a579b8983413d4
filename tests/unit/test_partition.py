"""The partitioner finds the best cut there is, within what devices and links allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.graph.costs import Cost
from paceline.graph.partition import Device, Problem, partition, replicated
from paceline.graph.predicted_step import quickest_cut
from paceline.schedules import kept_in_flight

lengths = st.floats(0.01, 10.0)


def chain(costs: Sequence[Cost]) -> Problem:
    """Each operation needs the one before it."""
    return Problem(costs, range(1, len(costs)), [[number - 1] if number else [] for number in range(len(costs))])


def brute(
    costs: Sequence[Cost], devices: Sequence[Device], bandwidth: float, microbatches: int
) -> tuple[float, float] | None:
    """The slowest stage or transfer, and the bytes over the cuts, of the best of all cuts."""
    kept = kept_in_flight("1f1b", len(devices), microbatches)
    best = None
    for ends in itertools.combinations(range(1, len(costs)), len(devices) - 1):
        bounds = [0, *ends, len(costs)]
        worst, over = 0.0, 0.0
        for number, device in enumerate(devices):
            part = costs[bounds[number] : bounds[number + 1]]
            worst = max(worst, sum(cost.seconds for cost in part) / device.pace)
            room = 4 * sum(cost.parameters for cost in part) + kept[number] * sum(cost.bytes for cost in part)
            if room > device.memory:
                worst = math.inf
            if number:
                crossing = costs[bounds[number] - 1].bytes
                over += crossing
                link = min(bandwidth, device.bandwidth)
                worst = max(worst, 2 * crossing / link if crossing else 0.0)
        if math.isfinite(worst) and (best is None or (worst, over) < best):
            best = (worst, over)
    return best


@settings(max_examples=150, deadline=None)
@given(
    costs=st.lists(st.tuples(lengths, lengths, st.integers(0, 50), st.integers(0, 20)), min_size=4, max_size=9),
    each=st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0]),
            st.sampled_from([math.inf, 400.0, 800.0]),
            st.sampled_from([math.inf, 20.0]),
        ),
        min_size=1,
        max_size=4,
    ),
    bandwidth=st.sampled_from([math.inf, 5.0, 100.0]),
)
def test_on_chains_it_is_the_optimum_by_brute_force(
    costs: list[tuple[float, float, int, int]], each: list[tuple[float, float, float]], bandwidth: float
) -> None:
    known = [Cost(*one) for one in costs]
    devices = [Device(pace=pace, memory=memory, bandwidth=link) for pace, memory, link in each]
    best = brute(known, devices, bandwidth, 4)
    if best is None:
        with pytest.raises(UsageError, match="the model does not fit"):
            partition(chain(known), devices, bandwidth=bandwidth, microbatches=4)
        return
    found = partition(chain(known), devices, bandwidth=bandwidth, microbatches=4)
    assert found.slowest == pytest.approx(best[0])
    assert found.bounds[-1] == len(known)
    assert all(stage.first < stage.last for stage in found.stages)
    assert all(stage.memory <= device.memory for stage, device in zip(found.stages, devices, strict=True))
    assert sum(stage.bytes for stage in found.stages) <= best[1] + 1e-9


def test_a_device_at_half_speed_gets_half_as_much() -> None:
    known = [Cost(1.0, 2.0, 10, 10)] * 12
    even = partition(chain(known), [Device(), Device()])
    assert even.bounds == [6, 12]
    uneven = partition(chain(known), [Device(), Device(pace=0.5)])
    assert uneven.bounds == [8, 12]
    assert uneven.slowest == pytest.approx(24.0)


def test_a_cut_avoids_bytes_where_stages_are_about_as_quick() -> None:
    sizes = [100, 100, 100, 3, 100, 100, 100]
    known = [Cost(1.0, 1.0, size, 0) for size in sizes]
    assert partition(chain(known), [Device(), Device()], slack=0.0).bounds[0] in (3, 4)
    assert partition(chain(known), [Device(), Device()], slack=0.2).bounds[0] == 4


def test_a_slow_link_moves_the_cut_to_where_little_is_sent() -> None:
    known = [Cost(1.0, 1.0, size, 0) for size in (900, 900, 10, 900, 900, 900, 900, 900)]
    assert partition(chain(known), [Device(), Device()]).bounds[0] == 4
    assert partition(chain(known), [Device(), Device()], bandwidth=100.0).bounds[0] == 3


def test_one_slow_link_moves_only_its_cut() -> None:
    known = [Cost(1.0, 1.0, size) for size in (9, 1, 9, 9, 1, 9)]
    slow = Device(bandwidth=2.0)
    assert partition(chain(known), [Device(), Device(), slow]).bounds[1] == 5
    assert partition(chain(known), [Device(), slow, Device()]).bounds[0] == 2


def test_a_link_with_latency_alone_leaves_both_stages_their_layers() -> None:
    """Nothing crosses behind the first operation, so that a cut there waits for no message; it would be no pipeline."""
    known = [Cost(0.001, 0.001, 0), *[Cost(1.0, 1.0, 100, 10)] * 8]
    devices = [Device(), Device(bandwidth=1e6, latency=9.0)]
    assert partition(chain(known), devices, microbatches=8).bounds[0] == 1
    found = quickest_cut(chain(known), known, devices, schedule="1f1b", microbatches=8, slack=0.02)
    assert found.bounds[0] in (4, 5)
    narrow = [Device(), Device(bandwidth=1.0, latency=9.0)]
    assert quickest_cut(chain(known), known, narrow, schedule="1f1b", microbatches=8, slack=0.02).bounds[0] == 1


def test_stages_that_are_shared_fit_into_memory_too() -> None:
    known = [Cost(3.0, 0.0, 0, 100), Cost(1.0, 0.0, 0, 100)]
    assert replicated(chain(known), 2).slowest == 2.0
    assert replicated(chain(known), 2, memory=400.0).slowest == 3.0
    with pytest.raises(UsageError, match="the model does not fit"):
        replicated(chain(known), 2, memory=300.0)


def test_a_skip_connection_counts_in_every_cut_that_it_crosses() -> None:
    # The first value is needed once more by the last operation.
    crossing = [[], [0], [0, 1], [0, 2]]
    problem = Problem([Cost(1.0, 0.0, 7, 0)] * 4, [1, 2, 3], crossing)
    assert [stage.bytes for stage in partition(problem, [Device()] * 4).stages] == [0, 7, 14, 14]


def test_operations_that_must_stay_together_do() -> None:
    problem = Problem([Cost(1.0, 0.0, 1, 0)] * 6, [1, 5], [[]] * 6)
    assert partition(problem, [Device(), Device()]).bounds in ([1, 6], [5, 6])
    with pytest.raises(UsageError, match=r"can be cut into 3 parts at most, .* 4 stages are too many"):
        partition(problem, [Device()] * 4)


def test_a_stage_that_cannot_be_cut_is_shared_by_several_devices_where_that_is_better() -> None:
    known = [Cost(0.5, 0.5, 1, 0), Cost(3.0, 3.0, 1, 0), Cost(0.5, 0.5, 1, 0)]
    alone = partition(chain(known), [Device()] * 3)
    assert alone.slowest == pytest.approx(6.0)
    shared = replicated(chain(known), 4)
    assert shared.slowest == pytest.approx(2.0)
    assert sum(stage.devices for stage in shared.stages) == 4
    dear = [Cost(cost.forward, cost.backward, 1, 10_000) for cost in known]
    assert replicated(chain(dear), 4, bandwidth=100.0, microbatches=1).slowest == pytest.approx(6.0)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(lengths, st.integers(0, 30)), min_size=2, max_size=6),
    devices=st.integers(1, 4),
    bandwidth=st.sampled_from([math.inf, 20.0]),
)
def test_replicated_stages_are_the_optimum_by_brute_force(
    costs: list[tuple[float, int]], devices: int, bandwidth: float
) -> None:
    known = [Cost(seconds, 0.0, size, 0) for seconds, size in costs]
    best = math.inf
    for stages in range(1, min(devices, len(known)) + 1):
        for ends in itertools.combinations(range(1, len(known)), stages - 1):
            bounds = [0, *ends, len(known)]
            for shares in itertools.product(range(1, devices + 1), repeat=stages):
                if sum(shares) > devices:
                    continue
                worst = 0.0
                for number, share in enumerate(shares):
                    part = known[bounds[number] : bounds[number + 1]]
                    worst = max(worst, sum(cost.seconds for cost in part) / share)
                    crossing = known[bounds[number] - 1].bytes if number else 0
                    worst = max(worst, 2 * crossing / bandwidth if crossing else 0.0)
                best = min(best, worst)
    assert replicated(chain(known), devices, bandwidth=bandwidth).slowest == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.tuples(lengths, st.integers(0, 30), st.integers(0, 40)), min_size=2, max_size=6),
    devices=st.integers(1, 4),
    bandwidth=st.sampled_from([math.inf, 20.0]),
)
def test_a_run_finds_the_cut_again_that_was_planned(
    costs: list[tuple[float, int, int]], devices: int, bandwidth: float
) -> None:
    known = [Cost(seconds, 0.0, size, held) for seconds, size, held in costs]
    planned = replicated(chain(known), devices, bandwidth=bandwidth)
    counts = [Device(count=stage.devices) for stage in planned.stages]
    again = partition(chain(known), counts, bandwidth=bandwidth)
    assert again.slowest == pytest.approx(planned.slowest)
    assert [stage.devices for stage in again.stages] == [stage.devices for stage in planned.stages]


def test_nobody_shares_a_stage_without_a_microbatch_for_it() -> None:
    known = [Cost(1.0, 1.0, 1, 0), Cost(20.0, 20.0, 1, 0)]
    assert max(stage.devices for stage in replicated(chain(known), 6, microbatches=3).stages) == 3


def test_a_stage_with_two_devices_gets_twice_as_much() -> None:
    known = [Cost(1.0, 2.0, 10, 10)] * 12
    found = partition(chain(known), [Device(), Device(count=2)])
    assert found.bounds == [4, 12]
    assert found.slowest == pytest.approx(12.0)
    slow = partition(chain(known), [Device(), Device(count=2, pace=0.5)])
    assert slow.bounds == [6, 12]
    assert kept_in_flight("1f1b", 2, 8, [1, 2]) == [3, 1]
    assert kept_in_flight("gpipe", 2, 8, [1, 2]) == [8, 4]
