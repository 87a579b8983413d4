"""Puts a team behind the user's own optimizer object.

The object stays the same, so that schedulers, scalers and references made before or after still hold the right one;
only what its methods do changes.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from paceline.parameters.layout import Layout


def zero_grad(optimizer: Optimizer, layout: Layout, set_to_none: bool) -> None:
    """As the optimizer's own, for the parameters of a layout."""
    if set_to_none:
        for slot in layout.slots:
            slot.parameter.grad = None
    else:
        type(optimizer).zero_grad(optimizer, set_to_none=False)


def own_state(optimizer: Optimizer) -> None:
    """Let the optimizer's state be in memory of its own, not in shared memory."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value


def own_parameters(layout: Layout) -> None:
    """Let the parameters be in memory of their own, not in shared memory."""
    for slot in layout.slots:
        slot.parameter.data = slot.parameter.data.clone(memory_format=torch.preserve_format)


class OptimizerPatch:
    """The user's optimizer with some of its methods replaced, until `undo`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._had = {name: value for name, value in vars(optimizer).items() if callable(value)}
        self.plain_step: Callable[..., Any] = types.MethodType(type(optimizer).step, optimizer)
        """The optimizer's own step."""
        self._replaced: set[str] = set()
        self._hooks: dict[str, dict[int, Callable[..., Any]]] = {
            "pre": optimizer._optimizer_step_pre_hooks,
            "post": optimizer._optimizer_step_post_hooks,
        }

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if name == "step":
                self._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
            return function(*args, **kwargs)

        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        setattr(self._optimizer, name, types.MethodType(method, self._optimizer))
        self._replaced.add(name)

    def undo(self) -> None:
        for name in self._replaced:
            vars(self._optimizer).pop(name, None)
            if name in self._had:
                setattr(self._optimizer, name, self._had[name])
        self._replaced.clear()

    @contextlib.contextmanager
    def values(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Let the optimizer's groups have these values for a while."""
        own = self._optimizer.param_groups
        before = [{key: group.get(key) for key in values} for group, values in zip(own, groups, strict=True)]
        for group, values in zip(own, groups, strict=True):
            group.update(values)
        try:
            yield
        finally:
            for group, values in zip(own, before, strict=True):
                group.update(values)

    def run_hooks(self, kind: str) -> None:
        """The user's own hooks around a step."""
        if self._hooks[kind]:
            for hook in list(self._hooks[kind].values()):
                hook(self._optimizer, (), {})


class OneCycleClamp:
    """Lets a worker keep the last rate of a schedule that it has outrun, until `undo`.

    Where samples go to whoever needs some, a fast worker takes more steps than `len(loader)` says. `OneCycleLR` refuses
    to go on after its last step, and is the only one of torch's schedulers that does.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._plain = plain = OneCycleLR.get_lr

        def get_lr(schedule: OneCycleLR) -> list[Any]:
            if schedule.optimizer is optimizer and schedule.last_epoch >= schedule.total_steps:
                return [group["lr"] for group in optimizer.param_groups]
            return plain(schedule)

        self._own = get_lr
        OneCycleLR.get_lr = get_lr  # type: ignore[method-assign,assignment]

    def undo(self) -> None:
        if OneCycleLR.get_lr is self._own:
            OneCycleLR.get_lr = self._plain  # type: ignore[method-assign]
