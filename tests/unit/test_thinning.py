"""The record of a long run is bounded, and its sums are those of all events."""

from __future__ import annotations

import csv
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from paceline.config import parse_record_limit
from paceline.errors import UsageError
from paceline.events import (
    Compute,
    Epoch,
    Event,
    Join,
    LeaseGiven,
    Leave,
    Load,
    Metric,
    Omitted,
    Pull,
    Push,
    Return,
    Update,
    Wait,
    decode,
    read,
    thinning,
)
from paceline.events.exports import write_csv
from paceline.events.follower import EventFollower
from paceline.events.omitted import Ranges
from paceline.events.recorder import Recorder
from paceline.events.scalars import all_scalars
from paceline.events.summary import Summariser, Summary, merge
from paceline.events.thinning import Thinner
from paceline.report.source import open_run
from paceline.simulate.calibrate import calibrate
from paceline.simulate.what_if import WhatIf, answer

BATCH = 16
STEP = 0.02


def asynchronous(workers: int, steps: int, seed: int = 0, hold: int = 1) -> dict[int, list[Event]]:
    """The events of a run, by the process that records them; every tenth push is dropped, `hold` make an update."""
    draw = random.Random(seed)
    streams: dict[int, list[Event]] = {rank: [] for rank in (-1, *range(workers))}
    for rank in range(workers):
        streams[rank].append(Join(rank, 0.0, 1, "host", "cpu", "async", 1.7e9))
    server = streams[-1]
    server.append(Epoch(-1, 0.0, 0, 0, steps * BATCH))
    clock = dict.fromkeys(range(workers), 0.0)
    version, first, number, held = 0, 0, 0, list[Push]()
    again: list[int] = []
    for ticket in range(steps):
        rank = min(clock, key=clock.__getitem__)
        now, number = clock[rank], number + 1
        place = again.pop() if again else first
        first += BATCH * (place == first)
        server.append(LeaseGiven(rank, now, number, 0, 0, place, BATCH))
        seen = max(0, version - draw.randrange(3))
        length = STEP * draw.uniform(0.5, 1.5)
        mine = streams[rank]
        mine.append(Load(rank, now, 0.001))
        mine.append(Compute(rank, now + 0.001, length, seen, 1, BATCH, 0.0, length / 3, length))
        end = now + 0.001 + length
        dropped = ticket % 10 == 9
        push = Push(
            rank, end, ticket, seen, version - seen, BATCH, [number], 400, 100, "dropped" if dropped else "held", ""
        )
        if dropped:
            server.append(Return(rank, end, [number], "dropped"))
            again.append(place)
        else:
            held.append(push)
        if len(held) == hold:
            version += 1
            server.append(Update(-1, end, 0.0005, version, 64, hold, pushes=[one.ticket for one in held]))
            held.clear()
        server.append(push)  # as a server does, when all has been done that follows from it
        mine.append(Pull(rank, end, 0.001, version) if rank else Wait(rank, end, 0.001, 1))
        mine.append(Metric(rank, end, version, {"loss": 1 / (1 + ticket)}))
        clock[rank] = end + 0.002
    for rank in range(workers):
        streams[rank].append(Leave(rank, clock[rank]))
    return streams


def all_reduce(workers: int, steps: int) -> dict[int, list[Event]]:
    streams: dict[int, list[Event]] = {
        rank: [Join(rank, 0.0, 1, "h", "cpu", "all-reduce", 1.7e9)] for rank in range(workers)
    }
    for step in range(steps):
        now = step * STEP
        for rank, mine in streams.items():
            mine.append(Compute(rank, now, STEP / 2, step, 1, BATCH))
            mine.append(Wait(rank, now + STEP / 2, 0.001 * rank, 0))
            mine.append(Update(rank, now + 0.7 * STEP, 0.001, step + 1, 640, workers))
    streams[0].append(Compute(0, steps * STEP, STEP / 2, steps, 1, BATCH))  # after the last update
    return streams


def thinned(streams: dict[int, list[Event]], level: int) -> dict[int, list[Event]]:
    """The same after 3 s of full record."""
    found = {}
    for rank, events in streams.items():
        thinner = Thinner(0.0)
        mine = found[rank] = list[Event]()
        for event in events:
            thinner.level = level if event.start > 3.0 else 0
            mine += thinner.add(event)
        mine += thinner.settle()
    return found


def summary(streams: dict[int, list[Event]]) -> Summary:
    summariser = Summariser(2)
    for events in streams.values():
        for event in events:
            summariser.add(event)
    return summariser.result()


def written(folder: Path, streams: dict[int, list[Event]]) -> Path:
    (folder / "streams").mkdir(parents=True)
    for rank, events in streams.items():
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        (folder / "streams" / f"{rank}.jsonl").write_bytes(lines)
    return folder


RUNS = {
    "async": asynchronous(3, 4000),
    "k-async": asynchronous(4, 4000, seed=1, hold=3),
    "all-reduce": all_reduce(3, 2000),
}
LEVELS = [1, 2, 64]


# -- the sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", RUNS)
def test_the_summary_of_a_thinned_record_is_that_of_all_events(name: str, level: int) -> None:
    whole, part = summary(RUNS[name]), summary(thinned(RUNS[name], level))
    assert part.omitted > 0
    for key, value in msgspec.to_builtins(whole).items():
        found = msgspec.to_builtins(part)[key]
        if key == "workers":
            for rank, worker in value.items():
                assert found[rank] == pytest.approx(worker), rank
        elif key == "staleness":
            assert found["histogram"] == value["histogram"]
        elif key != "omitted":
            assert found == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize("level", LEVELS)
def test_every_sample_of_a_thinned_record_counts_once(level: int) -> None:
    """Whether it is trained on in a recorded update or in an omitted one."""
    for name in ("async", "k-async"):
        done = Counter[int]()
        for events in (RUNS[name][-1], thinned(RUNS[name], level)[-1]):
            before, done = done, Counter()
            leases = {event.number: event for event in events if isinstance(event, LeaseGiven)}
            pushes = {event.ticket: event for event in events if isinstance(event, Push)}
            for event in events:
                if isinstance(event, Update):
                    for number in [number for ticket in event.pushes for number in pushes[ticket].leases]:
                        done.update(range(leases[number].first, leases[number].first + leases[number].samples))
                elif isinstance(event, Omitted):
                    for *_, first, stop in event.trained:
                        done.update(range(first, stop))
        assert before == done
        assert set(done.values()) == {1}


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_recorded_of_a_server_can_be_followed(level: int) -> None:
    events = thinned(RUNS["k-async"], level)[-1]
    leases = {event.number for event in events if isinstance(event, LeaseGiven)}
    pushes = {event.ticket: event for event in events if isinstance(event, Push)}
    assert all(set(push.leases) <= leases for push in pushes.values())
    used = [ticket for event in events if isinstance(event, Update) for ticket in event.pushes]
    assert set(used) <= set(pushes)
    everything = [ticket for event in RUNS["k-async"][-1] if isinstance(event, Update) for ticket in event.pushes]
    recorded = {ticket for ticket, push in pushes.items() if push.outcome == "held"}
    assert recorded & set(everything) == set(used), "a recorded push has its update"


def test_processes_record_the_same_windows() -> None:
    found = thinned(RUNS["async"], 1)
    moments = {
        rank: {int(event.start // 5.0) for event in events if isinstance(event, Compute | Update)}
        for rank, events in found.items()
    }
    windows = set.intersection(*moments.values())
    assert {window % 2 for window in windows} == {0}
    late = [event for event in found[-1] if isinstance(event, Update) and int(event.start // 5.0) % 2]
    assert len(late) < 40, "only those that end what was recorded before"


def test_rare_events_are_always_recorded() -> None:
    found = thinned(RUNS["async"], 64)
    assert [type(event) for event in found[0]].count(Join) == 1
    assert isinstance(found[0][-1], Leave)
    assert sum(isinstance(event, Epoch) for event in found[-1]) == 1


def test_the_newest_metric_is_recorded_with_the_sums() -> None:
    found = thinned(RUNS["async"], 64)[1]
    losses = [event.values["loss"] for event in found if isinstance(event, Metric) and event.start > 4.0]
    assert 2 <= len(losses) < 100
    last = [event for event in RUNS["async"][1] if isinstance(event, Metric)][-1]
    assert losses[-1] == last.values["loss"]


def test_versions_with_gaps_are_counted_once() -> None:
    ranges = Ranges()
    assert [ranges.add(*each) for each in ((1, 3), (7, 9), (3, 8), (4, 4), (20, 20))] == [3, 3, 3, 0, 1]
    assert ranges.count == 10
    assert 9 in ranges
    assert 10 not in ranges


# -- the bound -------------------------------------------------------------------------------------------------------


def test_the_streams_of_a_run_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the run is, of two processes that take turns."""
    monkeypatch.setattr(thinning, "_WINDOW", 0.5)
    limit = 300_000
    streams = asynchronous(1, 12_000)
    recorders = {rank: Recorder(tmp_path, rank, limit) for rank in streams}
    raw = 0
    later = sorted(
        ((event, rank) for rank, events in streams.items() for event in events), key=lambda one: one[0].start
    )
    for place, (event, rank) in enumerate(later):
        raw += len(msgspec.json.encode(event)) + 1
        recorders[rank].add(event)
        if place % 40 == 0:  # as time would
            for one in recorders.values():
                one.flush()
    for one in recorders.values():
        one.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "streams").iterdir()}
    assert raw > 15 * limit
    assert limit / 2 < sum(sizes.values()) < 1.3 * limit, sizes
    found = merge(tmp_path, 1)
    whole = summary(streams)
    assert (found.updates, found.minibatches, found.dropped) == (whole.updates, whole.minibatches, whole.dropped)
    assert found.staleness.histogram == whole.staleness.histogram
    recorded = [event.start for event in read(tmp_path / "events.jsonl") if isinstance(event, Compute)]
    assert max(recorded) > 0.3 * later[-1][0].start, "some windows of the middle are recorded"


def test_a_process_that_is_started_again_thins_at_once(tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "1.jsonl").write_bytes(b"x" * 200_000)
    recorder = Recorder(tmp_path, 0, 100_000)
    for step in range(100):
        recorder.add(Load(0, step, 0.1))
    recorder.close()
    found = list(read(tmp_path / "streams" / "0.jsonl"))
    assert {type(event) for event in found} == {Omitted}
    assert sum(event.events for event in found if isinstance(event, Omitted)) == 100


def test_without_a_limit_everything_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "1.jsonl").write_bytes(b"x" * 200_000)
    recorder = Recorder(tmp_path, 0)
    recorder.add(Load(0, 1.0, 0.1))
    recorder.close()
    assert list(read(tmp_path / "streams" / "0.jsonl")) == [Load(0, 1.0, 0.1)]


@pytest.mark.parametrize(
    ("text", "size"), [("256MB", 256_000_000), ("1.5GB", 1_500_000_000), ("100kB", 100_000), ("off", None)]
)
def test_a_limit_is_a_size(text: str, size: int | None) -> None:
    assert parse_record_limit(text) == size


@pytest.mark.parametrize("text", ["256", "1kB", "-1MB", "256 MB", "", "infMB"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--record-limit is .* as 256MB or 2GB, or off"):
        parse_record_limit(text)


# -- what is made from it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["async", "all-reduce"])
def test_a_report_counts_all_events_and_says_that_the_record_is_thinned(name: str, tmp_path: Path) -> None:
    facts = {}
    for level in (0, 2):
        folder = written(tmp_path / str(level), thinned(RUNS[name], level) if level else RUNS[name])
        merge(folder, 3)
        facts[level] = open_run(folder).facts()
    whole, part = facts[0], facts[2]
    assert part["updates"] == whole["updates"]
    assert part["seconds"] == pytest.approx(whole["seconds"], rel=0.01)
    assert part["samples_per_second"] == pytest.approx(whole["samples_per_second"], rel=0.01)
    for one, other in zip(whole["workers"], part["workers"], strict=True):
        assert other["seconds"]["computing"] == pytest.approx(one["seconds"]["computing"])
        assert (other["minibatches"], other["samples"]) == (one["minibatches"], one["samples"])
        assert other["blame"] == pytest.approx(one["blame"], rel=0.01, abs=1e-6)
        assert not other["slow"]
    assert part["slowness"] == whole["slowness"]
    assert not [note for note in whole["notes"] if "thinned" in note]
    assert [note for note in part["notes"] if "the record is thinned (--record-limit)" in note]


def test_a_run_is_shown_while_its_record_is_thinned(tmp_path: Path) -> None:
    folder = written(tmp_path, thinned(RUNS["async"], 64))
    (folder / "config.json").write_text("{}")
    follower = EventFollower(folder)
    assert follower.going
    events = [event for block, _ in follower.follow() for event in block]
    values = [
        one for one in all_scalars(sorted(events, key=lambda event: event.start)) if "paceline/updates" in one.values
    ]
    assert values[-1].values["paceline/updates"] == summary(RUNS["async"]).updates
    assert all("paceline/updates_per_second" not in one.values for one in values[2:])


def test_a_simulation_learns_the_same_from_a_thinned_record(tmp_path: Path) -> None:
    found = {}
    for level in (0, 1):
        folder = written(tmp_path / str(level), thinned(RUNS["async"], level) if level else RUNS["async"])
        merge(folder, 3)
        found[level] = calibrate(folder)
    whole, part = found[0], found[1]
    assert part.updates < whole.updates
    assert part.omitted > 0
    assert "the record is thinned" in part.description
    assert part.seconds_per_update == pytest.approx(whole.seconds_per_update, rel=0.01)
    assert part.cluster.compute.mean() == pytest.approx(whole.cluster.compute.mean(), rel=0.05)
    assert part.cluster.link.latency == pytest.approx(whole.cluster.link.latency, rel=0.1, abs=1e-4)
    assert part.uneven == whole.uneven == {}


def test_a_thinned_record_is_not_replayed(tmp_path: Path) -> None:
    folder = written(tmp_path, thinned(RUNS["all-reduce"], 2))
    merge(folder, 3)
    with pytest.raises(UsageError, match=r"the record of .* is thinned, .* --record-limit off"):
        answer(folder, [WhatIf.parse("no-stalls")])


def test_a_table_has_the_sums(tmp_path: Path) -> None:
    folder = written(tmp_path, thinned(RUNS["async"], 64))
    merge(folder, 3)
    write_csv(tmp_path / "csv", read(folder / "events.jsonl"))
    with (tmp_path / "csv" / "omitted.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["events"]) for row in rows) == summary(thinned(RUNS["async"], 64)).omitted
    assert "compute" in msgspec.json.decode(rows[-1]["sums"])[rows[-1]["rank"]]["events"] or rows[-1]["rank"] == "-1"


def test_a_line_of_sums_comes_back_as_it_was() -> None:
    for event in thinned(RUNS["k-async"], 64)[-1]:
        assert decode(msgspec.json.encode(event)) == event
