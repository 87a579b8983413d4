"""A team of one: the user's own loop as it is, with the same events, rate scaling and accumulation as in a team."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import one_of
from paceline.events import Update
from paceline.parameters.hyperparameters import RateScaling
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.optimizer_patch import OptimizerPatch


class SingleTrainer(Trainer):
    """What every strategy comes down to when there is nobody to train with."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        self._model, self._optimizer = model, optimizer
        self._recorder, self._stopwatch = context.recorder, context.stopwatch
        # Only to refuse what a larger team would: one worker scales its rate by 1.
        RateScaling(options.scale_lr, 1, options.warmup)
        self._accumulating = False
        self.version = 0
        self.paces = [(0.0, 0)]
        self._patch = OptimizerPatch(optimizer)
        self._patch.replace("step", self.step)
        self._patch.replace("zero_grad", self._zero_grad)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._accumulating:
            return None
        arguments = () if closure is None else (closure,)
        if closure is None:
            self.paces = [self._stopwatch.stop(self.version)]
        start = time.perf_counter()
        loss = self._patch.plain_step(*arguments)
        if closure is not None:
            self.paces = [self._stopwatch.stop(self.version)]
            start = time.perf_counter()
        end = time.perf_counter()
        self.version += 1
        self._recorder.add(Update(0, start, end - start, self.version))
        self.updated()
        self._stopwatch.restart(end)
        return loss

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit, norm_type=norm)

    def take_batch(self, samples: int, weight: float) -> None:
        self._stopwatch.start(samples)

    def finish_epoch(self) -> None:
        pass

    def accumulate(self, on: bool) -> None:
        self._accumulating = on

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)

    def close(self) -> None:
        self._patch.undo()
