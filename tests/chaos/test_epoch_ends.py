"""What holds at the ends of epochs, where samples run out: how many gradients an update has, and who is ahead."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from helpers.checker import events_of, violations
from helpers.forks import played
from helpers.load import above_noise
from helpers.support import write_script

from paceline.events import Event, LeaseGiven, Push, Return, Update

SCRIPT = """
import json, sys
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

options = {"samples": 50, "epochs": 5, "loaders": 0, "each": 1, **json.loads(sys.argv[1])}
team = paceline.join()
torch.manual_seed(3)
inputs = torch.randn(options["samples"], 6)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=2 * team.world_size, shuffle=True, num_workers=options["loaders"])
model, optimizer, loader = team.setup(model, optimizer, loader)
number = 0
for epoch in range(options["epochs"]):
    for x, y in loader:
        number += 1
        with team.step(accumulate=number % options["each"] != 0):
            mse_loss(model(x), y).backward()
            if number % options["each"] == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def run(folder: Path, strategy: str, *words: str, workers: int = 3, faults: str = "", **options: Any) -> list[Event]:
    script = write_script(folder, SCRIPT)
    fixed = [script, "--workers", str(workers), "--strategy", strategy, "--name", "ends", *words]
    outcome = played([*fixed, "--", json.dumps(options)], folder, PACELINE_FAULTS=faults)
    assert outcome.code == 0, outcome.err
    events = events_of(outcome, "ends")
    assert violations(events) == []
    return events


def sizes(events: list[Event]) -> dict[int, list[int]]:
    """By epoch, the gradients in each of its updates."""
    epoch_of = {event.number: event.epoch for event in events if isinstance(event, LeaseGiven)}
    pushes = {event.ticket: event for event in events if isinstance(event, Push)}
    found: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Update):
            found[epoch_of[pushes[event.pushes[0]].leases[0]]].append(len(event.pushes))
    return found


@pytest.mark.parametrize(("s", "loaders"), [(0, 0), (2, 0), (1, 2)])
def test_no_worker_is_ahead_by_more_than_the_bound_across_the_ends_of_epochs(
    s: int, loaders: int, tmp_path: Path
) -> None:
    # Few samples per epoch: the fast worker waits for the slow one when the samples run out.
    run(tmp_path, f"ssp:s={s}", "--slow", "1:0.02+exp(0.001)", workers=2, samples=26, epochs=6, loaders=loaders)


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("strategy", ["k-sync:k=2", "k-async:k=2", "k-batch-sync:k=2", "k-batch-async:k=2"])
def test_every_update_of_an_epoch_but_the_last_is_of_k(strategy: str, loaders: int, tmp_path: Path) -> None:
    events = run(tmp_path, strategy, "--slow", "0:0.02+exp(0.001)", samples=100, epochs=3, loaders=loaders)
    for made in sizes(events).values():
        assert set(made[:-1]) <= {2}, sizes(events)


@pytest.mark.parametrize("strategy", ["async", "k-async:k=2", "k-sync:k=2"])
def test_samples_that_were_fetched_ahead_and_go_to_another_worker_are_trained_on_once(
    strategy: str, tmp_path: Path
) -> None:
    # Gradients of several minibatches: a worker begins its next one without an answer of the server. One worker sleeps
    # while the others come to the end of the epoch.
    options = {"samples": 120, "epochs": 2, "loaders": 2, "each": 2}

    def check(factor: float) -> None:
        events = run(tmp_path, strategy, faults=f"worker0/push.made:2:delay={1.5 * factor}", **options)
        assert any(isinstance(event, Return) and event.why == "recalled" for event in events)

    above_noise(check, (1.0, 8.0))
