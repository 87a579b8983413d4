"""A record that is thinned counts every update and every sample once, also if the server is killed meanwhile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.checker import events_of
from helpers.forks import played
from helpers.support import write_script

from paceline.events import LeaseGiven, Omitted, Push, Recovery, Update
from paceline.launcher.finished_run import Run

SAMPLES, BATCH, EPOCHS = 320, 8, 40
SCRIPT = f"""
import paceline, torch
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
inputs = torch.randn({SAMPLES}, 6)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size={BATCH} * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
for epoch in range({EPOCHS}):
    for x, y in loader:
        with team.step():
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "server killed"])
def test_every_sample_of_a_thinned_run_counts_once(killed: bool, tmp_path: Path) -> None:
    words = ["--workers", "2", "--strategy", "async", "--name", "long", "--record-limit", "100kB"]
    faults = {"PACELINE_FAULTS": "server0/update.chunk:1300:kill"} if killed else {}
    script = write_script(tmp_path, SCRIPT)
    outcome = played([script, *words, "--slow", "all:constant(0.002)"], tmp_path, seconds=90.0, **faults)
    assert outcome.code == 0, outcome.text
    events, summary = events_of(outcome, "long"), Run(tmp_path / "runs" / "long").summary
    assert any(isinstance(event, Recovery) for event in events) == killed
    updates = EPOCHS * SAMPLES // BATCH
    assert (summary.updates, summary.minibatches) == (updates, updates)
    assert sum(summary.staleness.histogram.values()) == updates
    assert sum(worker.samples for worker in summary.workers.values()) == EPOCHS * SAMPLES
    assert summary.omitted > updates
    assert (tmp_path / "runs" / "long" / "events.jsonl").stat().st_size < 1_000_000, "of 1.6 MB"
    leases = {event.number: event for event in events if isinstance(event, LeaseGiven)}
    pushes = {event.ticket: event for event in events if isinstance(event, Push)}
    done: Counter[tuple[int, int]] = Counter()
    for event in events:
        if isinstance(event, Update):
            for lease in [leases[number] for ticket in event.pushes for number in pushes[ticket].leases]:
                done.update((lease.epoch, place) for place in range(lease.first, lease.first + lease.samples))
        elif isinstance(event, Omitted):
            for _, epoch, _, first, stop in event.trained:
                done.update((epoch, place) for place in range(first, stop))
    assert len(done) == EPOCHS * SAMPLES
    assert set(done.values()) == {1}
