"""Which inputs of a model have a row for every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError


def batch_of(inputs: Sequence[Any]) -> int:
    """How many samples are in a batch: the rows of the first tensor."""
    for one in inputs:
        if isinstance(one, torch.Tensor) and one.dim():
            return int(one.shape[0])
    raise UsageError("the model is called without a tensor that has a row for every sample; a pipeline cuts batches")


def with_rows(inputs: Sequence[Any]) -> list[bool]:
    """Of each input, whether it has one for every sample."""
    batch = batch_of(inputs)
    return [has_rows(one, batch) for one in inputs]


def has_rows(value: Any, batch: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch
