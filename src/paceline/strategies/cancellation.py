"""Leaving a step in its middle, as if it had not begun."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch


class StepCancelledError(BaseException):
    """Leaves the user's code up to `with team.step():`, past whatever would catch an ordinary exception."""


class CancelHooks:
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


def release_scaler(error: BaseException, optimizer: torch.optim.Optimizer) -> None:
    """If a `GradScaler` was in the middle of a step that is left, let it begin the next one as ever."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            caller._per_optimizer_states.pop(id(optimizer), None)
