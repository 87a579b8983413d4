"""Shapes and dtypes of a model's outputs, inferred without computing values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.graph.module_attributes import ModuleAttributes
from paceline.parameters.step_snapshot import StepSnapshot


def infer_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's outputs as meta tensors; random state, buffers and plain attributes are restored."""
    attributes = ModuleAttributes(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            outputs = _run_fake(model, args, kwargs)
        except Exception:  # a layer that reads values cannot run on fake tensors
            snapshot = StepSnapshot(model)
            snapshot.take()
            try:
                outputs = model(*args, **kwargs)
            finally:
                snapshot.restore()
    attributes.restore()
    return pytree.tree_map_only(torch.Tensor, _meta, outputs)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_fake(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Tensors that a model creates, or has besides its parameters and buffers, such as a mask, are not fake.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor.detach()) for name, tensor in tensors}
        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        return torch.func.functional_call(model, weights, fake_args, fake_kwargs)
