"""A training on devices that take their time, whose parameters count how often each sample was applied.

Arguments: folder, samples of an epoch, seconds of a device for a sample. A device is a sleep, so that each worker has
one of its own however few cores there are. A file `stop` in the folder names the epoch before which it ends.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path

import torch
from soak_task import Log
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = 16
"""Samples of one worker's minibatch, of those that begin the run."""


class Counting(torch.nn.Module):
    """By SGD with a rate of 1 its parameters count how often the gradient of each sample was applied."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.counts[numbers].sum()


folder, samples, each = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
team = paceline.join()
counting = Counting(samples)
plain = torch.optim.SGD(counting.parameters(), lr=1.0)
batches = DataLoader(TensorDataset(torch.arange(samples)), batch_size=BATCH * team.world_size, shuffle=True)
model, optimizer, loader = team.setup(counting, plain, batches)
log, stop = Log(folder, team.rank), folder / "stop"
for epoch in count():
    if stop.exists() and epoch >= int(stop.read_text()):
        break
    for (numbers,) in loader:
        with team.step():
            loss = model(numbers)
            time.sleep(each * len(numbers))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        log.add(len(numbers), epoch)
if team.is_lead:
    (folder / "counts.json").write_text(json.dumps([epoch, *counting.counts.tolist()]))
