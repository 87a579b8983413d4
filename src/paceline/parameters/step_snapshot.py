"""Saves and restores the state that a step changes besides gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


class StepSnapshot:
    """The state that a step changes besides gradients: the model's buffers and random number generators."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [module for module in model.modules() if module._buffers]
        self._places: list[tuple[torch.nn.Module, str, torch.Tensor | None]] = []
        self._buffers: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._random: list[tuple[Callable[[Any], Any], Any]] = []

    def take(self) -> None:
        # Found anew each time: a module may put another tensor where its buffer was (`self.mean = 0.9 * self.mean`).
        self._places = [(module, *place) for module in self._modules for place in module._buffers.items()]
        self._buffers = [buffer for *_, buffer in self._places if buffer is not None and buffer.numel()]
        if [(kept.shape, kept.dtype) for kept in self._kept] != [(now.shape, now.dtype) for now in self._buffers]:
            self._kept = [buffer.detach().clone() for buffer in self._buffers]
        elif self._kept:
            torch._foreach_copy_(self._kept, self._buffers)
        self._random = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
        if "numpy" in sys.modules:
            import numpy

            self._random.append((numpy.random.set_state, numpy.random.get_state()))
        if torch.accelerator.is_available():
            device = torch.get_device_module()
            self._random.append((device.set_rng_state, device.get_rng_state()))

    def restore(self) -> None:
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
        with torch.no_grad():
            if self._kept:
                torch._foreach_copy_(self._buffers, self._kept)
        for restore, state in self._random:
            restore(state)
