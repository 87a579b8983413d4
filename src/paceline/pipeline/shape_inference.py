"""What a model would return: shapes and dtypes, without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.graph.module_attributes import ModuleAttributes
from paceline.parameters.step_snapshot import StepSnapshot


def outlined(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What it returns, with tensors on the meta device; random numbers, buffers and plain attributes are put back."""
    own = ModuleAttributes(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            made = _without_values(model, args, kwargs)
        except Exception:  # a layer that looks at values can not be run without them
            snapshot = StepSnapshot(model)
            snapshot.take()
            try:
                made = model(*args, **kwargs)
            finally:
                snapshot.restore()
    own.restore()
    return pytree.tree_map_only(torch.Tensor, _outline, made)


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # What a model makes or keeps besides its parameters and buffers, a mask say, is a tensor like any other.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor.detach()) for name, tensor in tensors}
        given = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        return torch.func.functional_call(model, weights, given[0], given[1])
