"""Leaving a step in its middle, as if it had not begun."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch


class Cancelled(BaseException):
    """Leaves the user's code up to `with team.step():`, past whatever would catch an ordinary exception."""


class Boundaries:
    """Looks, wherever a module begins in forward and wherever a gradient is made in backward, whether to go on."""

    def __init__(self, model: torch.nn.Module, look: Callable[[], None]) -> None:
        def before(_module: torch.nn.Module, _arguments: Any) -> None:
            look()

        def made(_parameter: torch.Tensor) -> None:
            look()

        self._hooks: list[Any] = [module.register_forward_pre_hook(before) for module in model.modules()]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(made)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Snapshot:
    """What a step changes besides gradients: the model's buffers, and the random numbers that were drawn."""

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


def release_scaler(error: BaseException, optimizer: torch.optim.Optimizer) -> None:
    """If a `GradScaler` was in the middle of a step that is left, let it begin the next one as ever."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            caller._per_optimizer_states.pop(id(optimizer), None)
