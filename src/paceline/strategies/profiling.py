"""Ends a script at its first training call of the model, after writing the model's profile."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from paceline.pipeline.script_profile import write_profile
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.single import SingleTrainer


class ProfilingTrainer(SingleTrainer):
    """Replaces the model's `forward` by one that profiles it."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        super().__init__(model, optimizer, options, context)
        assert context.launch.profiling is not None
        self._profiling = context.launch.profiling
        self._own_forward: Any = vars(model).get("forward")
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self._model).pop("forward")
        if self._own_forward is not None:
            self._model.forward = self._own_forward
        if not torch.is_grad_enabled():
            result = self._model(*args, **kwargs)
            self._model.forward = self._forward
            return result
        write_profile(self._profiling, self._model, args, kwargs)
        raise SystemExit(0)
