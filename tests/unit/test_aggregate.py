"""A run reduced to what its pictures need says the same as a naive count of its events."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from helpers.summaries import summarise
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.events import Cancel, Compute, Event, Join, Leave, Load, Lost, Message, Metric, Pull, Push, Update, Wait
from paceline.report.aggregate import Curve, RunAggregate, Tally
from paceline.report.buckets import MOST, Buckets
from paceline.report.detail import SLOWEST, Detail, covers
from paceline.report.facts import facts
from paceline.report.rows import COMPUTING, KINDS, PUSH, ROW, Rows

# -- reports: a run reduced to what its pictures need ----------------------------------------------------------------

NAMES: dict[type, str] = {
    Compute: "computing",
    Load: "loading",
    Pull: "communicating",
    Update: "updating",
    Wait: "waiting",
    Cancel: "cancelled",
}


def all_reduce_run(seed: int, workers: int = 3, rounds: int = 12, begin: float = 1000.0) -> list[Event]:
    """Workers of random speed, in the order of time; the last one of a round lets the others wait."""
    random = np.random.default_rng(seed)
    happened: list[Event] = [Join(rank, begin - 1, 1, "host", "cpu", "all-reduce", 5.0) for rank in range(workers)]
    now = begin
    for number in range(rounds):
        loads, steps = random.uniform(0.001, 0.01, workers), random.uniform(0.01, 0.1, workers)
        ready = now + loads + steps
        last = int(ready.argmax())
        for rank in range(workers):
            happened.append(Load(rank, now, float(loads[rank])))
            batch = int(random.integers(1, 9))
            happened.append(
                Compute(
                    rank,
                    now + float(loads[rank]),
                    float(steps[rank]),
                    number,
                    int(random.integers(1, 3)),
                    batch,
                    float(steps[rank]) / 8,
                    float(steps[rank]) / 4,
                )
            )
            if rank != last:
                happened.append(Wait(rank, float(ready[rank]), float(ready[last] - ready[rank]), last))
            happened.append(
                Update(rank, float(ready[last]), 0.002, number + 1, 10 * rank, workers, skipped=number % 5 == 4)
            )
            happened.append(Message(rank, float(ready[last]), 0.001, "all_reduce", "ring", "send", 0, 3))
            happened.append(Metric(rank, float(ready[last]), number, {"loss": float(rank + number), f"of {rank}": 1.0}))
        now = float(ready[last]) + 0.002
    return sorted(happened, key=lambda event: event.start)


def server_run(seed: int, workers: int = 3, steps: int = 12, begin: float = 1000.0) -> list[Event]:
    """Workers that push to a server whenever they are ready, in the order of time."""
    random = np.random.default_rng(seed)
    happened: list[Event] = [Join(rank, begin - 1, 1, "host", "cpu", "async", 5.0) for rank in range(workers)]
    ticket = 0
    for rank in range(workers):
        now = begin + 0.01 * rank
        for number in range(steps):
            seconds = float(random.uniform(0.01, 0.1))
            if random.random() < 0.2:
                happened.append(Cancel(rank, now, seconds, number, [number]))
                now += seconds
                continue
            happened.append(Compute(rank, now, seconds, number, 1, int(random.integers(1, 9))))
            now += seconds
            ticket += 1
            outcome = str(random.choice(["used", "held", "dropped", "skipped"]))
            sizes = random.integers(1, 100, 2).tolist()
            happened.append(
                Push(rank, now + 1e-4, ticket, number, int(random.integers(0, 4)), 8, [], *sizes, outcome, "because")
            )
            if outcome == "used":
                happened.append(Update(-1, now + 2e-4, 1e-3, ticket, 7, 1))
            happened.append(Pull(rank, now, 2e-3, number + 1))
            now += 2e-3
    return sorted(happened, key=lambda event: event.start)


def fed(events: Sequence[Event], cuts: Sequence[int] = (), lag: float = 0.0, limit: int = 100_000) -> RunAggregate:
    """Feed events in the order of time in blocks that end at these numbers, and count up to shortly before each end."""
    run = RunAggregate(limit)
    edges = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    for begin, end in itertools.pairwise(edges):
        run.feed(events[begin:end])
        if 0 < end < len(events):
            run.advance(events[end].start - lag)
    run.advance()
    return run


def check_tallies(run: RunAggregate, events: Sequence[Event]) -> None:
    seconds: dict[int, Counter[str]] = defaultdict(Counter)
    counted: dict[int, Counter[str]] = defaultdict(Counter)
    for event in events:
        mine = counted[event.rank]
        if type(event) in NAMES:
            seconds[event.rank][NAMES[type(event)]] += getattr(event, "seconds", 0.0)
            mine["read"] += getattr(event, "bytes", 0)
        match event:
            case Compute():
                mine["minibatches"] += event.minibatches
                mine["samples"] += event.samples
                seconds[event.rank]["forward"] += event.forward
                seconds[event.rank]["slowed"] += event.slowed
            case Update():
                mine["updates"] += 1
            case Cancel():
                mine["cancelled"] += 1
            case Push():
                mine["pushed"] += event.bytes
                mine["saved"] += event.saved
            case Message():
                mine["sent"] += event.bytes
    assert set(run.tallies) == set(counted)
    for rank, tally in run.tallies.items():
        wanted = seconds[rank]
        assert dict(zip(KINDS, tally.seconds.tolist(), strict=True)) == pytest.approx({k: wanted[k] for k in KINDS})
        assert (tally.forward, tally.slowed) == pytest.approx((wanted["forward"], wanted["slowed"]))
        for name in ("minibatches", "samples", "updates", "cancelled", "read", "pushed", "saved", "sent"):
            assert getattr(tally, name) == counted[rank][name], name


def updates_of(events: Sequence[Event], who: int) -> list[float]:
    """When its updates were over."""
    made = [event for event in events if isinstance(event, Update) and event.rank == who and not event.skipped]
    return sorted(event.start + event.seconds for event in made)


def series(run: RunAggregate, *key: object) -> list[float]:
    assert run.buckets is not None
    return run.buckets.get(key, MOST)


CUTS = st.lists(st.integers(1, 200), max_size=8)
LAGS = st.sampled_from([0.0, 0.005, 0.03, 0.1, 1.0])


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), workers=st.integers(1, 4), cuts=CUTS, lag=LAGS)
def test_an_all_reduce_run_is_counted_rightly_in_whatever_blocks(
    seed: int, workers: int, cuts: list[int], lag: float
) -> None:
    events = all_reduce_run(seed, workers)
    run = fed(events, cuts, lag)
    check_tallies(run, events)
    moments = updates_of(events, 0)
    assert not run.served
    assert sum(series(run, "updates")) == len(moments)
    assert run.update_span == (moments[0], moments[-1])
    assert sum(series(run, *run.samples.key)) == sum(event.samples for event in events if isinstance(event, Compute))
    assert run.staleness == {}
    done = [event for event in events if type(event) in NAMES]
    assert run.first == min(event.start for event in done)
    assert run.last == max(event.start + getattr(event, "seconds", 0.0) for event in done)
    for rank in range(workers):
        for number, kind in enumerate(KINDS):
            assert sum(series(run, rank, number)) == pytest.approx(float(run.tallies[rank].seconds[number])), kind


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), workers=st.integers(1, 4), cuts=CUTS, lag=LAGS)
def test_a_server_s_run_is_counted_rightly_in_whatever_blocks(
    seed: int, workers: int, cuts: list[int], lag: float
) -> None:
    events = server_run(seed, workers)
    run = fed(events, cuts, lag)
    check_tallies(run, events)
    pushes = [event for event in events if isinstance(event, Push)]
    assert run.served
    assert run.staleness == Counter(push.staleness for push in pushes if push.outcome in ("used", "held"))
    moments = updates_of(events, -1)
    assert sum(series(run, "updates")) == len(moments)
    if moments:
        assert run.update_span == (moments[0], moments[-1])
    for rank in range(workers):
        mine = [push.staleness for push in pushes if push.rank == rank]
        assert run.tallies[rank].stale == (mine[-1] if mine else 0)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), cuts=CUTS, lag=LAGS)
@example(seed=0, cuts=[5], lag=0.0)
def test_of_a_server_s_run_the_samples_are_those_of_the_gradients_that_it_used_in_whatever_blocks(
    seed: int, cuts: list[int], lag: float
) -> None:
    events = server_run(seed)
    wanted = sum(event.samples for event in events if isinstance(event, Push) and event.outcome in ("used", "held"))
    run = fed(events, cuts, lag)
    assert sum(series(run, *run.samples.key)) == wanted


def test_buckets_begin_with_the_run_even_if_its_first_event_comes_late() -> None:
    run = RunAggregate()
    run.feed([Compute(0, 10.0, 1.0, 0, 1, 8)])
    run.advance(5.0)
    run.feed([Compute(1, 7.0, 1.0, 0, 1, 8)])
    run.advance()
    assert run.first == 7.0
    assert sum(series(run, 1, COMPUTING)) == pytest.approx(1.0)


@pytest.mark.parametrize("make", [all_reduce_run, server_run])
@pytest.mark.parametrize("updates", [3, 12, 100])
def test_a_report_says_the_same_samples_per_second_as_the_summary(make: object, updates: int) -> None:
    events = all_reduce_run(1, 2, updates) if make is all_reduce_run else server_run(1, 2, updates)
    said = facts(fed(events), name="run", config={}, notes=[], pictures=False)
    summary = summarise(events, 2)
    assert said["updates"] == summary.updates
    assert said["seconds_per_update"] == pytest.approx(summary.seconds_per_update)
    assert said["samples_per_second"] == pytest.approx(summary.samples_per_second, rel=0.01)


@pytest.mark.parametrize("cuts", [[], [1], [5, 50, 51, 120]])
def test_a_curve_has_what_the_lead_reported_and_another_s_only_where_the_lead_is_silent(cuts: list[int]) -> None:
    events = all_reduce_run(3)
    run = fed(events, cuts)
    assert set(run.curves) == {"loss", "of 0", "of 1", "of 2"}
    for name, rank in (("loss", 0), ("of 0", 0), ("of 1", 1), ("of 2", 2)):
        wanted = [event for event in events if isinstance(event, Metric) and event.rank == rank]
        curve = run.curves[name]
        assert curve.rank == rank
        moments, versions, values = curve.series()
        assert moments == [event.start for event in wanted]
        assert versions == [event.version for event in wanted]
        assert values == [event.values[name] for event in wanted]


def test_values_that_are_not_finite_are_left_out_of_curves() -> None:
    values = [1.0, math.nan, math.inf, 2.0]
    run = fed([Metric(0, float(number), number, {"loss": value}) for number, value in enumerate(values)])
    assert run.curves["loss"].series()[::2] == ([0.0, 3.0], [1.0, 2.0])


def test_a_worker_s_last_state_is_what_it_did_last() -> None:
    events: list[Event] = [Join(rank, 0.0, 1, "host", "cpu", "sync", 100.0) for rank in range(5)]
    events += [Compute(rank, 1.0, 1.0, 4, 1, 8) for rank in range(1, 5)]
    events += [Wait(2, 2.0, 1.5, 1), Leave(3, 5.0), Lost(4, 6.0)]
    run = fed(events)
    assert [run.tallies[rank].state for rank in range(5)] == ["joined", "computing", "waiting", "left", "died"]
    assert [run.tallies[rank].heard for rank in range(5)] == [0.0, 2.0, 3.5, 5.0, 6.0]
    assert [run.tallies[rank].version for rank in range(5)] == [0, 4, 4, 4, 4]
    assert (run.strategy, run.wall, run.joined) == ("sync", 100.0, 0.0)


def test_quantiles_of_steps_are_right_within_two_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(-4, 1.0, 5000)
    tally: Tally = fed([Compute(0, float(n), float(length), 0, 1, 1) for n, length in enumerate(lengths)]).tallies[0]
    assert tally.longest == lengths.max()
    for share in (0.01, 0.5, 0.9, 0.99):
        assert tally.quantile(share) == pytest.approx(float(np.quantile(lengths, share)), rel=0.02)
    assert tally.quantile(1.0) <= tally.longest
    assert Tally().quantile(0.5) == 0.0


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    run, block, limit, now = RunAggregate(limit=5000), 5000, 5000, 0.0
    sizes = []
    for _ in range(40):
        events: list[Event] = []
        for number in range(block // 4):
            events.append(Compute(0, now, 0.5, number, 1, 1))
            events.append(Compute(1, now, 0.25, number, 1, 1))
            events.append(Wait(1, now + 0.25, 0.25, 0))
            events += [Update(rank, now + 0.5, 0.1, number) for rank in (0, 1)]
            now += 1.0
        run.feed(events)
        run.advance(now)
        assert run.buckets is not None
        kept = sum(len(piece.rows) + len(piece.pushes) for piece in run.detail.seal())
        sizes.append(kept)
        assert len(run._pending) + len(run._pushes) + len(run.blame._known) + len(run.blame._open) <= 8
        assert all(len(one) == MOST for one in run.buckets._series.values())
        assert len(run.buckets._series) == 7
    assert max(sizes) <= limit + block // 4
    assert int(run.tallies[0].minibatches) == 40 * block // 4
    assert run.blame.seconds[0]["backward"] == pytest.approx(0.25 * 40 * block // 4)


# -- reports: sums over time -----------------------------------------------------------------------------------------


def overlap(buckets: Buckets, stretches: Sequence[tuple[float, float]]) -> list[float]:
    """Each stretch's seconds in each bucket, one by one."""
    sums = [0.0] * MOST
    for start, seconds in stretches:
        first = int((start - buckets.start) / buckets.width)
        last = min(MOST - 1, int((start + seconds - buckets.start) / buckets.width))
        for number in range(first, last + 1):
            low = buckets.start + number * buckets.width
            sums[number] += max(0.0, min(low + buckets.width, start + seconds) - max(low, start))
    return sums


def test_a_stretch_is_divided_among_the_buckets_that_it_lies_in() -> None:
    buckets = Buckets(100.0)
    width = buckets.width
    buckets.add_intervals(("a",), np.array([100 + 1.5 * width]), np.array([2.75 * width]))
    assert buckets.get(("a",), 6) == pytest.approx([0.0, 0.5 * width, width, width, 0.25 * width, 0.0])
    assert buckets.get(("b",), 3) == [0.0] * 3
    assert buckets.count(100.0) == 1
    assert buckets.count(100.0 + 2.5 * width) == 3


@settings(max_examples=40)
@given(
    gaps=st.lists(st.tuples(st.floats(0, 3), st.floats(1e-4, 3)), min_size=1, max_size=20),
    begin=st.sampled_from([0.0, 12.5, 100_000.0]),
    cut=st.integers(0, 20),
)
def test_sums_are_conserved_and_rightly_divided_however_wide_buckets_get(
    gaps: list[tuple[float, float]], begin: float, cut: int
) -> None:
    stretches, now = [], begin
    for gap, seconds in gaps:
        stretches.append((now + gap, seconds))
        now += gap + seconds
    buckets = Buckets(begin)
    for part in (stretches[:cut], stretches[cut:]):
        starts, seconds = np.array([one[0] for one in part]), np.array([one[1] for one in part])
        buckets.add_intervals(("busy",), starts, seconds)
        buckets.add_points(("count",), starts, np.ones(len(part)))
    assert now - begin <= buckets.width * MOST
    assert sum(buckets.get(("busy",), MOST)) == pytest.approx(sum(seconds for _, seconds in stretches))
    assert buckets.get(("busy",), MOST) == pytest.approx(overlap(buckets, stretches), abs=1e-8)
    places = Counter(int((start - begin) / buckets.width) for start, _ in stretches)
    assert buckets.get(("count",), MOST) == [places[number] for number in range(MOST)]


def test_buckets_get_twice_as_wide_until_a_moment_lies_in_one() -> None:
    buckets = Buckets(0.0)
    narrow = buckets.width
    moments = np.arange(MOST) * narrow
    buckets.add_points(("n",), moments, np.arange(MOST, dtype=float))
    assert buckets.width == narrow
    assert buckets.get(("n",), MOST) == list(range(MOST))
    buckets.add_points(("n",), np.array([5.0 * MOST * narrow]), np.array([0.5]))
    assert buckets.width == 8 * narrow
    wanted = [float(sum(range(8 * number, 8 * number + 8))) for number in range(MOST // 8)]
    assert buckets.get(("n",), MOST // 8) == wanted
    assert sum(buckets.get(("n",), MOST)) == sum(range(MOST)) + 0.5


# -- reports: single steps -------------------------------------------------------------------------------------------


def steps(count: int, workers: int = 2, seed: int = 0) -> Rows:
    """Steps one after the other, of random lengths."""
    made = np.zeros(count, ROW)
    made["rank"] = np.arange(count) % workers
    made["kind"] = COMPUTING
    made["start"] = np.arange(count)
    made["version"] = np.arange(count)
    made["seconds"] = np.random.default_rng(seed).permutation(count) / count
    return made


def pushes_at(moments: Sequence[float]) -> Rows:
    made = np.zeros(len(moments), PUSH)
    made["start"] = moments
    return made


def kept(rows: Rows, limit: int, block: int) -> Detail:
    detail = Detail(limit)
    for begin in range(0, len(rows), block):
        part = rows[begin : begin + block]
        detail.add(part, pushes_at((part["start"] + 0.5).tolist()))
    return detail


@pytest.mark.parametrize("block", [1, 100, 127, 1000, 5000])
def test_of_a_short_run_every_step_is_kept(block: int) -> None:
    rows = steps(5000)
    detail = kept(rows, 5000, block)
    assert detail.whole
    pieces = detail.seal()
    assert np.array_equal(np.concatenate([piece.rows for piece in pieces]), rows)
    pushes = np.concatenate([piece.pushes for piece in pieces])
    assert np.array_equal(np.sort(pushes["start"]), rows["start"] + 0.5)


@pytest.mark.parametrize("limit", [2000, 10_000])
@pytest.mark.parametrize("block", [100, 3000, 40_000])
def test_of_a_long_run_hardly_more_than_the_limit_is_kept(block: int, limit: int) -> None:
    rows = steps(40_000)
    detail = kept(rows, limit, block)
    assert not detail.whole
    pieces = detail.seal()
    piece = max(128, limit // 48)
    assert limit / 4 < sum(len(part.rows) for part in pieces) <= limit + 2 * piece
    assert pieces[0].rows["version"][0] == 0
    assert pieces[-1].rows["version"][-1] == 39_999
    before = -1
    for part in pieces:
        versions = part.rows["version"]
        assert np.array_equal(versions, np.arange(versions[0], versions[0] + len(versions))), "a piece has no holes"
        assert versions[0] > before
        before = int(versions[-1])
        assert covers(part) == (rows["start"][versions[0]], (rows["start"] + rows["seconds"])[versions].max())
        assert set(np.floor(part.pushes["start"])) == set(part.rows["start"]), "and the pushes of its time"


@pytest.mark.parametrize("block", [500, 5000, 100_000])
def test_the_pieces_of_a_long_run_are_evenly_spread(block: int) -> None:
    count = 100_000
    detail = kept(steps(count), 5000, block)
    middles = [(piece.rows["start"][0] + piece.rows["start"][-1]) / 2 for piece in detail.seal()]
    gaps = np.diff([0.0, *middles, count])
    assert gaps.max() <= count / 8


@pytest.mark.parametrize("block", [500, 3000, 20_000])
def test_the_slowest_steps_of_every_worker_are_kept_wherever_they_are(block: int) -> None:
    rows = steps(20_000, 3, seed=1)
    detail = kept(rows, 2000, block)
    for rank in range(3):
        mine = rows[rows["rank"] == rank]
        wanted = mine[np.argsort(-mine["seconds"])][:SLOWEST]
        assert detail.slowest(rank, 0.0)["version"].tolist() == wanted["version"].tolist()
        above = float(wanted["seconds"][10])
        assert detail.slowest(rank, above)["version"].tolist() == wanted["version"][:10].tolist()
    assert len(detail.slowest(7, 0.0)) == 0


# -- reports: curves -------------------------------------------------------------------------------------------------


def curve_of(count: int) -> Curve:
    """A metric whose value is always three times its moment."""
    curve = Curve(0)
    for number in range(count):
        curve.add(float(number), 2 * number, 3.0 * number)
    return curve


def test_a_short_curve_has_every_value() -> None:
    curve = curve_of(3999)
    moments, versions, values = curve.series()
    assert moments == [float(number) for number in range(3999)]
    assert versions == [2.0 * number for number in range(3999)]
    assert values == [3.0 * number for number in range(3999)]


@pytest.mark.parametrize("count", [4001, 10_000, 60_001])
def test_a_long_curve_stays_bounded_and_on_the_curve(count: int) -> None:
    curve = curve_of(count)
    moments, versions, values = curve.series()
    assert 1000 <= len(values) <= 4000
    assert len(moments) == len(versions) == len(values)
    assert moments == sorted(moments)
    assert values == pytest.approx([3 * moment for moment in moments])
    assert versions == pytest.approx([2 * moment for moment in moments])


def test_a_long_curve_still_shows_its_beginning() -> None:
    curve = curve_of(60_000)
    gaps = np.diff([0.0, *curve.series()[0], 60_000.0])
    assert gaps.max() <= 600


@pytest.mark.parametrize("count", [4000, 4001, 4002])
def test_the_last_value_of_a_metric_is_the_one_reported_last(count: int) -> None:
    events: list[Event] = [Compute(0, 0.0, 1.0, 0, 1, 1)]
    events += [Metric(0, float(number), number, {"loss": 3.0 * number}) for number in range(count)]
    assert facts(fed(events), name="", config={}, notes=[], pictures=False)["last"] == {"loss": 3.0 * (count - 1)}
