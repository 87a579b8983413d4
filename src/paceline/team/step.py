"""`with team.step():`, the block of one step."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from paceline.errors import UsageError
from paceline.parameters.loss_reader import SUM
from paceline.team.training import Training


class Step:
    """`with team.step():`. It is made once, since it may be entered thousands of times a second."""

    __slots__ = ("_accumulating", "_training", "cancelled")

    def __init__(self, training: Training, accumulating: bool) -> None:
        self._training, self._accumulating = training, accumulating
        self.cancelled = False
        """True if the step was cancelled, so that the rest of its block did not run."""

    def __enter__(self) -> Self:
        trainer = self._training.trainer
        self.cancelled = False
        self._training.accumulations += self._accumulating
        if trainer is None:
            return self
        if self._accumulating:
            trainer.accumulate(True)
        if trainer.cancels:
            trainer.enter_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        trainer = self._training.trainer
        self._training.accumulations -= self._accumulating
        if trainer is None:
            return False
        if self._accumulating:
            trainer.accumulate(self._training.accumulations > 0)
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
