"""Dispatch of a process group's methods by the device of their tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def by_device(method: Method) -> Method:
    """A method that passes tensors of other devices to the backend of that device."""

    @keep_out_of_graphs
    @functools.wraps(method)
    def choose(self: Any, *arguments: Any, **options: Any) -> Any:
        tensor = _first(arguments)
        if tensor is None or tensor.is_cpu:
            return method(self, *arguments, **options)
        return getattr(self.elsewhere(tensor.device.type), method.__name__)(*arguments, **options)

    return cast(Method, choose)


def keep_out_of_graphs(function: Method) -> Method:
    """Makes torch.compile call a function without tracing it or its callees."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):  # an older torch does not have this
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    return function


def _first(arguments: Sequence[Any]) -> torch.Tensor | None:
    """The first tensor among arguments and lists of arguments."""
    for argument in arguments:
        found = argument if isinstance(argument, torch.Tensor) else None
        if isinstance(argument, list | tuple):
            found = _first(argument)
        if found is not None:
            return found
    return None
