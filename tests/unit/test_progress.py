"""The line about how far a run is, from the streams of its workers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.events import Compute, Event, Leave, Metric, Pass, Update
from paceline.launcher.progress import Progress


def line(folder: Path, *streams: list[Event]) -> str:
    (folder / "streams").mkdir()
    for rank, events in enumerate(streams):
        (folder / "streams" / f"{rank}.jsonl").write_bytes(
            b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        )
    return Progress(folder, len(streams), all_output=False, quiet=True).line()


def computed(rank: int, *starts: float, seconds: float) -> list[Event]:
    return [Compute(rank, start, seconds, number, 1, 8) for number, start in enumerate(starts)]


def passed(rank: int, stage: int, *starts: float, seconds: float) -> list[Event]:
    return [Pass(rank, start, seconds, "B", stage, 0, number, 8, 0) for number, start in enumerate(starts)]


def test_nothing_is_said_before_there_is_an_update(tmp_path: Path) -> None:
    assert line(tmp_path, computed(0, 1.0, seconds=0.1), []) == ""


def test_workers_with_samples_of_their_own_have_a_pace(tmp_path: Path) -> None:
    quick = computed(0, 1.0, 1.4, seconds=0.1)
    quick += [Metric(0, 1.5, 1, {"loss": 0.25}), Update(0, 1.5, 0.0, 1)]
    slow = computed(1, 1.0, 1.4, seconds=0.2)
    gone = [*computed(2, 1.0, seconds=0.1), Leave(2, 1.2)]
    assert line(tmp_path, quick, slow, gone, []) == "update 1 · loss 0.25 · 59 samples/s · pace 0: 80/s  1: 40/s  3: –"


@pytest.mark.parametrize("stages", [2, 3])
def test_workers_with_parts_of_a_model_are_busy(stages: int, tmp_path: Path) -> None:
    streams = [passed(stage, stage, 1.0, 1.4, seconds=0.1 * (1 + stage)) for stage in range(stages)]
    streams[0].append(Update(0, 1.5, 0.0, 7))
    told = line(tmp_path, *streams)
    assert told.startswith("update 7 · 32 samples/s · busy 0: 40%  1: 67%")
    assert told.endswith("  2: 86%" if stages == 3 else "67%")
