"""Which inputs of a model have a batch dimension: one row for every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError


def batch_size(inputs: Sequence[Any]) -> int:
    """Samples of a batch: the rows of the first tensor."""
    for one in inputs:
        if isinstance(one, torch.Tensor) and one.dim():
            return int(one.shape[0])
    raise UsageError("the model is called without a tensor that has a row for every sample; a pipeline cuts batches")


def batched_inputs(inputs: Sequence[Any]) -> list[bool]:
    """For each input, True if it has a row for every sample."""
    batch = batch_size(inputs)
    return [is_batched(one, batch) for one in inputs]


def is_batched(value: Any, batch: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch
