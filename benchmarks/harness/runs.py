"""Starts `paceline` with one thread per process, and returns its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

MINIBATCHES = """
import sys

import paceline
import torch
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
torch.manual_seed(0)
count = 8 * int(sys.argv[1])
data = TensorDataset(torch.randn(count, 20), torch.randint(0, 2, (count,)))
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8 * team.world_size, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
for x, y in loader:
    with team.step():
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""A script that trains a small network on so many minibatches of 8 samples, given as its argument."""


def command(*words: str) -> list[str]:
    """The command line of `paceline`."""
    return [sys.executable, "-m", "paceline", *words]


def bench(*arguments: str) -> dict[str, Any]:
    """The results of `paceline bench`."""
    done = subprocess.run(command("bench", *arguments, "--json"), check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def train(
    script: str,
    folder: Path,
    *options: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Path:
    """Run a script's text under `paceline run`, without snapshots, in a folder; returns the folder of the run."""
    (folder / "train.py").write_text(script)
    words = command("run", "train.py", "--quiet", "--name", "run", "--snapshot", "off", *options, "--", *arguments)
    subprocess.run(words, check=True, cwd=folder, env=environment)
    return folder / "runs" / "run"
