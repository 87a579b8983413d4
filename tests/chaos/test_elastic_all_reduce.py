"""All-reduce that goes on with whoever is left: at any moment of a death, and with the numbers of a smaller team."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checker import events_of
from helpers.forks import played
from helpers.support import PREAMBLE, Outcome, write_script
from torch.nn.functional import mse_loss

from paceline.events import Compute, Event, Leave, Lost, Roster

BATCH, WORKERS = 4, 3
"""Samples of a worker before one is lost; the batch of all stays."""
SCRIPT = (
    PREAMBLE
    + """
import threading
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from paceline.parameters.sharding import ShardedOptimizer
from paceline.transport import BarrierKind

options = {"victim": 1, "when": None, "at": 5, "samples": 97, "epochs": 2, "clip": False, "adam": True,
           "how": "kill"}
options |= json.loads(sys.argv[1])
team = paceline.join()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)).double()
inputs = torch.randn(options["samples"], 6, dtype=torch.float64)
data = TensorDataset(torch.arange(len(inputs)), inputs, inputs.sum(1, keepdim=True))
make = torch.optim.AdamW if options["adam"] else torch.optim.SGD
optimizer = make(model.parameters(), lr=0.01, weight_decay=0.01)
model, optimizer, loader = team.setup(model, optimizer, DataLoader(data, batch_size=12))
number = 0
trainer = team._trainer
is_victim = team.rank == options["victim"]

def die():
    note("struck")
    if options["how"] == "hang":
        time.sleep(1e6)
    os.kill(os.getpid(), signal.SIGSTOP if options["how"] == "stop" else signal.SIGKILL)
    note("woke")

if is_victim and options["when"] == "inside":
    real, calls = ShardedOptimizer.update, 0

    def update(self, *arguments):
        global calls
        calls += trainer.version == options["at"]
        done = real(self, *arguments)
        if calls == 2:  # with its second shard half done, and the state of it
            for tensor in [*self.state(), *trainer._shards.versions.buffers[trainer._shards.buffer ^ 1]]:
                for start, stop in [self._layout.flats[0].shards[self._rank]]:
                    tensor[start : (start + stop) // 2] = float("nan")
            die()
        return done

    ShardedOptimizer.update = update
if is_victim and options["when"] == "after":
    meet = trainer._barrier.wait

    def late(intent, length=0):
        if intent is BarrierKind.PUBLISH and trainer.version == options["at"]:
            die()
        return meet(intent, length)

    trainer._barrier.wait = late

if is_victim and options["when"] == "any":
    threading.Timer(options["within"], die).start()
seen = []
for epoch in range(options["epochs"]):
    epoch_seen = []
    for keys, x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        if options["clip"]:
            team.clip_grad_norm_(0.05)
        if is_victim and trainer.version == options["at"]:
            if options["when"] == "before":
                die()
            if options["when"] == "leaves":
                note("struck")
                sys.exit(0)
            if options["when"] == "preempted":
                note("struck")
                os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        epoch_seen += keys.tolist()
        optimizer.zero_grad()
    seen.append(epoch_seen)
    if is_victim and options["when"] == "between" and epoch == 0:
        die()
values = [parameter.flatten().tolist() for parameter in model.parameters()]
state = optimizer.state_dict()["state"]
note(f"end-{team.rank}", values=values, seen=seen, size=team.world_size, version=trainer.version, lead=team.is_lead,
     finite=all(bool(torch.isfinite(v).all()) for s in state.values() for v in s.values()))
"""
)


def play(
    folder: Path, workers: int = WORKERS, words: Iterable[str] = (), timeout: float = 20, **options: Any
) -> Outcome:
    script = write_script(folder, SCRIPT)
    fixed = [str(script), "--workers", str(workers), "--strategy", "all-reduce", "--name", "run"]
    return played([*fixed, "--timeout", str(timeout), "--elastic", *words, "--", json.dumps(options)], folder)


def plain(rounds: list[list[int]], samples: int = 97, clip: bool = False) -> list[torch.Tensor]:
    """The same updates in one process: each the mean over the samples of a round."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)).double()
    inputs = torch.randn(samples, 6, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for keys in rounds:
        optimizer.zero_grad()
        x = inputs[keys]
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [parameter.detach().flatten() for parameter in model.parameters()]


def rounds_of(victim: int, lost_at: int | None, counted: bool, samples: int = 97, epochs: int = 2) -> list[list[int]]:
    """Which samples make which update, when a worker is lost at one: 12 of three workers, then 12 of two."""
    rounds: list[list[int]] = []
    size = BATCH * WORKERS
    for _ in range(epochs):
        order, left = list(range(samples)), []
        while order:
            if len(order) < size:  # what the lost one had goes with what is left
                order, left = order + left, []
            keys, order = order[:size], order[size:]
            if len(rounds) == lost_at and not counted:
                left = keys[BATCH * victim : BATCH * (victim + 1)]
                keys = [key for key in keys if key not in left]
            rounds.append(keys)
    return rounds


def well(outcome: Outcome, survivors: list[int]) -> tuple[list[Event], list[dict[str, Any]]]:
    assert outcome.code == 0, outcome.err
    assert outcome.tracebacks == 0, outcome.err
    assert outcome.run.noted("struck")
    assert outcome.run.processes() == []
    ends = [outcome.run.note(f"end-{rank}") for rank in survivors]
    assert all(end["finite"] for end in ends)
    assert all(end["values"] == ends[0]["values"] for end in ends)
    assert [end["lead"] for end in ends] == [True] + [False] * (len(ends) - 1)
    assert {end["size"] for end in ends} <= set(range(1, len(survivors) + 1))
    return events_of(outcome, "run"), ends


def same(ours: list[list[float]], theirs: list[torch.Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(torch.tensor(a, dtype=torch.float64), b, rtol=1e-10, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize(
    ("when", "victim"),
    [
        *[("before", 0), ("before", 1), ("inside", 0), ("inside", 2)],
        *[("after", 0), ("after", 1), ("leaves", 0), ("leaves", 2)],
        *[("preempted", 0), ("preempted", 2)],
    ],
)
def test_the_others_go_on_as_a_smaller_team_would(when: str, victim: int, tmp_path: Path) -> None:
    outcome = play(tmp_path, victim=victim, when=when)
    survivors = [rank for rank in range(WORKERS) if rank != victim]
    events, ends = well(outcome, survivors)
    finishes, counted = when == "preempted", when in ("inside", "after", "preempted")
    expected = rounds_of(victim, 6, False) if finishes else rounds_of(victim, 5, counted)
    assert ends[0]["version"] == len(expected)
    assert same(ends[0]["values"], plain(expected))
    # Every sample once an epoch; what the lost one had trained on before is what the others have not.
    for epoch in range(2):
        trained = sorted(key for end in ends for key in end["seen"][epoch])
        assert len(set(trained)) == len(trained)
        before = [
            key for keys in rounds_of(victim, None, True)[: 5 + counted] for key in keys[4 * victim : 4 * victim + 4]
        ]
        assert trained == [key for key in range(97) if epoch == 1 or key not in before]
    orderly = when in ("leaves", "preempted")
    assert [event.rank for event in events if isinstance(event, Lost)] == ([] if orderly else [victim])
    assert next(event.workers for event in events if isinstance(event, Roster)) == survivors
    lines, version = outcome.err.splitlines(), 5 + finishes
    assert f"paceline: rank {victim} {'left' if orderly else 'died'}; the other 2 go on from version {version}" in lines
    assert (f"paceline: rank {victim} was preempted (SIGTERM) and has left" in lines) == finishes


@pytest.mark.parametrize(
    ("how", "when", "victim", "place"),
    [
        ("stop", "before", 1, "an update (optimizer.step)"),
        ("hang", "before", 0, "an update (optimizer.step)"),
        ("stop", "inside", 2, "the end of an update"),
    ],
)
def test_a_silent_worker_is_evicted_and_never_wakes(
    how: str, when: str, victim: int, place: str, tmp_path: Path
) -> None:
    outcome = play(tmp_path, timeout=4, victim=victim, when=when, how=how)
    events, ends = well(outcome, [rank for rank in range(WORKERS) if rank != victim])
    assert not outcome.run.noted("woke")
    expected = rounds_of(victim, 5, counted=when == "inside")
    assert ends[0]["version"] == len(expected)
    assert same(ends[0]["values"], plain(expected))
    assert [event.rank for event in events if isinstance(event, Lost)] == [victim]
    said = f"paceline: rank {victim} did not come to {place} within 4 s and had to be evicted; the other 2 go on from"
    assert outcome.err.count(said) == 1, outcome.err


@pytest.mark.parametrize("when", ["before", "inside"])
def test_the_mean_is_clipped_as_before(when: str, tmp_path: Path) -> None:
    outcome = play(tmp_path, victim=1, when=when, clip=True)
    _, ends = well(outcome, [0, 2])
    expected = rounds_of(1, 5, when == "inside")
    if when == "before":
        # It had come to the clipping, and not to the update: the factor is that of all three.
        assert ends[0]["version"] == len(expected)
    else:
        assert same(ends[0]["values"], plain(expected, clip=True))


def test_between_epochs_one_is_lost_and_another_draws(tmp_path: Path) -> None:
    outcome = play(tmp_path, victim=0, when="between")
    _, ends = well(outcome, [1, 2])
    assert sorted(key for end in ends for key in end["seen"][1]) == list(range(97))


def test_the_last_one_goes_on_alone(tmp_path: Path) -> None:
    outcome = play(tmp_path, workers=2, victim=0, when="inside")
    events, ends = well(outcome, [1])
    assert ends[0]["size"] == 1
    assert "paceline: rank 0 died; the other goes on from version 5" in outcome.err.splitlines()
    assert max(event.rank for event in events if isinstance(event, Compute)) == 1


def test_nobody_lost_is_a_run_as_any_other(tmp_path: Path) -> None:
    outcome = play(tmp_path, victim=9)
    assert outcome.code == 0, outcome.err
    ends = [outcome.run.note(f"end-{rank}") for rank in range(WORKERS)]
    assert same(ends[0]["values"], plain(rounds_of(0, None, True)))
    assert {event.rank for event in events_of(outcome, "run") if isinstance(event, Leave)} == {0, 1, 2}


def test_without_elastic_a_death_still_ends_the_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    words = [str(script), "--workers", "3", "--name", "run", "--", json.dumps({"when": "before"})]
    outcome = played(words, tmp_path)
    assert outcome.code == 1
    assert "WorkerLost" in outcome.err


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_worker_is_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    victim, within = chance.randrange(3), chance.random() * 0.3
    outcome = play(tmp_path, victim=victim, when="any", within=within, samples=1200, epochs=3)
    assert outcome.run.noted("struck")
    assert not outcome.run.noted(f"end-{victim}")
    assert outcome.code == 0, outcome.err
    ends = [outcome.run.note(f"end-{rank}") for rank in range(3) if rank != victim]
    assert ends[0]["values"] == ends[1]["values"]
    assert ends[0]["finite"]
    assert outcome.run.processes() == []
    for epoch in range(3):
        trained = [key for end in ends for key in end["seen"][epoch]]
        assert len(set(trained)) == len(trained)
