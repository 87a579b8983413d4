"""Replaces methods of the user's optimizer.

The object stays the same, so that schedulers, scalers and references made before or after still hold the right one.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.errors import FORK, UsageError
from paceline.parameters.layout import Layout

_AMP = "_step_supports_amp_scaling"
"""The attribute by which GradScaler knows an optimizer whose `step` unscales gradients itself."""


def own_state(optimizer: Optimizer) -> None:
    """Copies the optimizer's state from shared memory to memory of its own."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value


def own_parameters(layout: Layout) -> None:
    """Copies the parameters from shared memory to memory of their own."""
    for slot in layout.slots:
        slot.parameter.data = slot.parameter.data.clone(memory_format=torch.preserve_format)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure as torch's optimizers evaluate it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_fork(*_args: Any, **_kwargs: Any) -> Any:
    """A step in a process that was forked from a worker."""
    raise UsageError(FORK)


class OptimizerPatch:
    """The user's optimizer with some of its methods replaced, until `undo`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._had = {name: value for name, value in vars(optimizer).items() if callable(value)}
        self.plain_step: Callable[..., Any] = types.MethodType(type(optimizer).step, optimizer)
        """The optimizer's own step."""
        self._replaced: set[str] = set()
        self._had_amp = vars(optimizer).get(_AMP)
        self._hooks: dict[str, dict[int, Callable[..., Any]]] = {
            "pre": optimizer._optimizer_step_pre_hooks,
            "post": optimizer._optimizer_step_post_hooks,
        }

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        @keep_out_of_graphs
        def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if name == "step":
                self._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check it
            return function(*args, **kwargs)

        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        setattr(self.optimizer, name, types.MethodType(method, self.optimizer))
        self._replaced.add(name)

    def undo(self) -> None:
        for name in self._replaced:
            vars(self.optimizer).pop(name, None)
            if name in self._had:
                setattr(self.optimizer, name, self._had[name])
        self._replaced.clear()
        vars(self.optimizer).pop(_AMP, None)
        if self._had_amp is not None:
            setattr(self.optimizer, _AMP, self._had_amp)

    def support_amp_scaling(self) -> None:
        """Make GradScaler leave unscaling and skipping to `step`, where the workers agree on it."""
        setattr(self.optimizer, _AMP, True)

    def amp_scaling(self) -> tuple[float, bool]:
        """The factor that undoes GradScaler's scale, and True if it has found a gradient that is not finite.

        GradScaler sets both attributes for the time of a step.
        """
        scale = getattr(self.optimizer, "grad_scale", None)
        found_inf = bool(getattr(self.optimizer, "found_inf", False))
        return 1.0 if scale is None else 1.0 / float(scale), found_inf

    @contextlib.contextmanager
    def values(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Gives the optimizer's groups these values until the context exits."""
        own = self.optimizer.param_groups
        before = [{key: group.get(key) for key in values} for group, values in zip(own, groups, strict=True)]
        for group, values in zip(own, groups, strict=True):
            group.update(values)
        try:
            yield
        finally:
            for group, values in zip(own, before, strict=True):
                group.update(values)

    def scaled_rates(self, factor: float) -> contextlib.AbstractContextManager[None]:
        """Multiplies the learning rates of the optimizer's groups until the context exits."""
        if factor == 1.0:
            return contextlib.nullcontext()
        groups = self.optimizer.param_groups
        return self.values([{"lr": group["lr"] * factor} if "lr" in group else {} for group in groups])

    def run_hooks(self, kind: str) -> None:
        """Runs the user's hooks of a step; kind: "pre" or "post"."""
        if self._hooks[kind]:
            for hook in list(self._hooks[kind].values()):
                hook(self.optimizer, (), {})


def load_optimizers(patches: Sequence[OptimizerPatch], state: Any) -> None:
    """Load the state of a checkpoint into the optimizers of a team: a state dict, or a list of one for each."""
    several = len(patches) > 1
    if several != isinstance(state, list) or (several and len(state) != len(patches)):
        count = len(state) if isinstance(state, list) else 1
        raise UsageError(f"the checkpoint has the state of {count} optimizers, and the team {len(patches)}")
    for patch, values in zip(patches, state if several else [state], strict=True):
        patch.optimizer.load_state_dict(values)


class OneCycleClamp:
    """Keeps the last learning rate of a `OneCycleLR` schedule after its last step, until `undo`.

    Where samples are leased, a fast worker takes more steps than `len(loader)`. `OneCycleLR` is the only scheduler of
    torch that raises an error after its last step.
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
