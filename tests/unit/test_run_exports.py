"""What a run leaves for other tools is what those tools read."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.errors import UsageError
from paceline.events import (
    Balance,
    Cancel,
    Compute,
    Event,
    Join,
    LeaseGiven,
    Leave,
    Load,
    Message,
    Metric,
    Pull,
    Push,
    Reduce,
    Update,
    Wait,
)
from paceline.events.exports import write_csv, write_trace
from paceline.loggers.tensorboard import write_tensorboard
from paceline.report.aggregate import RunAggregate
from paceline.report.facts import facts
from paceline.report.metrics import CONTENT_TYPE, metrics
from paceline.report.source import open_run
from paceline.report.text import text_report

# -- a run for the exports -------------------------------------------------------------------------------------------

RUN: list[Event] = [
    Join(0, 10.0, 1, "host", "cpu", "async", 1010.0),
    Join(1, 10.5, 2, "host", "cpu", "async", 1010.5),
    Load(0, 11.0, 0.25),
    Compute(0, 11.25, 0.5, 0, 2, 16, 0.125, 0.25),
    Metric(0, 11.5, 0, {"loss": 2.0, "accuracy": 0.5}),
    Compute(1, 11.0, 1.0, 0, 1, 8),
    Push(0, 11.875, 7, 0, 0, 16, [3, 4], 100, 300, "used", "at once"),
    Update(-1, 11.875, 0.0625, 1, 64, 1, pushes=[7], rate=0.5),
    Update(-2, 11.875, 0.03125, 1, 32, 1, pushes=[7]),
    Pull(0, 11.75, 0.25, 1),
    Push(1, 12.0, 8, 0, 1, 8, [], 100, 0, "dropped", "too, late"),
    Wait(1, 12.0, 0.5, 0),
    Reduce(1, 12.5, 0.125, 4096),
    Cancel(1, 12.75, 0.25, 1, [5]),
    Message(1, 13.0, 0.125, "all_reduce", "ring", "send", 0, 40),
    LeaseGiven(1, 13.0, 6, 0, 2, 48, 16),
    Balance(0, 13.0, 17, [3, 1]),
    Compute(0, 13.0, 0.5, 1, 1, 8),
    Push(0, 13.5, 9, 1, 5, 8, [], 50, 150, "held", "1 of 2"),
    Update(-1, 13.5, 0.5, 2, 64, 1),
    Metric(0, 14.0, 2, {"loss": 1.0}),
    Metric(1, 14.0, 2, {"loss": 9.0, "grip": 0.25}),
    Leave(0, 14.0),
]


def told(events: list[Event], **more: Any) -> dict[str, Any]:
    run = RunAggregate()
    run.feed(events)
    run.advance()
    return facts(run, name="run", config={}, notes=[], **more)


# -- Chrome's trace format -------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> list[dict[str, Any]]:
    write_trace(tmp_path / "trace.json", RUN)
    whole = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert whole["displayTimeUnit"] == "ms"
    records: list[dict[str, Any]] = whole["traceEvents"]
    return records


def test_every_record_of_a_trace_has_what_chrome_asks_for(trace: list[dict[str, Any]]) -> None:
    assert {record["ph"] for record in trace} == {"M", "X", "s", "f", "i", "C"}
    for record in trace:
        assert isinstance(record["name"], str)
        assert record["pid"] == 1
        if record["ph"] != "M":
            assert isinstance(record["ts"], float) and isinstance(record["tid"], int)


def test_a_trace_has_a_named_track_per_worker_and_server(trace: list[dict[str, Any]]) -> None:
    named = {record["tid"]: record["args"]["name"] for record in trace if record["name"] == "thread_name"}
    assert sorted(named.values()) == ["server", "server 2", "worker 0", "worker 1"]
    assert len([record for record in trace if record["name"] == "thread_name"]) == 4
    assert {record["tid"] for record in trace if "tid" in record} == set(named)
    order = {record["tid"]: record["args"]["sort_index"] for record in trace if record["name"] == "thread_sort_index"}
    assert [named[tid] for tid in sorted(order, key=order.__getitem__)] == [
        "worker 0",
        "worker 1",
        "server",
        "server 2",
    ]
    assert [record["args"] for record in trace if record["name"] == "process_name"] == [{"name": "paceline"}]


def test_a_trace_s_stretches_are_in_microseconds_on_the_right_track(trace: list[dict[str, Any]]) -> None:
    named = {record["tid"]: record["args"]["name"] for record in trace if record["name"] == "thread_name"}
    got = [
        (named[record["tid"]], record["name"], record["cat"], record["ts"], record["dur"])
        for record in trace
        if record["ph"] == "X"
    ]
    assert got == [
        ("worker 0", "loading", "load", 11_000_000.0, 250_000.0),
        ("worker 0", "computing", "compute", 11_250_000.0, 500_000.0),
        ("worker 1", "computing", "compute", 11_000_000.0, 1_000_000.0),
        ("server", "updating", "update", 11_875_000.0, 62_500.0),
        ("server 2", "updating", "update", 11_875_000.0, 31_250.0),
        ("worker 0", "communicating", "pull", 11_750_000.0, 250_000.0),
        ("worker 1", "waiting", "wait", 12_000_000.0, 500_000.0),
        ("worker 1", "communicating", "reduce", 12_500_000.0, 125_000.0),
        ("worker 1", "cancelled", "cancel", 12_750_000.0, 250_000.0),
        ("worker 0", "computing", "compute", 13_000_000.0, 500_000.0),
        ("server", "updating", "update", 13_500_000.0, 500_000.0),
    ]
    computed = next(record for record in trace if record["name"] == "computing")
    assert computed["args"] == {
        "version": 0,
        "minibatches": 2,
        "samples": 16,
        "slowed": 0.125,
        "forward": 0.25,
        "core": 0.0,
    }


def test_an_arrow_leads_from_a_gradient_to_its_update_and_both_ends_lie_in_slices(trace: list[dict[str, Any]]) -> None:
    begun = {record["id"]: record for record in trace if record["ph"] == "s"}
    ended = {record["id"]: record for record in trace if record["ph"] == "f"}
    assert set(begun) == set(ended) == {7}, "of one push it is known which update used it"
    assert (begun[7]["name"], begun[7]["cat"]) == (ended[7]["name"], ended[7]["cat"])
    for end, kind, name in ((begun[7], "computing", "worker 0"), (ended[7], "updating", "server")):
        around = [
            record
            for record in trace
            if record["ph"] == "X"
            and record["tid"] == end["tid"]
            and record["ts"] <= end["ts"] <= record["ts"] + record["dur"]
        ]
        assert [record["name"] for record in around] == [kind]
        assert {"name": name} in [
            record["args"] for record in trace if record["name"] == "thread_name" and record["tid"] == end["tid"]
        ]
    pushes = [event for event in RUN if isinstance(event, Push)]
    words = [record["args"] for record in trace if record["ph"] == "i"]
    assert words == [{"staleness": p.staleness, "outcome": p.outcome, "reason": p.reason} for p in pushes]


def test_a_trace_has_a_counter_per_metric_and_worker(trace: list[dict[str, Any]]) -> None:
    counters = [(r["name"], r["tid"], r["ts"], r["args"]) for r in trace if r["ph"] == "C"]
    assert counters == [
        ("loss, worker 0", 0, 11_500_000.0, {"loss": 2.0}),
        ("accuracy, worker 0", 0, 11_500_000.0, {"accuracy": 0.5}),
        ("loss, worker 0", 0, 14_000_000.0, {"loss": 1.0}),
        ("loss, worker 1", 1, 14_000_000.0, {"loss": 9.0}),
        ("grip, worker 1", 1, 14_000_000.0, {"grip": 0.25}),
    ]


def test_a_trace_of_nothing_is_valid(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [])
    records = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [record["name"] for record in records] == ["process_name"]


# -- CSV -------------------------------------------------------------------------------------------------------------


def table(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_there_is_a_table_per_kind_of_event_with_its_fields_as_columns(tmp_path: Path) -> None:
    paths = write_csv(tmp_path / "deep" / "csv", RUN)
    kinds = {type(event) for event in RUN}
    assert sorted(paths) == sorted((tmp_path / "deep" / "csv").iterdir())
    assert {path.name for path in paths} == {f"{kind.__name__.lower()}.csv" for kind in kinds}
    for kind in kinds - {Metric}:
        head, *rows = table(tmp_path / "deep" / "csv" / f"{kind.__name__.lower()}.csv")
        events = [event for event in RUN if type(event) is kind]
        wanted = [[key for key in msgspec.to_builtins(events[0]) if key != "event"]]
        assert [head] == wanted
        assert len(rows) == len(events)
        for row, event in zip(rows, events, strict=True):
            for name, cell in zip(head, row, strict=True):
                value = getattr(event, name)
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                assert cell == ("" if value is None else text), name


def test_the_tables_have_these_columns(tmp_path: Path) -> None:
    write_csv(tmp_path, RUN)
    heads = {path.name: ",".join(table(path)[0]) for path in tmp_path.iterdir()}
    assert heads["compute.csv"] == "rank,start,seconds,version,minibatches,samples,slowed,forward,core,kernel"
    assert heads["load.csv"] == "rank,start,seconds"
    assert heads["wait.csv"] == "rank,start,seconds,on"
    assert heads["update.csv"] == "rank,start,seconds,version,bytes,workers,skipped,pushes,rate"
    assert heads["push.csv"] == "rank,start,ticket,version,staleness,samples,leases,bytes,saved,outcome,reason"
    assert heads["metric.csv"] == "rank,start,version,name,value"


def test_a_table_s_cells_come_back_whatever_is_in_them(tmp_path: Path) -> None:
    write_csv(tmp_path, RUN)
    pushes = table(tmp_path / "push.csv")[1:]
    assert pushes[0] == ["0", "11.875", "7", "0", "0", "16", "3 4", "100", "300", "used", "at once"]
    assert pushes[1][-1] == "too, late"
    assert [float(row[1]) for row in table(tmp_path / "compute.csv")[1:]] == [11.25, 11.0, 13.0]


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-1+2", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(name: str, tmp_path: Path) -> None:
    push = Push(0, 11.875, 7, 0, 0, 16, [3], 100, 300, "used", name)
    write_csv(tmp_path, [Metric(0, 1.0, 1, {name: -2.0}), push])
    (metric,) = csv.DictReader((tmp_path / "metric.csv").open(newline=""))
    assert (metric["name"], metric["value"]) == (f"'{name}", "-2.0")
    (row,) = csv.DictReader((tmp_path / "push.csv").open(newline=""))
    assert row["reason"] == f"'{name}"


def test_each_reported_value_has_a_row_of_its_own(tmp_path: Path) -> None:
    write_csv(tmp_path, RUN)
    assert table(tmp_path / "metric.csv")[1:] == [
        ["0", "11.5", "0", "loss", "2.0"],
        ["0", "11.5", "0", "accuracy", "0.5"],
        ["0", "14.0", "2", "loss", "1.0"],
        ["1", "14.0", "2", "loss", "9.0"],
        ["1", "14.0", "2", "grip", "0.25"],
    ]


# -- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    write_tensorboard(tmp_path, RUN)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = {
        tag: [(point.step, point.value, point.wall_time) for point in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }
    # The steady clock's 0 was at 1000 s of the calendar.
    assert scalars == {
        "loss": [(0, 2.0, 1011.5), (2, 1.0, 1014.0)],
        "accuracy": [(0, 0.5, 1011.5)],
        "seconds_per_minibatch/worker_0": [(0, 0.25, 1011.25), (1, 0.5, 1013.0)],
        "seconds_per_minibatch/worker_1": [(0, 1.0, 1011.0)],
        "staleness/worker_0": [(0, 0.0, 1011.875), (1, 5.0, 1013.5)],
        "staleness/worker_1": [(0, 1.0, 1012.0)],
        # In windows of two seconds; the first begins and the last ends with the training.
        "paceline/updates": [(1, 1.0, 1012.0), (1, 1.0, 1014.0)],
        "paceline/updates_per_second": [(1, 1.0, 1012.0), (1, 0.0, 1014.0)],
        "paceline/samples_per_second": [(1, 16.0, 1012.0), (1, 4.0, 1014.0)],
        "paceline/staleness": [(1, 0.0, 1012.0), (1, 5.0, 1014.0)],
        "paceline/waiting": [(1, 0.0, 1012.0), (1, 0.125, 1014.0)],
    }


def test_without_tensorboard_one_is_told_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError) as caught:
        write_tensorboard(tmp_path, RUN)
    assert str(caught.value) == "the logger tensorboard needs the package tensorboard: pip install tensorboard"
    assert not (tmp_path / "tensorboard").exists()


# -- Prometheus ------------------------------------------------------------------------------------------------------

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(known: dict[str, Any]) -> tuple[dict[str, str], Samples]:
    """The kinds of the metrics, and their samples by name and labels."""
    kinds, samples = {}, {}
    for family in text_string_to_metric_families(metrics(known).decode()):
        kinds[family.name] = family.type
        assert family.documentation
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return kinds, samples


def test_prometheus_s_metrics_have_the_documented_names_and_kinds() -> None:
    kinds, samples = scraped(told(RUN))
    assert kinds == {
        "paceline_up": "gauge",
        "paceline_updates": "counter",
        "paceline_samples_per_second": "gauge",
        "paceline_minibatches": "counter",
        "paceline_samples": "counter",
        "paceline_cancelled": "counter",
        "paceline_pace_seconds": "gauge",
        "paceline_seconds": "counter",
        "paceline_waited_for_seconds": "counter",
        "paceline_bytes": "counter",
        "paceline_staleness": "histogram",
        "paceline_metric": "gauge",
    }
    text = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    for name in {name for name, _ in samples} - {"paceline_staleness_count", "paceline_staleness_sum"}:
        assert f"`{name}`" in text, f"{name} is not documented"
    assert CONTENT_TYPE.startswith("text/plain")


def test_prometheus_s_values_are_those_of_the_run() -> None:
    _, samples = scraped(told(RUN))
    one, zero = ("worker", "1"), ("worker", "0")
    assert samples["paceline_up", ()] == 1
    assert samples["paceline_updates_total", ()] == 2
    assert samples["paceline_minibatches_total", (zero,)] == 3
    assert samples["paceline_samples_total", (zero,)] == 24
    assert samples["paceline_cancelled_total", (one,)] == 1
    # 0.25 s loading, 1 s computing and 0.25 s pulling for three minibatches.
    assert samples["paceline_pace_seconds", (zero,)] == pytest.approx(0.5)
    spent = {labels: value for (name, labels), value in samples.items() if name == "paceline_seconds_total"}
    wanted = {
        "0": {"loading": 0.25, "computing": 1.0, "communicating": 0.25},
        "1": {"computing": 1.0, "waiting": 0.5, "communicating": 0.125, "cancelled": 0.25},
    }
    kinds = ("computing", "loading", "communicating", "updating", "waiting", "cancelled")
    assert spent == {
        (("kind", kind), ("worker", rank)): pytest.approx(mine.get(kind, 0.0))
        for rank, mine in wanted.items()
        for kind in kinds
    }
    waited = {labels: value for (name, labels), value in samples.items() if name == "paceline_waited_for_seconds_total"}
    causes = ("loading", "forward", "backward", "slowed", "link", "elsewhere")
    # Of the 1.5 s since 11 worker 0 has spent more on all but backward: these together are half a second of waiting.
    more = {"loading": 0.25, "forward": 0.25, "slowed": 0.125, "link": 0.25, "elsewhere": 0.5}
    assert waited == {
        (("cause", cause), ("worker", rank)): pytest.approx(more.get(cause, 0.0) / 1.375 / 2 if rank == "0" else 0.0)
        for rank in "01"
        for cause in causes
    }
    assert {
        (labels[1][1], labels[0][1]): value
        for (name, labels), value in samples.items()
        if name.startswith("paceline_b")
    } == {
        ("0", "read"): 0,
        ("0", "pushed"): 150,
        ("0", "saved"): 450,
        ("0", "sent"): 0,
        ("1", "read"): 4096,
        ("1", "pushed"): 100,
        ("1", "saved"): 0,
        ("1", "sent"): 40,
    }
    last = {labels[0][1]: value for (name, labels), value in samples.items() if name == "paceline_metric"}
    assert last == {"loss": 1.0, "accuracy": 0.5, "grip": 0.25}


@pytest.mark.parametrize("ages", [[], [0], [0, 0, 1, 2, 3, 3, 4, 5, 8, 9], [7] * 3, [100, 0]])
def test_the_histogram_of_staleness_is_cumulative(ages: list[int]) -> None:
    events: list[Event] = [Compute(0, 0.0, 1.0, 0, 1, 8)]
    events += [Push(0, 1.0, ticket, 0, age, 8, [], 1, 0, "used", "") for ticket, age in enumerate(ages)]
    _, samples = scraped(told(events))
    buckets = {labels[0][1]: value for (name, labels), value in samples.items() if name == "paceline_staleness_bucket"}
    assert "+Inf" in buckets
    for limit, count in buckets.items():
        assert count == sum(age <= float(limit) for age in ages), limit
    assert sorted(buckets.values()) == list(buckets.values())
    assert samples["paceline_staleness_count", ()] == len(ages)
    assert samples["paceline_staleness_sum", ()] == sum(ages)


def test_a_run_that_is_over_is_down_and_odd_names_are_kept() -> None:
    known = {**told(RUN), "over": True, "last": {'a "quoted\\\\" name\n': 1.5}}
    _, samples = scraped(known)
    assert samples["paceline_up", ()] == 0
    assert samples["paceline_metric", (("name", 'a "quoted\\\\" name\n'),)] == 1.5


def test_a_run_that_has_only_just_begun_has_metrics() -> None:
    kinds, samples = scraped(told(RUN[:2]))
    assert len(kinds) == 12
    assert samples["paceline_updates_total", ()] == 0
    assert samples["paceline_pace_seconds", (("worker", "1"),)] == 0


# -- the terminal ----------------------------------------------------------------------------------------------------


def printed(folder: Path, events: list[Event], width: int = 140) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    source = open_run(folder)
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(text_report(source, source.facts(), width))
    return out.getvalue().splitlines()


def rounds(count: int) -> list[Event]:
    """Two workers; half of each round of 0.1 s worker 0 waits for worker 1."""
    happened: list[Event] = [Join(rank, 0.0, 1, "host", "cpu", "all-reduce", 0.0) for rank in (0, 1)]
    for number in range(count):
        start = 1.0 + 0.1 * number
        happened += [Compute(0, start, 0.04, number, 1, 8), Wait(0, start + 0.04, 0.05, 1)]
        happened += [Compute(1, start, 0.09, number, 1, 8)]
        happened += [Update(rank, start + 0.09, 0.01, number + 1, 64, 2) for rank in (0, 1)]
    return happened


def test_the_text_has_a_line_of_time_per_worker_and_server(tmp_path: Path) -> None:
    lines = printed(tmp_path / "first", rounds(40))
    zero = next(line for line in lines if line.startswith(" worker 0 "))[10:]
    one = next(line for line in lines if line.startswith(" worker 1 "))[10:]
    # Ten typical rounds, each 40 % computing, 50 % waiting and 10 % updating, or 90 % and 10 %.
    columns = 140 - 12
    assert zero.count("█") == pytest.approx(0.4 * columns, abs=6)
    assert zero.count("·") == pytest.approx(0.5 * columns, abs=6)
    assert one.count("█") == pytest.approx(0.9 * columns, abs=6)
    assert "·" not in one
    assert any(line.rstrip().endswith(" 1 s") for line in lines)
    served = printed(tmp_path / "second", RUN)
    for name in (" worker 0 ", " worker 1 ", "   server ", " server 2 "):
        assert sum(line.startswith(name) for line in served) == 1


def test_the_text_begins_with_the_numbers_and_the_verdict(tmp_path: Path) -> None:
    lines = printed(tmp_path / "first", rounds(40))
    assert lines[0].startswith("first: all-reduce, 2 workers, 40 updates, ")
    assert "100 ms per update" in lines[0]
    assert "Worker 1 is slow" in lines[1] and "its backward pass" in " ".join(lines[1:3])


def test_the_text_s_table_says_where_the_time_went(tmp_path: Path) -> None:
    lines = printed(tmp_path / "first", rounds(40))
    title = next(number for number, line in enumerate(lines) if line.startswith("where the time went, in seconds"))
    rows = [line.split() for line in lines[title + 1 :]]
    cells = {row[0]: row[1:] for row in rows if row and row[0] in ("0", "1")}
    # computing, loading, communicating, updating, waiting, cancelled, not training, pace, × others, waited for it
    assert cells["0"] == ["1.60", "0.00", "0.00", "0.40", "2.00", "0.00", "0.00", "50", "ms", "0.50", "0.00"]
    assert cells["1"] == ["3.60", "0.00", "0.00", "0.40", "0.00", "0.00", "0.00", "100", "ms", "2.00", "2.00"]


def test_of_a_run_that_did_not_train_there_is_no_line_of_time(tmp_path: Path) -> None:
    lines = printed(tmp_path / "first", rounds(0))
    assert "nothing was trained on" in lines
    assert not any(line.startswith(" worker 0") for line in lines)
    assert not any("nan" in line for line in lines)
