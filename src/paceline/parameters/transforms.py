"""Refuses transforms of functions (`torch.func.grad`, `vmap`, …) of models that are split over workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paceline.errors import UsageError


def refuse_transforms(model: torch.nn.Module, inputs: Any) -> None:
    """Raises a UsageError if the model is called inside a transform."""
    values = [*tree_leaves(inputs), next(model.parameters(), None)]
    if any(isinstance(one, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(one) for one in values):
        raise UsageError(
            "torch.func transforms (grad, vmap, …) cannot go through a model that is split over workers; call "
            "loss.backward(), or use all-reduce"
        )
