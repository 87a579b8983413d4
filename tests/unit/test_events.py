import typing
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import msgspec
import pytest
from helpers.summaries import summarise

from paceline.events import (
    Balance,
    Brought,
    Cancel,
    Collective,
    Compute,
    Ended,
    Epoch,
    Event,
    Join,
    LeaseGiven,
    Leave,
    Load,
    Lost,
    Message,
    Metric,
    Omitted,
    Pass,
    Peers,
    Pull,
    Push,
    Recovery,
    Reduce,
    Refused,
    Return,
    Roster,
    Seen,
    Send,
    Setup,
    Stages,
    StageTransfer,
    Switch,
    Update,
    Wait,
    decode,
    read,
    recorder,
)
from paceline.events.omitted import OmittedSums
from paceline.events.recorder import Recorder
from paceline.events.summary import merge
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import simulate

EVERY_KIND: list[Event] = [
    Join(0, 1.25, 4711, "höst", "cpu", "all-reduce", 1.7e9),
    Load(1, 1.4, 0.1),
    Compute(1, 1.5, 0.1, 3, 2, 64, 0.05, 0.02),
    Compute(1, 1.5, 0.1, 3, 1, 64),
    Pass(1, 1.6, 0.1, "B", 5, 1, 7, 16, 3),
    Wait(2, 2.0, 0.25, 1),
    Reduce(0, 2.5, 1e-9, 1 << 40),
    Update(3, 3.0, 0.1 + 0.2, 4, 1024, 4, True),
    Update(3, 3.0, 0.125, 4),
    Update(-1, 3.0, 0.125, 4, 64, 2, pushes=[7, 9], rate=0.5),
    Push(2, 3.1, 7, 3, 1, 16, [4, 5], 64, 192, "held", "1 of 2 minibatches are here"),
    Brought(2, 3.0, 1, 7, 4, 12, 24),
    Pull(2, 3.1, 0.01, 4),
    Cancel(1, 3.2, 0.05, 3, [6]),
    LeaseGiven(1, 3.25, 6, 0, 2, 48, 16, 3),
    Ended(1, 3.25, 0, 2, 3, 57),
    Return(1, 3.3, [6], "cancelled"),
    Send(1, 3.4, 0.1, 400),
    StageTransfer(1, 3.4, 0.1, 0, 400),
    Roster(-1, 3.45, [0, 1, 3], 7),
    Recovery(-1, 3.45, 1, 7),
    Stages(0, 3.47, [5, 7], 0.04, [0, 4096], [65536, 32768]),
    Setup(0, 3.46, "Net", 22, "SGD", {"lr": 0.1, "nesterov": True, "betas": "(0.9, 0.999)", "lr/1": 1}, 48, 4),
    Refused(-1, 3.5, 1, "damaged", 2),
    Seen(0, 3.35, [8]),
    Epoch(-1, 3.4, 0, 2, 1500),
    Epoch(-1, 3.45, 0, 2, 0, True),
    Balance(0, 3.5, 17, [3, 1, 0]),
    Switch(-1, 3.5, 40, "k-sync:k=3", "worker 2 takes 4.0 times as long"),
    Peers(0, 1.0, "world", [0, 1]),
    Collective(0, 1.0, 0.5, "all_reduce", "world", 3, 64, 0.25),
    Message(1, 3.75, 1e-5, "all_reduce", "ring", "send", 2, 4096),
    Metric(0, 4.0, 5, {"loss": 0.1, "accuracy": 1.0}),
    Metric(0, 4.0, 5, {}),
    Leave(2, 5.0),
    Lost(3, 5.5),
    Omitted(
        -1, 6.0, 5.0, 7, {2: OmittedSums({"push": 7}, {"wait": 0.5}, {1: 0.5}, samples=3)}, [(4, 9, 2)], 4.5, 0, {1: 7}
    ),
]


def names() -> list[str]:
    return [type(event).__name__ for event in EVERY_KIND]


# -- the schema ------------------------------------------------------------------------------------------------------


def test_no_kind_is_left_out_here() -> None:
    assert {type(event) for event in EVERY_KIND} == set(typing.get_args(Event))


@pytest.mark.parametrize("event", EVERY_KIND, ids=names())
def test_an_event_comes_back_from_json_as_it_was(event: Event) -> None:
    line = msgspec.json.encode(event)
    assert b"\n" not in line
    assert decode(line) == event
    assert type(decode(line)) is type(event)


@pytest.mark.parametrize("event", EVERY_KIND, ids=names())
def test_an_event_says_what_kind_it_is_who_did_it_and_when(event: Event) -> None:
    kind = {LeaseGiven: "lease", StageTransfer: "transfer"}.get(type(event), type(event).__name__.lower())
    for fields in (msgspec.json.decode(msgspec.json.encode(event)), msgspec.to_builtins(event)):
        assert fields["event"] == kind
        assert (fields["rank"], fields["start"]) == (event.rank, event.start)


def test_the_names_in_a_line_are_these() -> None:
    line = msgspec.json.decode(msgspec.json.encode(Compute(1, 1.5, 0.1, 3, 2, 64)))
    fields = ["event", "rank", "start", "seconds", "version", "minibatches", "samples", "slowed", "forward"]
    fields += ["core", "kernel"]
    assert list(line) == fields


# -- the recorder ----------------------------------------------------------------------------------------------------


def stream(folder: Path, rank: int) -> Path:
    return folder / "streams" / f"{rank}.jsonl"


def test_what_was_added_is_written_in_its_order(tmp_path: Path) -> None:
    one = Recorder(tmp_path, 3)
    assert one.on
    for event in EVERY_KIND:
        one.add(event)
    one.close()
    assert list(read(stream(tmp_path, 3))) == EVERY_KIND
    assert not one.on


def test_a_flush_writes_what_is_pending_once(tmp_path: Path) -> None:
    one = Recorder(tmp_path, 0)
    one.add(EVERY_KIND[0])
    one.flush()
    one.flush()
    assert list(read(stream(tmp_path, 0))) == EVERY_KIND[:1]
    one.add(EVERY_KIND[1])
    one.flush()
    assert list(read(stream(tmp_path, 0))) == EVERY_KIND[:2]
    one.close()


def test_a_reader_is_never_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_INTERVAL", 0.0)
    one = Recorder(tmp_path, 0)
    one.add(Leave(0, perf_counter() + 1))
    assert len(list(read(stream(tmp_path, 0)))) == 1
    one.close()


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    one = Recorder(None, 0)
    assert not one.on
    one.add(EVERY_KIND[0])
    one.flush()
    one.close()
    assert one._pending == []
    assert list(tmp_path.iterdir()) == []


def test_a_closed_recorder_takes_nothing_more(tmp_path: Path) -> None:
    one = Recorder(tmp_path, 0)
    one.close()
    one.add(EVERY_KIND[0])
    one.close()
    assert list(read(stream(tmp_path, 0))) == []


def test_a_second_recorder_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    for event in EVERY_KIND[:2]:
        one = Recorder(tmp_path, 0)
        one.add(event)
        one.close()
    assert list(read(stream(tmp_path, 0))) == EVERY_KIND[:2]


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    one = Recorder(tmp_path, 0)
    for event in EVERY_KIND[:3]:
        one.add(event)
    one.close()
    path = stream(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read(path)) == EVERY_KIND[:2]


def test_recording_a_step_costs_at_most_twenty_microseconds(tmp_path: Path) -> None:
    steps = 20_000

    def cost(number: int) -> float:
        one = Recorder(tmp_path, number)
        begin = thread_time()  # a busy machine makes the seconds more, not the work
        for step in range(steps):
            now = perf_counter()
            one.add(Compute(0, now, 0.001, step, 1, 32))
            one.add(Wait(0, now, 0.0001, 1))
            one.add(Update(0, now, 0.0002, step + 1, 4096, 2))
            one.add(Wait(0, now, 0.0001, 1))
        one.close()
        seconds = thread_time() - begin
        assert sum(1 for _ in stream(tmp_path, number).open("rb")) == 4 * steps
        return seconds / steps

    assert min(cost(number) for number in range(3)) <= 20e-6


# -- the summary -----------------------------------------------------------------------------------------------------

RUN: list[Event] = [
    Join(0, 10.0, 1, "host", "cpu", "all-reduce", 0.0),
    Join(1, 10.5, 2, "host", "cpu", "all-reduce", 0.0),
    Load(0, 10.75, 0.25),
    Compute(0, 11.0, 1.0, 0, 1, 30),
    Compute(1, 11.0, 1.5, 0, 1, 10),
    Wait(0, 12.0, 0.5, 1),
    Update(0, 12.5, 0.25, 1, 100, 2),
    Update(1, 12.5, 0.5, 1, 100, 2),
    Compute(0, 13.0, 1.0, 1, 2, 30),
    Compute(1, 13.0, 1.0, 1, 2, 10),
    Update(0, 14.0, 0.5, 1, 100, 2, True),
    Update(1, 14.0, 0.5, 1, 100, 2, True),
    Metric(0, 14.5, 1, {"loss": 2.0, "accuracy": 0.5}),
    Metric(1, 14.5, 1, {"loss": 7.0, "grip": 0.125}),
    Load(0, 14.75, 0.25),
    Compute(0, 15.0, 1.0, 1, 1, 30),
    Reduce(0, 16.0, 0.125, 50),
    Compute(1, 15.0, 1.5, 1, 1, 10),
    Wait(0, 16.25, 0.25, 1),
    Update(0, 16.5, 0.5, 2, 100, 2),
    Update(1, 16.5, 0.25, 2, 100, 2),
    Compute(0, 17.0, 1.0, 2, 1, 20),
    Wait(1, 17.0, 1.0, 0),
    Update(0, 18.0, 1.0, 3, 100, 1),
    Update(1, 18.0, 1.0, 3, 100, 1),
    Metric(0, 19.0, 3, {"loss": 1.0}),
    Metric(1, 19.25, 3, {"loss": 8.0, "grip": 0.25}),
    Compute(0, 19.5, 0.5, 3, 1, 5),
    Leave(0, 20.5),
    Leave(1, 20.75),
]
SUMMARY: dict[str, Any] = {
    "strategy": "all-reduce",
    "world_size": 2,
    "seconds": 10.75,
    "updates": 3,
    "minibatches": 10,
    "cancelled": 0,
    "dropped": 0,
    # Versions 1, 2 and 3 were there at 13, 17 and 19.
    "seconds_per_update": 3.0,
    # Gradients that were ready in between: 30 and 10 at 14, 30 at 16, 10 at 16.5, 20 at 18.
    "samples_per_second": 100 / 6,
    "staleness": {"mean": 0.0, "max": 0, "histogram": {"0": 8}},
    "last": {"loss": 1.0, "accuracy": 0.5, "grip": 0.25},
    "pushed_bytes": 0,
    "saved_bytes": 0,
    "refused": {},
    "omitted": 0,
    "bubble": None,
    "communication": None,
    "workers": {
        "0": {
            "computing": 4.5,
            "loading": 0.5,
            "communicating": 2.375,
            "waiting": 0.75,
            "minibatches": 6,
            "samples": 115,
        },
        "1": {"computing": 4.0, "loading": 0.0, "communicating": 2.25, "waiting": 1.0, "minibatches": 4, "samples": 30},
    },
}


def test_a_summary_says_what_one_would_count_by_hand() -> None:
    assert msgspec.to_builtins(summarise(RUN, 2), str_keys=True) == SUMMARY


def test_a_summary_counts_what_a_server_says() -> None:
    run: list[Event] = [
        Join(0, 0.0, 1, "host", "cpu", "k-sync:k=1", 0.0),
        Compute(0, 0.0, 1.0, 0, 1, 8),
        Push(0, 1.0, 1, 0, 0, 8, [1], 100, 300, "used", "1 of 1"),
        Update(-1, 1.0, 0.1, 1, 100, 1, pushes=[1]),
        Cancel(1, 0.0, 1.1, 0, [2]),
        Compute(1, 1.1, 1.0, 0, 1, 8),
        Push(1, 2.1, 2, 0, 1, 8, [3], 100, 300, "dropped", "late"),
        Pull(0, 1.0, 0.125, 1),
        Compute(0, 1.2, 1.0, 1, 1, 8),
        Push(0, 2.2, 3, 1, 0, 8, [4], 100, 300, "used", "1 of 1"),
        Update(-1, 2.2, 0.1, 2, 100, 1, pushes=[3]),
    ]
    summary = summarise(run, 2)
    assert (summary.updates, summary.cancelled, summary.dropped) == (2, 1, 1)
    assert (summary.pushed_bytes, summary.saved_bytes) == (300, 900)
    assert summary.staleness.histogram == {0: 2}, "of the gradients that were used"
    assert summary.staleness.mean == 0.0
    assert summary.seconds_per_update == pytest.approx(1.2)
    assert set(summary.workers) == {0, 1}, "a server is not a worker"
    assert summary.workers[0].communicating == 0.125


GROUPS: list[Event] = [
    Join(0, 0.0, 1, "host", "cpu", "groups:size=2", 0.0),
    Push(0, 1.0, 1, 0, 0, 8, [1], 0, 0, "held", "1 of 2 of group 0"),
    Push(2, 1.1, 2, 0, 0, 8, [2], 0, 0, "held", "1 of 2 of group 1"),
    Update(-1, 1.2, 0.1, 1, 0, 2, pushes=[2, 3]),
    Push(3, 1.2, 3, 0, 0, 8, [3], 0, 0, "used", "group 1"),
    Update(-1, 1.4, 0.1, 2, 0, 2, pushes=[1, 4]),
    Push(1, 1.4, 4, 0, 1, 8, [4], 0, 0, "used", "group 0"),
    Push(2, 1.6, 5, 1, 1, 8, [5], 0, 0, "held", "1 of 2 of group 1"),
    Push(3, 1.8, 6, 1, 1, 8, [6], 0, 0, "dropped", "group 1 is too old"),
    Update(-1, 2.4, 0.1, 3, 0, 2, pushes=[7, 8]),
    Push(0, 2.3, 7, 2, 0, 8, [7], 0, 0, "held", "1 of 2 of group 0"),
    Push(1, 2.4, 8, 2, 0, 8, [8], 0, 0, "used", "group 0"),
]
"""Two groups of two; the second one's last push is dropped, and with it what its member had pushed before."""


@pytest.mark.parametrize("turned", [False, True])
def test_a_summary_counts_gradients_of_groups_when_they_are_used(turned: bool) -> None:
    summary = summarise(GROUPS[::-1] if turned else GROUPS, 4)
    assert summary.dropped == 2
    assert summary.staleness.histogram == {0: 4, 1: 2}
    # From the end of the first update to that of the last: four gradients of eight samples.
    assert summary.samples_per_second == pytest.approx(32 / 1.2)


def test_a_summary_counts_what_a_worker_had_not_recorded_when_it_was_killed() -> None:
    summary = summarise([*GROUPS, Compute(0, 0.5, 0.5, 0, 1, 8)], 4)
    assert summary.minibatches == 8
    assert [worker.minibatches for worker in summary.workers.values()] == [2, 2, 2, 2]
    assert [worker.samples for worker in summary.workers.values()] == [16, 16, 16, 16]
    together = summarise([Compute(0, 0.0, 1.0, 0, 1, 8), Update(0, 1.0, 0.1, 1, 0, 2), Update(0, 2.0, 0.1, 2, 0, 1)], 2)
    assert together.minibatches == 3


def test_a_summary_does_not_depend_on_the_order_of_events() -> None:
    by_rank = sorted(RUN, key=lambda event: event.rank)
    assert msgspec.to_builtins(summarise(by_rank, 2), str_keys=True) == SUMMARY


def test_a_run_without_events_has_a_summary() -> None:
    summary = summarise([], 3)
    assert (summary.seconds, summary.updates, summary.minibatches) == (0.0, 0, 0)
    assert (summary.seconds_per_update, summary.samples_per_second) == (None, None)
    assert (summary.last, list(summary.workers)) == ({}, [0, 1, 2])
    assert summary.staleness.histogram == {}


def test_one_update_alone_gives_no_pace() -> None:
    summary = summarise(RUN[:7], 2)
    assert summary.updates == 1
    assert summary.seconds_per_update is None
    assert summary.samples_per_second is None


def write(folder: Path, events: list[Event]) -> None:
    for rank in {event.rank for event in events}:
        one = Recorder(folder, rank)
        for event in events:
            if event.rank == rank:
                one.add(event)
        one.close()


def test_streams_are_merged_by_time(tmp_path: Path) -> None:
    write(tmp_path, RUN)
    merge(tmp_path, 2)
    merged = list(read(tmp_path / "events.jsonl"))
    starts = [event.start for event in merged]
    assert starts == sorted(starts)
    assert sorted(map(repr, merged)) == sorted(map(repr, RUN))


def test_events_recorded_out_of_order_are_merged_in_order(tmp_path: Path) -> None:
    # What lasted is recorded at its end, under the time of its beginning.
    write(tmp_path, [Wait(0, 5.0, 1.0, 1), Compute(0, 1.0, 9.0, 0, 1, 1), Leave(1, 3.0)])
    merge(tmp_path, 2)
    assert [event.start for event in read(tmp_path / "events.jsonl")] == [1.0, 3.0, 5.0]


def test_the_folder_holds_the_summary_and_no_streams_any_more(tmp_path: Path) -> None:
    write(tmp_path, RUN)
    summary = merge(tmp_path, 2)
    written = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert written == msgspec.to_builtins(summary, str_keys=True) == SUMMARY
    assert list(written) == list(SUMMARY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "summary.json"]


def test_a_stream_that_was_cut_off_is_merged_up_to_there(tmp_path: Path) -> None:
    write(tmp_path, RUN)
    path = stream(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-5])
    merge(tmp_path, 2)
    assert len(list(read(tmp_path / "events.jsonl"))) == len(RUN) - 1


def test_refusals_are_counted_by_why() -> None:
    events = [
        Refused(-1, 1.0, 0, "damaged", 2),
        Refused(-1, 2.0, 1, "damaged", 3),
        Refused(-1, 3.0, 1, "seen before", 1),
    ]
    assert summarise(events, 1).refused == {"damaged": 5, "seen before": 1}


@pytest.mark.parametrize(
    "strategy",
    ["async", "k-async:k=2", "k-batch-sync:k=2", "ssp:s=2", "groups:size=2", "groups:size=2,between=k-async:k=2"],
)
def test_a_summary_agrees_with_the_simulator_that_made_the_events(strategy: str) -> None:
    told, trace = simulate(strategy, SimulatedCluster(workers=4), updates=300, seed=3, trace=True)
    assert trace is not None
    summary = summarise(trace.events, 4)
    assert summary.updates == 300
    assert summary.staleness.mean == pytest.approx(told.staleness.mean, abs=0.02)
    assert summary.samples_per_second == pytest.approx(told.samples_per_second, rel=0.1)
