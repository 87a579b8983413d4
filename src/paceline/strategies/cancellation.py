"""Cancelling a step in its middle, as if it had not begun."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from paceline.strategies.explained_errors import explain_errors
from paceline.strategies.model_copies import copy_without


class StepCancelledError(BaseException):
    """Unwinds the user's code up to `with team.step():`, past handlers of ordinary exceptions."""


class CancelHooks:
    """Calls a check before each module's forward pass and after each gradient of the backward pass."""

    def __init__(self, model: torch.nn.Module, look: Callable[[], None]) -> None:
        def before(_module: torch.nn.Module, _arguments: Any) -> None:
            if not torch.compiler.is_compiling():  # a graph is not left in its middle
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


def explain_missing_names() -> None:
    """From the first cancelled step on, a NameError that ends the script says what may have caused it."""
    explain_errors(
        lambda error: isinstance(error, NameError),
        "a step of this worker was cancelled, so the rest of its block did not run; move the lines that use its "
        "results, such as the loss, into `with team.step():`, or write `with team.step() as step:` and "
        "`if step.cancelled: continue` after it",
    )


def release_scaler(error: BaseException, optimizer: torch.optim.Optimizer) -> None:
    """Resets a `GradScaler` that was in the middle of a cancelled step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            caller._per_optimizer_states.pop(id(optimizer), None)
