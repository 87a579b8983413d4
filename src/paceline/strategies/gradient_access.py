"""Notices when a script looks at gradients between the backward pass and the step.

Until the step, `.grad` holds this worker's own gradient. Most scripts never look at it. One that does (to clip it, to
log its norm, to change it) means the gradient of the whole batch. So the first read after a backward pass asks the
trainer to put the team's gradient there.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import utils
from torch.nn.parameter import Parameter

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.parameters.gradients import GRAD

_watching: GradientAccess | None = None
_QUIET = ("zero_grad", "_apply")
"""Methods of modules that find out whether there are gradients, and do not look at them: `_apply` is `to`, `cpu`, ….
"""


def _get(parameter: Parameter) -> torch.Tensor | None:
    if _watching is not None and _watching.armed:
        number = _watching.watched.get(id(parameter))
        if number in _watching.armed:
            _watching.armed -= {number}
            _watching.expose(number)
    gradient: torch.Tensor | None = GRAD.__get__(parameter)
    if gradient is not None and _watching is not None:
        if id(parameter) in _watching.others:
            _watching.expose_other()
        elif _watching.inside and id(parameter) in _watching.watched and not _is_ours(sys._getframe(1)):
            _watching.say_hooked()
    return gradient


def hook_sees(gradient: str) -> str:
    """What is said of a hook of the script on a parameter's gradient that is given another one than the team's."""
    return (
        f"a hook of the script on a parameter's gradient is given {gradient}; factors are the same, but clamp, sign or "
        "clip .grad after backward() instead"
    )


def _is_ours(caller: types.FrameType) -> bool:
    """True if it is a part of a backward pass of ours that reads a gradient, not a hook of the script."""
    return bool(caller.f_globals.get("__name__", "").startswith("paceline."))


class GradientAccess:
    """Calls `expose` before the script reads a gradient for the first time after `arm`, until `undo`.

    `torch.nn.utils.clip_grad_norm_` of all parameters of an optimizer calls `clip` instead, which need not give
    everybody the gradient.
    """

    def __init__(
        self,
        parameters: Sequence[Iterable[torch.Tensor]],
        others: Iterable[torch.Tensor],
        expose: Callable[[int], None],
        expose_other: Callable[[], None],
        expose_to_hook: Callable[[], None],
        clip: Callable[[int, float, float], torch.Tensor],
    ) -> None:
        global _watching
        """parameters: of each optimizer; `expose` and `clip` get its number.

        others: parameters that the team does not train; `expose_other` is called before one of theirs is read.
        expose_to_hook: called once, if the script has hooks that are given gradients during a backward pass.
        """
        self.watched = {id(parameter): number for number, part in enumerate(parameters) for parameter in part}
        self.others = {id(parameter) for parameter in others}
        self.expose, self.expose_other = expose, expose_other
        self._every = frozenset(range(len(parameters)))
        self.armed: frozenset[int] = frozenset()
        """Numbers of the optimizers whose gradients have not been looked at."""
        self._expose_to_hook: Callable[[], None] | None = expose_to_hook
        self.inside = False
        """True during a backward pass, if no hook has been noticed."""
        self._parameters = [parameter for part in parameters for parameter in part]
        self._clip, self._torch_clip = clip, _cell(utils.clip_grad_norm_)
        self._plain = self._torch_clip.cell_contents
        self._plain_methods = {name: getattr(torch.nn.Module, name) for name in _QUIET}
        for name, method in self._plain_methods.items():
            setattr(torch.nn.Module, name, _quietly(method))
        Parameter.grad = property(_get, GRAD.__set__, GRAD.__delete__)  # type: ignore[assignment]
        self._torch_clip.cell_contents = self._clip_grad_norm_
        _watching = self

    def arm(self) -> None:
        self.armed, self.inside = self._every, False

    def disarm(self) -> None:
        self.armed, self.inside = frozenset(), False

    def enter_backward(self) -> None:
        """Looks for hooks of the script on parameters' gradients, until there is one."""
        if self._expose_to_hook is not None:
            self.inside = True
            if any(parameter._backward_hooks for parameter in self._parameters):
                self.say_hooked()

    def say_hooked(self) -> None:
        told, self._expose_to_hook, self.inside = self._expose_to_hook, None, False
        if told is not None:
            told()

    @keep_out_of_graphs
    def _clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        number = self._clipped(given)
        if number not in self.armed:
            return self._plain(given, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = self._clip(number, float(max_norm), float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return norm

    def _clipped(self, given: list[torch.Tensor]) -> int | None:
        """The number of the optimizer of which these are all parameters that have gradients."""
        found = {id(parameter) for parameter in given}
        numbers = {self.watched[one] for one in found if one in self.watched}
        foreign = any(id(parameter) in self.others and GRAD.__get__(parameter) is not None for parameter in given)
        if len(numbers) != 1 or foreign:
            return None
        number = numbers.pop()
        return number if all(one in found for one, part in self.watched.items() if part == number) else None

    def undo(self) -> None:
        global _watching
        if _watching is self:
            _watching = None
            del Parameter.grad
            self._torch_clip.cell_contents = self._plain
            for name, method in self._plain_methods.items():
                setattr(torch.nn.Module, name, method)


def _cell(wrapper: Any) -> Any:
    """The closure cell of what a function of torch calls: scripts have imported the function itself by its name."""
    return dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))["func"]


def _quietly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of modules that reads `.grad`, but means nothing by it."""

    @functools.wraps(method)
    def quiet(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        watching = _watching
        if watching is None:
            return method(module, *args, **kwargs)
        armed, others = watching.armed, watching.others
        watching.disarm()
        watching.others = set()
        try:
            return method(module, *args, **kwargs)
        finally:
            watching.armed, watching.others = armed, others

    return quiet
