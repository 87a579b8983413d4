"""`with team.step():`, the block of one step."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from paceline.errors import UsageError
from paceline.parameters.gradient_weight import SUM

if TYPE_CHECKING:
    from paceline.team.team import Team


class Step:
    """`with team.step():`. It is made once, since it may be entered thousands of times a second."""

    __slots__ = ("_accumulating", "_team", "cancelled")

    def __init__(self, team: Team, accumulating: bool) -> None:
        self._team, self._accumulating = team, accumulating
        self.cancelled = False
        """True if the step was cancelled, so that the rest of its block did not run."""

    def __enter__(self) -> Self:
        trainer = self._team._trainer
        self.cancelled = False
        if trainer is None:
            return self
        if self._accumulating:
            self._team._accumulations += 1
            trainer.accumulate(True)
        if trainer.cancels:
            trainer.enter_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        trainer = self._team._trainer
        if trainer is None:
            return False
        if self._accumulating:
            self._team._accumulations -= 1
            trainer.accumulate(self._team._accumulations > 0)
        self.cancelled = trainer.cancels and trainer.leave_step(error)
        return self.cancelled


def item_count(weight: float | torch.Tensor | str) -> float:
    """Checks the weight of a step."""
    if weight == "sum":
        return SUM
    value = float(weight)
    if not 0 <= value < float("inf"):
        raise UsageError(f"the weight of a step is {value}; it must be a number of items, 0 or more, or 'sum'")
    return value
