"""Inputs of a model taken from its loader, for the one call that records its operations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.errors import UsageError


def example_inputs(loaders: Sequence[DataLoader[Any]], model: torch.nn.Module) -> list[Any]:
    """The model's arguments for the first batch of the first loader.

    The last part of a batch is its targets, which are left out unless the model needs them. Of a batch of named tensors
    it is given those that its `forward` names.
    """
    if not loaders:
        raise UsageError(
            "to split a model, team.setup runs it once: give setup the loader that it is trained with, whose batches "
            "are (inputs, targets)"
        )
    loader: Any = loaders[0]
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        size = getattr(loader.batch_sampler, "batch_size", None) or len(next(iter(loader.batch_sampler)))
    count = min(size or 1, len(loader.dataset))
    samples = [loader.dataset[number] for number in range(count)]
    batch = loader.collate_fn(samples if loader.batch_sampler is not None else samples[0])
    signature = inspect.signature(model.forward)
    if isinstance(batch, (list, tuple)):
        fewer = list(batch[:-1]) if len(batch) > 1 else list(batch)
        return fewer if _fits(signature, fewer) or not _fits(signature, batch) else list(batch)
    named = [name for name in signature.parameters if isinstance(batch, Mapping) and name in batch]
    if named and (len(named) == len(batch) or not _fits(signature, [batch])):
        names = list(signature.parameters)[: list(signature.parameters).index(named[-1]) + 1]
        return [batch[name] if name in named else signature.parameters[name].default for name in names]
    return [batch]


def _fits(signature: inspect.Signature, arguments: Sequence[Any]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
