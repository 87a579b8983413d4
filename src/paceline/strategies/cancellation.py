"""Cancelling a step in its middle, as if it had not begun."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from paceline.strategies.model_copies import copy_without


class StepCancelledError(BaseException):
    """Unwinds the user's code up to `with team.step():`, past handlers of ordinary exceptions."""


class CancelHooks:
    """Calls a check before each module's forward pass and after each gradient of the backward pass."""

    def __init__(self, model: torch.nn.Module, look: Callable[[], None]) -> None:
        def before(_module: torch.nn.Module, _arguments: Any) -> None:
            look()

        def made(_parameter: torch.Tensor) -> None:
            look()

        modules = {module: module.register_forward_pre_hook(before) for module in model.modules()}
        self._undo = copy_without({module: hook.id for module, hook in modules.items()})
        self._hooks: list[Any] = [*modules.values()]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(made)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        self._undo()
        for hook in self._hooks:
            hook.remove()


def release_scaler(error: BaseException, optimizer: torch.optim.Optimizer) -> None:
    """Resets a `GradScaler` that was in the middle of a cancelled step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            caller._per_optimizer_states.pop(id(optimizer), None)
