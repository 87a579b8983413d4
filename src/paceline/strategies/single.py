"""A team of one: the user's own loop, with the same events, rate scaling and accumulation as in a team."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import one_of
from paceline.events import Update
from paceline.parameters.hyperparameters import RateScaling
from paceline.strategies.base import Trainer
from paceline.strategies.context import Options, TrainerContext


class SingleTrainer(Trainer):
    """Trains a model with its own optimizer, under any strategy that has one worker."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        self._rate = RateScaling(options.scale_lr, 1, options.warmup, options.batch)
        super().__init__(model, optimizer, context, replicas=1)
        self._patch_optimizer(state=False, amp=False)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        arguments = () if closure is None else (closure,)
        if closure is None:
            self.paces = [self._stopwatch.stop(self.version)]
        start = time.perf_counter()
        with self._patch.scaled_rates(self._rate.factor(self.version)):
            loss = self._patch.plain_step(*arguments)
        if closure is not None:
            self.paces = [self._stopwatch.stop(self.version)]
            start = time.perf_counter()
        end = time.perf_counter()
        self.version += 1
        self._recorder.add(Update(0, start, end - start, self.version))
        self.on_update()
        self._stopwatch.restart(end)
        return loss

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit, norm_type=norm)
