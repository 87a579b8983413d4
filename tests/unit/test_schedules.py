"""Pipelines, operation by operation, take what the formulas say where there are some."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.distributions import Constant, Exponential
from paceline.errors import UsageError
from paceline.schedules import (
    SCHEDULES,
    PassTimes,
    StageOperation,
    bubble,
    kept_in_flight,
    shared_orders,
    step_seconds,
)
from paceline.schedules.registry import Schedule
from paceline.schedules.timing import ScheduleTiming, evaluate
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import predict, simulate
from paceline.simulate.replica import Model
from paceline.topologies import Link


def run(
    schedule: str, stages: int, microbatches: int, *times: float, chunks: int = 1, transfer: float = 0.0
) -> ScheduleTiming:
    forward, backward, weights = (np.full((1, stages), value) for value in (*times, 0.0, 0.0)[:3])
    return evaluate(schedule, microbatches, forward, backward, weights, chunks=chunks, transfer=transfer)


SHAPES = [(1, 1), (1, 5), (2, 2), (2, 8), (4, 4), (4, 16), (8, 32), (5, 3)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_take_the_same(schedule: str, stages: int, microbatches: int) -> None:
    told = run(schedule, stages, microbatches, 1.0, 2.0)
    assert told.makespan[0] == step_seconds(schedule, stages, microbatches, PassTimes(1.0, 2.0))
    assert told.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert told.bubble == pytest.approx(bubble(schedule, stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_what_is_kept_is_what_the_formulas_say(stages: int, microbatches: int) -> None:
    assert run("gpipe", stages, microbatches, 1.0, 2.0).in_flight == [microbatches] * stages
    wanted = [min(microbatches, stages - stage) for stage in range(stages)]
    assert kept_in_flight("1f1b", stages, microbatches) == wanted
    assert run("1f1b", stages, microbatches, 1.0, 2.0).in_flight == wanted


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 32, 2), (8, 32, 4)]
)
def test_interleaving_divides_the_bubble(stages: int, microbatches: int, chunks: int) -> None:
    told = run("interleaved", stages, microbatches, 1.0, 2.0, chunks=chunks)
    assert told.makespan[0] == pytest.approx(
        step_seconds("interleaved", stages, microbatches, PassTimes(1.0, 2.0), chunks)
    )
    idle = told.makespan[0] / told.busy[0, 0] - 1
    assert idle == pytest.approx((stages - 1) / (chunks * microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8), (3, 7), (8, 32)])
def test_zero_bubble_with_the_same_memory_leaves_a_third(stages: int, microbatches: int) -> None:
    told = run("zero-bubble", stages, microbatches, 1.0, 1.0, 1.0)
    assert told.makespan[0] == step_seconds("zero-bubble", stages, microbatches, PassTimes(1.0, 1.0, 1.0))
    plain = run("1f1b", stages, microbatches, 1.0, 2.0)
    assert told.makespan[0] - 3 * microbatches == pytest.approx((plain.makespan[0] - 3 * microbatches) / 3)
    assert max(told.in_flight) <= stages


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (4, 7), (8, 32)])
def test_zero_bubble_with_twice_the_memory_leaves_none(stages: int, microbatches: int) -> None:
    told = run("zero-bubble-2p", stages, microbatches, 1.0, 1.0, 1.0)
    wanted = step_seconds("zero-bubble-2p", stages, microbatches, PassTimes(1.0, 1.0, 1.0))
    for device in range(stages):
        own = [one for one in told.operations if one.device == device]
        assert own[-1].end - own[0].start == wanted
    assert max(told.in_flight) <= 2 * stages - 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_is_done_once_and_in_a_possible_order(schedule: str) -> None:
    stages, microbatches, chunks = 4, 8, 2 if SCHEDULES[schedule].has_chunks else 1
    told = run(schedule, stages, microbatches, 1.0, 1.5, 0.5, chunks=chunks, transfer=0.25)
    kinds = "FBW" if SCHEDULES[schedule].splits_backward else "FB"
    ends = {(s.stage, *s.operation): s.end for s in told.operations}
    starts = {(s.stage, *s.operation): s.start for s in told.operations}
    assert len(ends) == len(told.operations) == stages * microbatches * chunks * len(kinds)
    for (stage, kind, microbatch, chunk), start in starts.items():
        where = chunk * stages + stage
        if kind == "F" and where > 0:
            before = ((where - 1) % stages, "F", microbatch, (where - 1) // stages)
            assert start >= ends[before] + 0.25 - 1e-9
        if kind == "B" and where < stages * chunks - 1:
            after = ((where + 1) % stages, "B", microbatch, (where + 1) // stages)
            assert start >= ends[after] + 0.25 - 1e-9
        if kind == "B":
            assert start >= ends[stage, "F", microbatch, chunk] - 1e-9
        if kind == "W":
            assert start >= ends[stage, "B", microbatch, chunk] - 1e-9
    for stage in range(stages):
        mine = sorted((starts[key], ends[key]) for key in starts if key[0] == stage)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(mine))


def test_the_slowest_stage_sets_the_pace() -> None:
    forward = np.array([[1.0, 2.0, 1.0]])
    told = evaluate("1f1b", 50, forward, forward)
    assert told.makespan[0] == pytest.approx(50 * 4.0 + 2.0)
    assert told.busy[0].tolist() == [100.0, 200.0, 100.0]


# -- stages that several devices share -------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    workers=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    microbatches=st.integers(1, 24),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_no_sharing_comes_to_a_standstill(workers: list[int], microbatches: int, schedule: str) -> None:
    orders = shared_orders(schedule, workers, microbatches)
    stages = [stage for stage, count in enumerate(workers) for _ in range(count)]
    for stage in range(len(workers)):
        done = [one for device, order in enumerate(orders) if stages[device] == stage for one in order]
        assert sorted(done) == sorted((kind, number, 0) for kind in "FB" for number in range(microbatches))
    times = np.ones((1, len(stages)))
    told = evaluate(schedule, microbatches, times, times, workers=workers)
    assert told.makespan[0] >= 2 * microbatches / min(workers)
    assert len(told.operations) == 2 * microbatches * len(workers)


def test_one_device_for_each_stage_is_the_schedule_itself() -> None:
    for schedule in ("gpipe", "1f1b"):
        assert shared_orders(schedule, [1, 1, 1], 5) == SCHEDULES[schedule].orders(3, 5, 1)


def test_a_stage_that_takes_twice_as_long_keeps_two_devices_busy() -> None:
    alone = evaluate("1f1b", 64, np.array([[1.0, 2.0]]), np.array([[1.0, 2.0]]))
    both = evaluate("1f1b", 64, np.array([[1.0, 2.0, 2.0]]), np.array([[1.0, 2.0, 2.0]]), workers=[1, 2])
    assert alone.makespan[0] == pytest.approx(2 * both.makespan[0], rel=0.05)
    assert both.busy[0].tolist() == [128.0, 128.0, 128.0]
    assert both.bubble < 0.06
    assert both.in_flight == [3, 1, 1]  # not more than there are devices


def test_a_device_that_is_slow_holds_up_those_who_share_with_it() -> None:
    times = np.array([[1.0, 2.0, 4.0]])
    told = evaluate("1f1b", 64, times, times, workers=[1, 2])
    assert told.makespan[0] == pytest.approx(32 * 8.0, rel=0.05)


def test_a_shared_stage_is_simulated_with_its_share_of_the_model() -> None:
    on = SimulatedCluster(workers=3, compute=Constant(12.0))
    told, traced = simulate("pipeline:stages=2,microbatches=64,workers=1+2", on, updates=3, trace=True)
    assert told.seconds_per_update == pytest.approx(4.0, rel=0.05)
    assert traced is not None and {event.rank for event in traced.events} == {0, 1, 2}
    assert predict("pipeline:stages=2,workers=1+2", on).seconds_per_update is None
    with pytest.raises(UsageError, match="one each, or the sum of the option 'workers'"):
        simulate("pipeline:stages=2,workers=1+1", on, updates=3)


def test_a_new_schedule_is_one_function_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(stages: int, microbatches: int, _: int) -> list[list[StageOperation]]:
        """Every microbatch forward and backward before the next one."""
        return [[StageOperation(kind, i) for i in range(microbatches) for kind in "FB"] for _ in range(stages)]

    monkeypatch.setitem(SCHEDULES, "one-by-one", Schedule(one_by_one))
    on = SimulatedCluster(workers=4, compute=Constant(12.0))
    spec = "pipeline:stages=4,microbatches=8,schedule=one-by-one"
    assert simulate(spec, on, updates=3)[0].seconds_per_update == pytest.approx(12.0)
    assert predict(spec, on).seconds_per_update is None
    assert bubble("one-by-one", 4, 8) is None
    assert kept_in_flight("one-by-one", 4, 8) == [1, 1, 1, 1]
    with pytest.raises(UsageError, match="under the schedule 'one-by-one' a stage has one worker"):
        simulate(f"{spec},workers=1+1+1+2", on, updates=3)


# -- as strategies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_pipeline_of_equal_stages_takes_its_formula(schedule: str) -> None:
    on = SimulatedCluster(workers=4, compute=Constant(12.0))
    spec = f"pipeline:stages=4,microbatches=8,schedule={schedule}"
    told, _ = simulate(spec, on, updates=5)
    assert told.seconds_per_update == pytest.approx(predict(spec, on).seconds_per_update)
    assert told.bubble is not None
    assert told.waiting == pytest.approx([told.bubble] * 4)


def test_the_reference_s_pipeline() -> None:
    on = SimulatedCluster(workers=8, compute=Constant(8 * 32 * 3.0))
    told, _ = simulate("pipeline:stages=8,microbatches=32", on, updates=2)
    assert told.seconds_per_update == pytest.approx(117.0)
    assert told.bubble == pytest.approx(0.1795, abs=5e-5)


def test_a_stage_that_is_slow_now_and_then_holds_up_all() -> None:
    steady, _ = simulate("pipeline:stages=4", SimulatedCluster(workers=4, compute=Constant(2.0)), updates=50)
    jittery, _ = simulate("pipeline:stages=4", SimulatedCluster(workers=4, compute=Exponential(1.0, 1.0)), updates=500)
    assert jittery.seconds_per_update > 1.2 * steady.seconds_per_update


def test_tensor_parallel_divides_the_work_and_pays_for_agreeing() -> None:
    on = SimulatedCluster(workers=4, compute=Constant(2.0), link=Link(0.001, 1e9))
    told, _ = simulate("tensor:degree=4", on, updates=5, model=Model(layers=6, activations=4e6))
    each = 2 * 0.001 + 1.5 * 4e6 / 1e9
    assert told.seconds_per_update == pytest.approx(0.5 + 4 * 6 * each)


def test_a_mesh_of_one_kind_is_that_kind() -> None:
    on = SimulatedCluster(workers=4, compute=Constant(2.0), size=1e8, link=Link(0.0, 1e9))
    data, _ = simulate("all-reduce", on, updates=20)
    mesh, _ = simulate("mesh:data=4", on, updates=20)
    assert mesh.seconds_per_update == pytest.approx(data.seconds_per_update)
    assert mesh.strategy == "mesh:data=4"


def test_replicas_of_a_mesh_may_be_asynchronous() -> None:
    on = SimulatedCluster(workers=8, compute=Exponential(1.0, 1.0), factors=(1.0,) * 6 + (4.0,) * 2)
    sync, _ = simulate("mesh:data=4,pipeline=2", on, updates=400)
    free, _ = simulate("mesh:data=4,pipeline=2,sync=async", on, updates=1600)
    dropped, _ = simulate("mesh:data=4,pipeline=2,sync=k-sync:k=3", on, updates=400)
    assert free.minibatches_per_second > 2 * sync.minibatches_per_second
    assert dropped.seconds_per_update < 0.5 * sync.seconds_per_update
    assert free.staleness.mean == pytest.approx(3.0, abs=0.1)


def test_a_model_must_make_sense() -> None:
    for wrong in ({"forward": 0.0}, {"forward": 0.8, "weights": 0.4}, {"layers": 0}, {"activations": -1.0}):
        with pytest.raises(UsageError):
            Model(**wrong)  # type: ignore[arg-type]


def test_messages_queue_on_a_link_and_a_slow_one_sets_the_pace() -> None:
    """With two stages of 1 + 1 s, and a link that one message occupies for 3 s each way."""
    one = np.ones((1, 2))
    free = evaluate("gpipe", 8, one, one, links=[(0.0, 0.0), (0.0, 0.0)])
    assert free.makespan[0] == evaluate("gpipe", 8, one, one).makespan[0]
    slow = evaluate("gpipe", 8, one, one, links=[(0.0, 0.0), (3.0, 0.5)])
    # The first leaves at 1 s, the eighth arrives 8 × 3 + 0.5 s later; of its gradients the first is back at 27.5 s.
    assert slow.makespan[0] == 1 + 8 * 3 + 0.5 + 1 + 1 + 8 * 3 + 0.5 + 1
