"""A node sends the files of a run's folder to the driver: streams as they grow, other files whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.engines.ray_cluster import Room, parse_each, parse_environment
from paceline.cluster.file_sync import FileSync, newest_checkpoint
from paceline.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def everything(file_sync: FileSync, most: int = 1 << 20) -> list[tuple[Any, ...]]:
    news: list[tuple[Any, ...]] = []
    while more := file_sync.updates(most, at_once=True):
        news += more
    return news


def test_a_stream_is_sent_as_it_grows(folder: Path) -> None:
    file_sync = FileSync(folder)
    stream = folder / "streams" / "0.jsonl"
    stream.write_bytes(b"one\n")
    assert everything(file_sync) == [("grown", "streams/0.jsonl", 0, b"one\n")]
    assert everything(file_sync) == []
    with stream.open("ab") as file:
        file.write(b"two\n")
    assert everything(file_sync) == [("grown", "streams/0.jsonl", 4, b"two\n")]


def test_a_large_file_comes_in_parts_and_once(folder: Path) -> None:
    content = bytes(range(256)) * 10
    (folder / "checkpoints" / "1.pt").write_bytes(content)
    file_sync = FileSync(folder)
    parts = everything(file_sync, 1000)
    assert [part[2] for part in parts] == [0, 1000, 2000]
    assert [part[4] for part in parts] == [False, False, True]
    assert b"".join(part[3] for part in parts) == content
    assert everything(file_sync, 1000) == []


def test_a_file_that_is_replaced_while_it_is_sent_is_sent_whole_both_times(folder: Path) -> None:
    path = folder / "checkpoints" / "1.pt"
    path.write_bytes(b"a" * 1500)
    file_sync = FileSync(folder)
    first = file_sync.updates(1000, at_once=True)
    (folder / ".new").write_bytes(b"b" * 500)
    (folder / ".new").replace(path)
    rest = everything(file_sync, 1000)
    assert b"".join(part[3] for part in [*first, *rest[:1]]) == b"a" * 1500
    assert rest[1] == ("file", "checkpoints/1.pt", 0, b"b" * 500, True)


def test_what_is_not_finished_or_only_the_nodes_stays_there(folder: Path) -> None:
    (folder / "checkpoints" / ".1.pt.77").write_bytes(b"half")
    (folder / "exit_reports").mkdir()
    (folder / "exit_reports" / "0.json").write_bytes(b"{}")
    (folder / ".lock").write_bytes(b"")
    assert everything(FileSync(folder)) == []


def test_an_empty_file_arrives_and_a_known_one_is_not_sent_back(folder: Path) -> None:
    (folder / "empty").write_bytes(b"")
    (folder / "checkpoints" / "1.pt").write_bytes(b"sent by the driver")
    file_sync = FileSync(folder)
    file_sync.mark_sent("checkpoints/1.pt")
    assert everything(file_sync) == [("file", "empty", 0, b"", True)]


def test_what_others_remove_while_it_is_looked_at_is_passed_over(folder: Path) -> None:
    stream, named, inner = folder / "streams" / "3.jsonl", folder / "metrics.json", folder / "checkpoints" / "old"
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            inner.mkdir()
            for path in (stream, named, inner / "0.pt"):
                path.write_bytes(b"line\n")
            for path in (stream, named, inner / "0.pt"):
                path.unlink()
            inner.rmdir()

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(3000):
            FileSync(folder).updates(1 << 20, at_once=True)
    finally:
        over.set()
        other.join()


def test_room_holds_the_servers_beside_the_first_worker() -> None:
    room = Room(workers=3, each={"CPU": 2.0, "GPU": 1.0}, servers=2)
    assert room.bundles == [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert room.total == {"CPU": 8.0, "GPU": 3.0}
    assert room.threads == "2"


def test_what_each_worker_takes() -> None:
    assert parse_each("") == {"CPU": 1.0}
    assert parse_each("cpu=0.5,gpu=1") == {"CPU": 0.5, "GPU": 1.0}
    assert parse_each("cpu=0,gpu=1") == {"GPU": 1.0}
    for wrong in ("tpu=1", "cpu", "cpu=-1", "cpu=nan", "gpu=inf"):
        with pytest.raises(UsageError, match="it must be like cpu=1,gpu=1"):
            parse_each(wrong)


def test_variables_that_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "a=b")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert parse_environment(["HERE", "THERE=x=y", "EMPTY="]) == {"HERE": "a=b", "THERE": "x=y", "EMPTY": ""}
    for wrong in ("NOWHERE", "=x"):
        with pytest.raises(UsageError, match="NAME=VALUE"):
            parse_environment([wrong])


def test_the_newest_checkpoint_is_the_one_written_last(folder: Path) -> None:
    assert newest_checkpoint(folder) is None
    for moment, name in enumerate(("00000064.pt", "00000032.pt")):
        (folder / "checkpoints" / name).write_bytes(b"")
        os.utime(folder / "checkpoints" / name, (1000 + moment, 1000 + moment))
    (folder / "checkpoints" / ".x.pt.1.arriving").write_bytes(b"")
    assert newest_checkpoint(folder) == folder / "checkpoints" / "00000032.pt"
