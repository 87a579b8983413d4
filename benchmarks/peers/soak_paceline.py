"""The same training by Paceline. Argument: folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from soak_task import BATCH, DECAY, RATE, Log, data, loss_of, model
from torch.utils.data import DataLoader, TensorDataset

import paceline

folder = Path(sys.argv[1])
team = paceline.join()
trained = model()
plain = torch.optim.SGD(trained.parameters(), lr=RATE, weight_decay=DECAY)
batches = DataLoader(TensorDataset(*data()), batch_size=BATCH * team.world_size, shuffle=True)
network, optimizer, loader = team.setup(trained, plain, batches)
log, over = Log(folder, team.rank), False
while not over:
    for inputs, classes in loader:
        with team.step():
            torch.nn.functional.cross_entropy(network(inputs), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
        log.add(len(classes))
        over = log.over
        if over:
            break
if team.is_lead:
    (folder / "loss-0").write_text(str(loss_of(trained)))
