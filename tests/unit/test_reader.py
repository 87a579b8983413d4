"""Events are read back whole, whatever happened to their file, and what cannot be read is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from helpers.summaries import summarise
from hypothesis import given
from hypothesis import strategies as st

from paceline.events import Compute, Event, Join, Leave, Load, Metric, Push, Update, Wait, decode, ordering, reader
from paceline.events import summary as merging
from paceline.events.reader import Reader
from paceline.events.summary import merge

GARBAGE = {
    "words": b"this is not JSON",
    "unknown kind": b'{"event":"party","rank":0,"start":1.0}',
    "no kind": b'{"rank":0,"start":1.0}',
    "missing field": b'{"event":"wait","rank":0,"start":1.0,"seconds":1.0}',
    "wrong type": b'{"event":"leave","rank":"zero","start":1.0}',
    "other JSON": b"[1,2,3]",
    "cut off": b'{"event":"leave","rank":0,"sta',
    "bytes": bytes(byte for byte in range(256) if byte != ord("\n")),
    "bad UTF-8": b'{"event":"return","rank":0,"start":1.0,"leases":[1],"why":"\xff\xfe"}',
    "zeros": bytes(64),
    "blank": b"",
    "spaces": b"   ",
}


def some(count: int, rank: int = 0) -> list[Event]:
    """Events of several kinds, whose lines are of different lengths."""
    events: list[Event] = []
    for number in range(count):
        start = 1.0 + 0.1 * number
        events.append(
            [
                Compute(rank, start, 0.05, number, 1, 8),
                Wait(rank, start, 0.5, 1),
                Metric(rank, start, number, {"loss": 1 / (number + 1), "größe": 2.0}),
                Leave(rank, start),
            ][number % 4]
        )
    return events


def line(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def write(path: Path, events: list[Event]) -> Path:
    path.write_bytes(b"".join(line(event) for event in events))
    return path


def everything(source: Reader) -> list[Event]:
    return [event for block in source.all() for event in block]


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1000, 1 << 20])
def test_the_size_of_a_block_changes_nothing(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", size)
    events = some(50)
    source = Reader(write(tmp_path / "events.jsonl", events))
    assert everything(source) == events
    assert (source.lines, source.unreadable, source.damage) == (50, 0, None)


def test_a_reading_takes_one_block_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Leave(0, float(number)) for number in range(10, 40)]
    length = len(line(events[0]))
    monkeypatch.setattr(reader, "_BLOCK", 10 * length + length // 2)
    source = Reader(write(tmp_path / "events.jsonl", events))
    assert [len(source.read()) for _ in range(4)] == [10, 11, 9, 0]


def test_an_empty_file_has_no_events_and_no_damage(tmp_path: Path) -> None:
    source = Reader(write(tmp_path / "events.jsonl", []))
    assert everything(source) == source.read() == []
    assert (source.lines, source.unreadable, source.damage) == (0, 0, None)


# -- a file that grows -----------------------------------------------------------------------------------------------


def test_reading_goes_on_where_it_ended(tmp_path: Path) -> None:
    events = some(30)
    path = write(tmp_path / "events.jsonl", [])
    source = Reader(path)
    for begin in range(0, 30, 7):
        with path.open("ab") as file:
            file.write(b"".join(line(event) for event in events[begin : begin + 7]))
        assert source.read() == events[begin : begin + 7]
        assert source.read() == []
    assert source.lines == 30


def test_a_line_cut_in_two_is_read_once_its_end_is_there(tmp_path: Path) -> None:
    events = some(2)
    path = write(tmp_path / "events.jsonl", events[:1])
    source = Reader(path)
    assert source.read() == events[:1]
    whole = line(events[1])
    for begin in range(0, len(whole) - 1, 9):
        with path.open("ab") as file:
            file.write(whole[begin : min(begin + 9, len(whole) - 1)])
        assert source.read() == []
    with path.open("ab") as file:
        file.write(b"\n")
    assert source.read() == events[1:]
    assert source.places == [(len(line(events[0])), path.stat().st_size)]
    assert (source.lines, source.unreadable, source.damage) == (2, 0, None)


@given(steps=st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_however_a_file_grows_each_event_is_read_once(
    steps: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = some(20)
    data = b"".join(line(event) for event in events)
    path = tmp_path_factory.mktemp("growing") / "events.jsonl"
    path.touch()
    source, got, begin = Reader(path), [], 0
    for step in [*steps, len(data)]:
        with path.open("ab") as file:
            file.write(data[begin : begin + step])
        begin += step
        block = source.read()
        held = path.read_bytes()
        assert [decode(held[first:last]) for first, last in source.places] == block
        got += block
    assert got == events
    assert source.damage is None


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 1 << 20])
@pytest.mark.parametrize("kind", GARBAGE)
def test_an_unreadable_line_is_counted_and_everything_else_returned(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BLOCK", size)
    events = some(6)
    lines = [line(event) for event in events]
    lines[2:2] = [GARBAGE[kind] + b"\n"]
    lines[5:5] = [GARBAGE[kind] + b"\n"]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines))
    source = Reader(path)
    assert everything(source) == events
    assert (source.lines, source.unreadable, source.first_unreadable) == (8, 2, 3)
    assert source.damage == f"2 lines of {path} could not be read, the first of them line 3; everything else is shown"


def test_a_last_line_without_its_end_is_unreadable_only_once_the_file_is_over(tmp_path: Path) -> None:
    events = some(3)
    path = write(tmp_path / "events.jsonl", events)
    path.write_bytes(path.read_bytes()[:-1])
    source = Reader(path)
    assert source.read() == events[:2]
    assert source.damage is None
    assert everything(source) == []
    assert source.damage == f"1 line of {path} could not be read, the first of them line 3; everything else is shown"


@pytest.mark.parametrize("content", [b"hello\n", b"hello", b"\n\n", b"a\nb\nc", bytes(range(256)) * 10])
def test_a_file_without_any_event_is_said_to_be_none_of_ours(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    source = Reader(path)
    assert everything(source) == []
    wanted = content.count(b"\n") + (not content.endswith(b"\n"))
    assert (source.lines, source.unreadable, source.first_unreadable) == (wanted, wanted, 1)
    assert source.damage == f"{path} has no event that Paceline knows; is it the events file of a run?"


def test_many_unreadable_lines_are_counted_with_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", some(1200))
    path.write_bytes(path.read_bytes() + b"?\n" * 1500)
    source = Reader(path)
    everything(source)
    wanted = f"1,500 lines of {path} could not be read, the first of them line 1,201; everything else is shown"
    assert source.damage == wanted


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, 200, 1 << 20])
@pytest.mark.parametrize("damaged", [False, True])
def test_places_are_where_the_events_lie_in_the_file(
    damaged: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BLOCK", size)
    events = some(25)
    pieces = [line(event) + (b"?\n" if damaged and number % 5 == 0 else b"") for number, event in enumerate(events)]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(pieces))
    data, source, spots = path.read_bytes(), Reader(path), []
    for block in source.all():
        assert [decode(data[begin:end]) for begin, end in source.places] == block
        spots += source.places
    assert [data[begin:end] for begin, end in spots] == [line(event) for event in events]


# -- merging streams -------------------------------------------------------------------------------------------------


def streams(folder: Path, events: dict[str, list[Event]]) -> None:
    (folder / "streams").mkdir()
    for name, mine in events.items():
        write(folder / "streams" / f"{name}.jsonl", mine)


def run() -> dict[str, list[Event]]:
    """Three workers and a server; what lasted is recorded at its end, so starts go back at times."""
    by_rank: dict[str, list[Event]] = {"-1": []}
    for rank in range(3):
        mine: list[Event] = [Join(rank, 0.1 * rank, 1, "host", "cpu", "async", 5.0)]
        for number in range(40):
            start = 1.0 + number * (0.1 + 0.03 * rank)
            mine.append(Wait(rank, start + 0.05, 0.01, (rank + 1) % 3))
            mine.append(Load(rank, start - 0.01, 0.01))
            mine.append(Compute(rank, start, 0.05, number, 1, 8, 0.0, 0.02))
            ticket = 100 * rank + number
            by_rank["-1"].append(Push(rank, start + 0.06, ticket, number, rank, 8, [], 10, 5, "used", "at once"))
            by_rank["-1"].append(Update(-1, start + 0.06, 0.001, ticket, 10, 1))
        by_rank[str(rank)] = mine
    return by_rank


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_merged_streams_are_all_events_in_the_order_of_their_start(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_BLOCK", size)
    monkeypatch.setattr(ordering, "_AT_ONCE", size // 10)
    monkeypatch.setattr(ordering, "_APART", size)  # with few bytes, most events lie apart and are read one by one
    by_rank = run()
    streams(tmp_path, by_rank)
    merge(tmp_path, 3)
    source = Reader(tmp_path / "events.jsonl")
    # Of those that begin at the same time, streams come in the order of their names, and each in its own.
    wanted = sorted((event for name in sorted(by_rank) for event in by_rank[name]), key=lambda event: event.start)
    assert everything(source) == wanted
    assert source.damage is None


def test_the_summary_of_merged_streams_is_that_of_all_events(tmp_path: Path) -> None:
    by_rank = run()
    streams(tmp_path, by_rank)
    summary = merge(tmp_path, 3)
    wanted = summarise([event for name in sorted(by_rank) for event in by_rank[name]], 3)
    assert summary == wanted
    written = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert written == msgspec.to_builtins(wanted, str_keys=True)
    assert written["staleness"]["histogram"] == {"0": 40, "1": 40, "2": 40}


def test_streams_are_gone_once_they_are_merged(tmp_path: Path) -> None:
    streams(tmp_path, run())
    merge(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "summary.json"]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_truncated_stream_lacks_only_its_last_line(cut: int, tmp_path: Path) -> None:
    by_rank = run()
    streams(tmp_path, by_rank)
    path = tmp_path / "streams" / "1.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    summary = merge(tmp_path, 3)
    by_rank["1"].pop()
    left = [event for name in sorted(by_rank) for event in by_rank[name]]
    assert everything(Reader(tmp_path / "events.jsonl")) == sorted(left, key=lambda event: event.start)
    assert summary == summarise(left, 3)


def test_damaged_and_empty_streams_do_not_keep_the_others_from_being_merged(tmp_path: Path) -> None:
    streams(tmp_path, {"0": some(8), "1": [], "2": []})
    (tmp_path / "streams" / "2.jsonl").write_bytes(b"garbage\n\n" + line(Leave(2, 0.5)) + b"\xff\n")
    merge(tmp_path, 3)
    source = Reader(tmp_path / "events.jsonl")
    assert everything(source) == [Leave(2, 0.5), *some(8)]
    assert source.damage is None


def test_a_run_without_streams_is_merged_to_an_empty_file(tmp_path: Path) -> None:
    summary = merge(tmp_path, 2)
    assert (tmp_path / "events.jsonl").read_bytes() == b""
    assert summary == summarise([], 2)


@given(starts=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4))
def test_whatever_streams_hold_they_are_merged_as_a_stable_sort_would(
    starts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("streams")
    by_rank = {str(rank): [Leave(rank, float(start)) for start in mine] for rank, mine in enumerate(starts)}
    streams(folder, {name: list(mine) for name, mine in by_rank.items()})
    merge(folder, len(starts))
    wanted = sorted((event for mine in by_rank.values() for event in mine), key=lambda event: event.start)
    assert everything(Reader(folder / "events.jsonl")) == wanted
