"""A page that is opened on a long run shows early what it has read, and in the end the same as one read at once."""

import math
from pathlib import Path

import msgspec

from paceline.events import Compute, Event, Join, Pull, Update
from paceline.report.source import RunSource


def write(folder: Path, ranks: int, steps: int) -> None:
    """Streams of a run that goes on: every worker's own, and a server's."""
    streams = folder / "streams"
    streams.mkdir(parents=True)
    encode = msgspec.json.encode
    for rank in range(ranks):
        events: list[Event] = [Join(rank, 1.0, 1, "host", "cpu", "async", 5.0)]
        for step in range(steps):
            start = 2.0 + step * 0.01
            events += [Compute(rank, start, 0.008, step, 1, 4), Pull(rank, start + 0.008, 0.002, step + 1)]
        (streams / f"{rank}.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in events))
    updates = [Update(-1, 2.009 + step * 0.01, 0.0005, step + 1) for step in range(steps)]
    (streams / "-1.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in updates))
    (folder / "config.json").write_text("{}")


def test_what_is_read_in_pieces_is_what_is_read_at_once(tmp_path: Path) -> None:
    write(tmp_path, ranks=3, steps=30_000)
    whole = RunSource(tmp_path)
    whole.follow()
    assert whole.share == 1.0
    source, shares, updates = RunSource(tmp_path), [], []
    while True:
        source.follow(0.01)
        shares.append(source.share)
        updates.append(source.run.updates)
        if source.share == 1.0:
            break
        assert len(shares) < 500
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert shares[0] < 0.9
    assert updates == sorted(updates)
    assert 0 < updates[len(updates) // 2] < 30_000
    one, other = whole.facts(), source.facts()
    assert one["updates"] == other["updates"] == 30_000
    assert one["samples_per_second"] == other["samples_per_second"]
    for left, right in zip(one["workers"], other["workers"], strict=True):
        assert left["minibatches"] == right["minibatches"] == 30_000
        assert math.isclose(left["seconds"]["computing"], right["seconds"]["computing"], rel_tol=1e-9)


def test_no_stream_gets_far_ahead_of_the_others(tmp_path: Path) -> None:
    write(tmp_path, ranks=3, steps=30_000)
    source = RunSource(tmp_path)
    while source.run.updates < 10_000:
        source.follow(0.01)
    counts = [source.run.tallies[rank].minibatches for rank in range(3)]
    assert min(counts) > 0.5 * max(counts) > 0


def test_what_comes_after_one_has_caught_up_is_seen(tmp_path: Path) -> None:
    write(tmp_path, ranks=1, steps=100)
    source = RunSource(tmp_path)
    source.follow(1.0)
    assert source.share == 1.0
    more = [Compute(0, 3.0 + step * 0.01, 0.008, 100 + step, 1, 4) for step in range(50)]
    with (tmp_path / "streams" / "0.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(event) + b"\n" for event in more))
    source.follow(1.0)
    assert source.run.tallies[0].minibatches == 150
