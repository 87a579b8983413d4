"""The model, the data and the log that all contestants of `faults.py soak` share. Needs only torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

SAMPLES, FEATURES, CLASSES = 20_000, 256, 10
BATCH = 32
"""Samples of one worker's minibatch."""
RATE, DECAY = 0.02, 0.03
"""Learning rate and weight decay: with the latter the loss does not rise again in hundreds of epochs."""
WORKERS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 1024), nn.Linear(1024, 1024), nn.Linear(1024, CLASSES)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def data(samples: int = SAMPLES, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of ten clouds that overlap, and the cloud of each: the loss begins at 2.3 and ends at about 1.2."""
    centers = 0.12 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(7))
    source = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (samples,), generator=source)
    return centers[classes] + torch.randn(samples, FEATURES, generator=source), classes


def loss_of(trained: nn.Module) -> float:
    """Mean loss on samples that nobody has trained on."""
    inputs, classes = data(4_000, seed=2)
    trained.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(trained(inputs), classes))


class Log:
    """Appends a line per step, with the time of the machine's monotonic clock, and knows when to stop."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"steps-{rank}.log").open("a", buffering=1)
        self._stop = folder / "stop"
        (folder / f"worker-{rank}.pid").write_text(str(os.getpid()))

    @property
    def over(self) -> bool:
        return self._stop.exists()

    def add(self, *values: object) -> None:
        print(time.monotonic(), *values, file=self._file)
