"""Stages that several workers share: what they do together is what one would have done, only sooner."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import done
from helpers.load import above_noise
from helpers.split_models import Nap, apart, launched, made, train
from helpers.support import PACELINE, write_script
from helpers.teams import run_team
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import Team, UsageError
from paceline.events import Pass, Reduce, Update
from paceline.events.reader import read_run
from paceline.events.summary import merge
from paceline.report.timeline import timeline


@pytest.fixture(scope="module", autouse=True)
def tracing_is_loaded() -> None:
    """Once here instead of once in every worker that is forked."""
    torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),), strict=False)


def losses(team: Team, kind: str, steps: int, options: dict[str, Any]) -> list[float]:
    return train(team, kind, steps, **options)


# The transformer's first and last layer have the same weights, whose gradients come from all workers of both.
@pytest.mark.parametrize(("kind", "schedule"), [("chain", "gpipe"), ("transformer", "1f1b")])
@pytest.mark.parametrize("replicas", ["1+2", "2+1", "1+2+1", "2+2", "3"])
def test_losses_are_those_of_the_plain_model(replicas: str, kind: str, schedule: str) -> None:
    counts = [int(count) for count in replicas.split("+")]
    spec = f"pipeline:stages={len(counts)},microbatches=4,schedule={schedule},workers={replicas}"
    found = run_team(losses, sum(counts), kind, 20, {}, launch=launched(spec))
    assert apart(found[0], train(None, kind, 20)) < 1e-5
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("replicas", ["1+3", "3+1", "1+2+1"])
def test_a_last_batch_that_is_too_small_for_all_leaves_some_without_work(replicas: str) -> None:
    options = {"batch": 13}  # of 40 samples: the last of every epoch is one sample, and one microbatch
    spec = f"pipeline:stages={replicas.count('+') + 1},microbatches=5,workers={replicas}"
    found = run_team(losses, 4, "chain", 12, options, launch=launched(spec))
    assert apart(found[0], train(None, "chain", 12, **options)) < 1e-5


def behind(team: Team) -> tuple[list[float], list[float]]:
    """A worker takes its time to read the model, while others could go on without it: their batch is too small."""
    model: Any = made("chain")
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 48).view(4, 12)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    first: list[float] = []
    for name, value in model.state_dict().items():
        first.append(float(value.sum()))
        if team.rank == 2 and name == "0.weight":
            time.sleep(1.0)
    model(x[:1]).square().mean().backward()
    optimizer.step()
    return first, [float(value.sum()) for value in model.state_dict().values()]


def test_whoever_had_no_microbatch_still_reads_one_version() -> None:
    found = run_team(behind, 4, launch=launched("pipeline:stages=3,microbatches=4,workers=1+2+1"))
    assert all(one == found[0] for one in found)
    assert found[0][0] != found[0][1]


def accumulated(team: Team | None) -> list[float]:
    model: Any = made("chain")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 12, generator=generator), torch.randint(0, 61, (24,), generator=generator)
    told = []
    for step in range(6):
        for half in (0, 1):
            rows = slice(12 * half, 12 * half + 12)
            with team.step(accumulate=not half) if team is not None else torch.enable_grad():
                loss = cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                if team is not None or half:
                    if half and step % 2:
                        norm = team.clip_grad_norm_(0.1) if team else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        told.append(float(norm))
                    optimizer.step()
                    optimizer.zero_grad()
            told.append(loss.item())
        model.eval()
        with torch.no_grad():
            told.append(float(model(x[:7]).sum()))
        model.train()
    return told


@pytest.mark.parametrize("replicas", ["1+2", "2+1"])
def test_gradients_add_up_over_steps_and_are_clipped_as_one(replicas: str) -> None:
    launch = launched(f"pipeline:stages=2,microbatches=3,workers={replicas}")
    for found in run_team(accumulated, 3, launch=launch):
        assert apart(found, accumulated(None)) < 1e-5


def with_norms(team: Team | None) -> list[float]:
    """Batch norm that keeps its statistics as they are."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh())]
    model: Any = nn.Sequential(*layers).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(3))
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    told = []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def test_buffers_that_stay_as_they_are_may_be_in_a_shared_stage() -> None:
    for found in run_team(with_norms, 3, launch=launched("pipeline:stages=2,microbatches=3,workers=1+2")):
        assert apart(found, with_norms(None)) < 1e-5


# -- what cannot be --------------------------------------------------------------------------------------------------


def refused(team: Team, case: str) -> str:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
    model: Any = nn.Sequential(*layers)
    x = torch.randn(8, 4)
    if case == "sparse":
        model, x = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), x.long()
        x = x.clamp(0, 8)[:, 0]
    try:
        model, _ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(x).mean().backward()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        ("batch", "", "share its microbatches, but batch norm layers take their statistics of the whole batch"),
        ("microbatch", ",norm=microbatch", r"stage \d has \d workers, and its part of the model may change buffers"),
        ("sparse", "", "has a sparse gradient, which they cannot sum; make its layer without sparse=True"),
    ],
)
def test_what_they_would_not_agree_on_is_refused_in_one_sentence(case: str, options: str, words: str) -> None:
    launch = launched(f"pipeline:stages=2,microbatches=4,workers=2+2{options}")
    said = [one for one in run_team(refused_or_left, 4, case, launch=launch) if one]
    assert len(said) >= 2
    for message in said:
        assert re.search(words, message), message
        assert "\n" not in message


def refused_or_left(team: Team, case: str) -> str:
    """Of a gradient only those know that have it: the others may hear that these have left."""
    try:
        return refused(team, case)
    except Exception:
        if case == "sparse":
            return ""
        raise


# -- that it is worth it ---------------------------------------------------------------------------------------------


def asleep(team: Team, steps: int, factor: float) -> float:
    """Seconds of a step in the middle of a run; the second half of the model takes twice as long as the first."""
    model: Any = nn.Sequential(
        Nap(0.03 * factor, 0.03 * factor), nn.Identity(), Nap(0.06 * factor, 0.06 * factor), nn.Identity()
    )
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        model(torch.ones(8, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])[len(taken) // 2 - 1]


def test_a_stage_that_takes_twice_as_long_is_worth_two_workers(tmp_path: Path) -> None:
    def check(factor: float) -> None:
        folder = tmp_path / f"{factor:g}"
        alone = run_team(asleep, 2, 5, factor, launch=launched("pipeline:stages=2"))
        spec = "pipeline:stages=2,workers=1+2"
        shared = run_team(asleep, 3, 5, factor, launch=launched(spec, folder=str(folder)))
        # Of sleep alone it is 0.6 s against 1.02 s.
        assert max(shared) < 0.8 * min(alone), (shared, alone)
        summary = merge(folder, 3)
        assert summary.updates == summary.minibatches == 5
        assert sum(worker.samples for worker in summary.workers.values()) == 5 * 8
        assert summary.bubble is not None and summary.bubble.measured < 0.5 and summary.bubble.formula is None
        events = [event for part in read_run(folder) for event in part]
        assert_in_turn([event for event in events if isinstance(event, Pass)])
        assert {event.rank for event in events if isinstance(event, Update)} == {0, 1, 2}
        reducing = {event.rank for event in events if isinstance(event, Reduce)}
        assert reducing == {1}  # there is one parameter to agree on
        picture = timeline(events, "shared", updates=2)
        assert all(f"worker {rank}</text>" in picture for rank in range(3))
        assert "F1 of stage 1" in picture

    above_noise(check)


def assert_in_turn(passes: list[Pass]) -> None:
    assert passes
    for one in passes:
        assert (one.stage, one.rank) == ((0, 0) if one.rank == 0 else (1, 1 + one.microbatch % 2))
    first = [one for one in passes if one.version == passes[0].version]
    for kind in "FB":
        for stage in (0, 1):
            ran = [one.microbatch for one in first if (one.kind, one.stage) == (kind, stage)]
            assert sorted(ran) == list(range(8))


# -- from the plan to the run ----------------------------------------------------------------------------------------

SCRIPT = """
import time, torch, paceline
torch.set_num_threads(1)
class Nap(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
    def forward(self, x):
        time.sleep(self.seconds)
        return x * 1.0
team = paceline.join()
torch.manual_seed(0)
# Much to agree on, if the first half were shared; nothing in the second.
model = torch.nn.Sequential(torch.nn.Linear(512, 512), Nap(0.03), torch.nn.Linear(512, 8), Nap(0.06), torch.nn.Tanh())
model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(3):
    loss = model(torch.ones(32, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    team.report(loss=loss.item())
"""


def lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith("paceline run"))


def test_what_a_plan_finds_can_be_run_as_it_says(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    command = [PACELINE, "plan", "--partition", str(script), "--stages", "3", "--microbatches", "4", "--replicate"]
    told = done([*command, "--bandwidth", "10MB/s", "--figure", "cut.svg"], tmp_path)
    (line,) = lines(told.out)
    assert line.endswith("--workers 3 --strategy pipeline:stages=2,microbatches=4,schedule=1f1b,workers=1+2")
    assert "1 × 2" in told.out
    assert "worker 2" in (tmp_path / "cut.svg").read_text()
    ran = done([PACELINE, *line.split()[1:], "--name", "shared"], tmp_path)
    assert ran.code == 0, ran.err
    passes = [one for part in read_run(tmp_path / "runs" / "shared") for one in part if isinstance(one, Pass)]
    assert {(one.rank, one.stage) for one in passes} == {(0, 0), (1, 1), (2, 1)}
    # It is cut where the plan says: the longer nap is in the second stage.
    forward = {stage: [one.seconds for one in passes if (one.kind, one.stage) == ("F", stage)] for stage in (0, 1)}
    assert min(forward[0]) < 0.055 <= min(forward[1])
    told = done([*command, "--schedule", "zero-bubble"], tmp_path)
    assert told.code == 2 and "with --replicate, --schedule is 'zero-bubble'; it must be one of 'gpipe'" in told.err
