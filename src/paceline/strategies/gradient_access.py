"""Notices when a script looks at gradients between the backward pass and the step.

Until the step, `.grad` holds this worker's own gradient. Most scripts never look at it. One that does (to clip it, to
log its norm, to change it) means the gradient of the whole batch. So the first read after a backward pass asks the
trainer to put the team's gradient there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import utils
from torch.nn.parameter import Parameter

from paceline.parameters.gradients import GRAD

_watching: GradientAccess | None = None


def _get(parameter: Parameter) -> torch.Tensor | None:
    if _watching is not None and _watching.armed and id(parameter) in _watching.watched:
        _watching.armed = False
        _watching.expose()
    gradient: torch.Tensor | None = GRAD.__get__(parameter)
    if gradient is not None and _watching is not None and id(parameter) in _watching.others:
        _watching.expose_other()
    return gradient


class GradientAccess:
    """Calls `expose` before the script reads a gradient for the first time after `armed` was set, until `undo`.

    `torch.nn.utils.clip_grad_norm_` of all parameters calls `clip` instead, which need not give everybody the gradient.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        expose: Callable[[], None],
        expose_other: Callable[[], None],
        clip: Callable[[float, float], torch.Tensor],
    ) -> None:
        global _watching
        """others: parameters that the team does not train; `expose_other` is called before one of theirs is read."""
        self.watched = {id(parameter) for parameter in parameters}
        self.others = {id(parameter) for parameter in others}
        self.expose, self.expose_other = expose, expose_other
        self.armed = False
        self._clip, self._plain = clip, utils.clip_grad_norm_
        Parameter.grad = property(_get, GRAD.__set__, GRAD.__delete__)  # type: ignore[assignment]
        utils.clip_grad_norm_ = self._clip_grad_norm_
        _watching = self

    def _clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **more: Any
    ) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.armed and not args and not more and self._is_all(given):
            return self._clip(float(max_norm), float(norm_type))
        return self._plain(given, max_norm, norm_type, *args, **more)

    def _is_all(self, given: list[torch.Tensor]) -> bool:
        """True if these are all parameters that have gradients."""
        found = {id(parameter) for parameter in given}
        return found >= self.watched and not any(
            id(parameter) in self.others and GRAD.__get__(parameter) is not None for parameter in given
        )

    def undo(self) -> None:
        global _watching
        if _watching is self:
            _watching = None
            del Parameter.grad
            utils.clip_grad_norm_ = self._plain
