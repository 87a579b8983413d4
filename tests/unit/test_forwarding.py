"""Event streams that are forwarded to the run's folder: each line once, though either end may be started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.events.forwarding import StreamForwarder

MACHINES = [[0], [1]]


def line(number: int) -> bytes:
    return b'{"event":"x","start":%d.0}\n' % number


def written(folder: Path, numbers: range) -> None:
    path = folder / "machine-1" / "streams" / "1.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(map(line, numbers))


def sent(sender: StreamForwarder, receiver: StreamForwarder) -> None:
    for name, text, before in sender.new_lines(0.0):
        receiver.append(1, name, text, before=before)


def forwarder(folder: Path, machine: int) -> StreamForwarder:
    (folder / "streams").mkdir(exist_ok=True)
    return StreamForwarder(str(folder), machine, MACHINES)


def numbers(folder: Path) -> list[float]:
    lines = (folder / "streams" / "1.jsonl").read_bytes().splitlines()
    return [float(text.split(b":")[-1].rstrip(b"}")) for text in lines]


def test_a_sender_or_receiver_that_is_started_again_doubles_no_line(tmp_path: Path) -> None:
    written(tmp_path, range(3))
    sender, receiver = forwarder(tmp_path, 1), forwarder(tmp_path, 0)
    sent(sender, receiver)
    written(tmp_path, range(3, 5))
    sent(forwarder(tmp_path, 1), receiver)
    assert numbers(tmp_path) == list(range(5))
    with (tmp_path / "streams" / "1.jsonl").open("ab") as file:
        file.write(line(5)[:7])  # killed while it wrote
    written(tmp_path, range(5, 7))
    sender.send_again()
    sent(sender, forwarder(tmp_path, 0))
    assert numbers(tmp_path) == list(range(7))


def test_a_worker_that_moves_to_another_machine_and_back_loses_no_line(tmp_path: Path) -> None:
    written(tmp_path, range(3))
    sender, receiver = forwarder(tmp_path, 1), forwarder(tmp_path, 0)
    sent(sender, receiver)
    receiver.assign(1, 0)
    with (tmp_path / "streams" / "1.jsonl").open("ab") as file:
        file.writelines(map(line, range(10, 12)))  # it records here
    receiver.assign(1, 1)
    written(tmp_path, range(3, 5))
    again = forwarder(tmp_path, 0)
    again.bases, again.left = receiver.bases, receiver.left
    sent(forwarder(tmp_path, 1), again)
    assert numbers(tmp_path) == [0, 1, 2, 10, 11, 3, 4]


def test_lines_after_others_that_have_not_come_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lines after others"):
        forwarder(tmp_path, 0).append(1, "1", line(4), before=4)
