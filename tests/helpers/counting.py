"""A model that counts what was applied, in a file that is quick to import."""

from __future__ import annotations

from typing import Any

import torch

_BALLAST = 150_000
"""Parameters that stay 0, so that an update has several chunks."""


class Counting(torch.nn.Module):
    """Its parameters count, by SGD with a rate of 1, how often the gradient of each sample was applied."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples))
        self.ballast = torch.nn.Parameter(torch.zeros(_BALLAST))

    def forward(self, numbers: torch.Tensor) -> Any:
        hot = torch.nn.functional.one_hot(numbers, len(self.counts)).float()
        return -(hot @ self.counts) - 0.0 * self.ballast.sum()
