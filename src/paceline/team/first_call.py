"""Waits for the first call of a model, which shows its inputs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.config.example_inputs import ExampleInputs


class FirstCall:
    """Calls a function with the inputs of a model's first call, then the model as that has left it.

    It takes the place of the model's `forward`: a hook would come too late to put another one there.
    """

    def __init__(self, model: torch.nn.Module, called: Callable[[ExampleInputs], None]) -> None:
        self._model, self._called = model, called
        self._plain: Any = vars(model).get("forward")
        self.__signature__ = inspect.signature(model.forward)  # frameworks look there for the names of its arguments
        model.forward = self

    @keep_out_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.cancel()
        with torch.inference_mode(False), torch.enable_grad():
            self._called(ExampleInputs(args, kwargs, "the inputs of its first call"))
        return self._model.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._model)]  # which is a plain model
        return types.MethodType(type(copied).forward, copied) if self._plain is None else self._plain

    def cancel(self) -> None:
        """Gives the model its own `forward` back."""
        if vars(self._model).get("forward") is self:
            del self._model.forward
            if self._plain is not None:
                self._model.forward = self._plain
