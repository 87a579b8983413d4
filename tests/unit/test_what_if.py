"""A replayed run with one thing changed takes as long as a run in which it is so."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.main import assemble
from paceline.errors import UsageError
from paceline.events import OBSERVED, Collective, Compute, Event, Join, Load, Pass, Peers, Reduce, Update, Wait
from paceline.schedules.timing import evaluate
from paceline.simulate.what_if import Answer, WhatIf, answer

STEPS, WORKERS = 40, 4


def written(folder: Path, strategy: str, found: list[Event]) -> Path:
    """A run of these events."""
    ranks = sorted({event.rank for event in found})
    joins: list[Event] = [Join(rank, 0.0, 1, "host", "cpu", strategy, 0.0) for rank in ranks]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*joins, *sorted(found, key=lambda event: event.start)]
    (folder / "events.jsonl").write_bytes(msgspec.json.Encoder(enc_hook=float).encode_lines(lines))
    return folder


def steps(
    seed: int, slow: dict[int, float] | None = None, stall: dict[tuple[int, int], float] | None = None
) -> np.ndarray:
    """Seconds of computing by step and worker."""
    seconds = np.random.default_rng(seed).normal(0.1, 0.004, (STEPS, WORKERS))
    for rank, factor in (slow or {}).items():
        seconds[:, rank] *= factor
    for place, more in (stall or {}).items():
        seconds[place] += more
    return seconds


def ddp(folder: Path, seconds: np.ndarray, transfer: float, overlap: float = 0.0) -> Path:
    """Two operations per step: one is called in the midst of computing and not waited for until its end."""
    found: list[Event] = [Peers(0, 0.0, "0", list(range(WORKERS)))]
    clock = np.zeros(WORKERS)
    for step, row in enumerate(seconds):
        early = clock + row * (1.0 - overlap)
        first = early.max() + transfer
        came = clock + row
        went = np.maximum(first, came)
        end = went.max() + transfer
        for rank in range(WORKERS):
            begin, own = clock[rank], row[rank]
            found.append(Compute(rank, begin, own, step, 0, 0, 0.0, own / 2))
            blocked = max(0.0, first - came[rank])
            number = 2 * step
            found.append(Collective(rank, early[rank], first - early[rank], "all_reduce", "0", number, 8, blocked))
            waited = end - went[rank]
            found.append(Collective(rank, went[rank], waited, "all_reduce", "0", number + 1, 8, waited))
            found.append(Compute(rank, end, 0.0, step, 1, 4))
            found.append(Update(rank, end, 0.001, step + 1))
        clock = np.full(WORKERS, end + 0.001)
    return written(folder, OBSERVED, found)


def all_reduce(folder: Path, seconds: np.ndarray) -> Path:
    """As a team records it: loading, computing, a wait, the update, and a wait for the others' updates."""
    found: list[Event] = []
    clock = np.zeros(WORKERS)
    for step, row in enumerate(seconds):
        came = clock + 0.01 + row
        last = came.max()
        for rank in range(WORKERS):
            found.append(Load(rank, clock[rank], 0.01))
            found.append(Compute(rank, clock[rank] + 0.01, row[rank], step, 1, 4, 0.0, row[rank] / 3))
            if came[rank] < last:
                found.append(Wait(rank, came[rank], last - came[rank], int(came.argmax())))
            found.append(Update(rank, last + 1e-4, 0.002, step + 1))
        clock = np.full(WORKERS, last + 1e-4 + 0.002 + 1e-4)
    return written(folder, "all-reduce", found)


def pipeline(folder: Path, forward: list[float], backward: list[float], transfer: float) -> tuple[Path, float]:
    """Steps of a 1F1B pipeline, and the seconds of one."""
    stages = len(forward)
    timing = evaluate("1f1b", 6, np.array([forward]), np.array([backward]), transfer=transfer)
    length = float(timing.makespan[0])
    found: list[Event] = []
    for step in range(5):
        begin = step * (length + 0.003)
        clock = [begin] * stages
        for stage, one, start, end, rank in sorted(timing.operations, key=lambda one: one.start):
            if begin + start > clock[rank]:
                found.append(Wait(rank, clock[rank], begin + start - clock[rank], max(0, rank - 1)))
            place = (one.kind, stage, 0, one.microbatch, 2, step)
            found.append(Pass(rank, begin + start, end - start, *place))
            clock[rank] = begin + end
        for rank in range(stages):
            if clock[rank] < begin + length:
                found.append(Wait(rank, clock[rank], begin + length - clock[rank], 0))
            found.append(Update(rank, begin + length + 1e-9, 0.003 - 1e-9, step + 1))
    return written(folder, f"pipeline:stages={stages},microbatches=6", found), length + 0.003


def asked(path: Path, text: str) -> Answer:
    return answer(path, [WhatIf.parse(text)])[0]


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_a_slow_rank_of_ddp_like_the_others(tmp_path: Path, overlap: float) -> None:
    told = asked(ddp(tmp_path / "slow", steps(1, {2: 3.0}), 0.02, overlap), "like=2")
    truth = asked(ddp(tmp_path / "even", steps(2), 0.02, overlap), "speed=0:1")
    assert truth.speedup == pytest.approx(1.0, abs=1e-9)
    assert told.seconds_per_update == pytest.approx(truth.now, rel=0.02)
    assert told.waiting_now[0] > 0.5 and max(told.waiting) < 0.4


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_a_faster_link(tmp_path: Path, overlap: float) -> None:
    told = asked(ddp(tmp_path / "slow", steps(1), 0.06, overlap), "link=4x")
    truth = asked(ddp(tmp_path / "quick", steps(1), 0.015, overlap), "speed=0:1")
    assert told.seconds_per_update == pytest.approx(truth.now, rel=1e-6)


def test_no_stalls_and_no_slow_worker_of_an_all_reduce(tmp_path: Path) -> None:
    stalls = {(9, 0): 0.8, (17, 1): 0.9, (30, 0): 0.5}
    run = all_reduce(tmp_path / "stalls", steps(1, {3: 2.0}, stalls))
    for text, seconds in (
        ("no-stalls", steps(1, {3: 2.0})),
        ("like=3", steps(2, {}, stalls)),
        ("like=3,no-stalls", steps(2)),
    ):
        truth = asked(all_reduce(tmp_path / text, seconds), "speed=0:1")
        told = asked(run, text)
        assert told.seconds_per_update == pytest.approx(truth.now, rel=0.02), text
    twice = asked(all_reduce(tmp_path / "twice", steps(1, {3: 1.0}, stalls)), "speed=0:1")
    assert asked(run, "speed=3:2").seconds_per_update == pytest.approx(twice.now, rel=0.03)


def test_a_pipelines_slow_stage_keeps_its_dependencies(tmp_path: Path) -> None:
    even, slow = [0.02] * 3, [0.02, 0.05, 0.02]
    run, length = pipeline(tmp_path / "slow", slow, [2 * one for one in slow], 0.004)
    assert asked(run, "speed=0:1").seconds_per_update == pytest.approx(length, rel=1e-6)
    assert asked(run, "like=1").seconds_per_update == pytest.approx(
        pipeline(tmp_path / "even", even, [2 * one for one in even], 0.004)[1], rel=0.02
    )
    assert asked(run, "link=2").seconds_per_update == pytest.approx(
        pipeline(tmp_path / "near", slow, [2 * one for one in slow], 0.002)[1], rel=0.02
    )


def test_a_wait_that_nothing_explains_stays(tmp_path: Path) -> None:
    path = all_reduce(tmp_path / "run", steps(1))
    lines = (path / "events.jsonl").read_bytes()
    extra = msgspec.json.Encoder().encode_lines([Load(9, 0.0, 0.5), Wait(9, 0.5, 3.0, 0), Reduce(9, 3.5, 0.1, 8)])
    (path / "events.jsonl").write_bytes(lines + extra)
    assert asked(path, "speed=0:1").speedup == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["", "like", "like=a", "link=0", "no-stalls,", "speed=1", "speed=1:0", "faster"])
def test_a_change_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--what-if is"):
        WhatIf.parse(text)


def test_changes_that_cannot_be_replayed_are_refused(tmp_path: Path) -> None:
    run = all_reduce(tmp_path / "run", steps(1))
    for text, words in (
        ("like=7", "no rank 7"),
        ("like=0,like=1,like=2,like=3", "at least one must stay"),
        ("link=2", "simulate the link instead"),
    ):
        with pytest.raises(UsageError, match=words):
            asked(run, text)
    split = written(tmp_path / "tensor", "tensor:degree=2", [Load(0, 0.0, 1.0), Load(1, 0.0, 1.0)])
    with pytest.raises(UsageError, match="cannot replay a run of 'tensor:degree=2'"):
        asked(split, "no-stalls")
    alone = written(tmp_path / "alone", OBSERVED, [Load(0, 0.0, 1.0), Load(1, 0.0, 1.0)])
    with pytest.raises(UsageError, match="no operations of several ranks"):
        asked(alone, "no-stalls")


def test_a_table_is_replayed_and_a_missing_rank_refused(tmp_path: Path) -> None:
    rows, begin = [], 0.0
    for step, seconds in enumerate(steps(1, {2: 3.0})):
        end = begin + float(seconds.max()) + 0.01
        for rank, own in enumerate(seconds):
            rows += [(rank, step, "forward", begin, begin + own), (rank, step, "all_reduce", begin + own, end)]
        begin = end
    text = "rank,step,kind,start,end\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows)
    (tmp_path / "table.csv").write_text(text)
    words = ["simulate", "--from", str(tmp_path / "table.csv"), "--what-if", "like=2", "--json"]
    (told,) = json.loads(CliRunner().invoke(assemble(None), words, catch_exceptions=False).stdout)
    assert told["now"] == pytest.approx(0.31, rel=0.02) and told["seconds_per_update"] == pytest.approx(0.116, rel=0.03)
    run = ddp(tmp_path / "run", steps(1), 0.02)
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(line for line in lines if b'"rank":3' not in line))
    with pytest.raises(UsageError, match=r"80 of 80 operations of .* were not recorded by all their ranks"):
        asked(run, "like=2")


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    run = str(ddp(tmp_path / "run", steps(1, {2: 3.0}), 0.02))
    words = ["simulate", "--from", run, "--what-if", "like=2", "--what-if", "link=2"]
    told = CliRunner().invoke(assemble(None), words, catch_exceptions=False)
    rows = [line.split() for line in told.stdout.splitlines()]
    assert [row[0] for row in rows[1:]] == ["as", "like=2", "link=2"]
    found = json.loads(CliRunner().invoke(assemble(None), [*words, "--json"], catch_exceptions=False).stdout)
    assert [one["what_if"] for one in found] == ["like=2", "link=2"] and found[0]["speedup"] > 2
    refused = CliRunner().invoke(assemble(None), [*words, "--workers", "3"])
    assert isinstance(refused.exception, UsageError) and "no --workers" in str(refused.exception)
