"""Calls of a process group's methods as c10d makes them: by keyword, and for tensors of any device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.errors import InvalidCall

Method = TypeVar("Method", bound=Callable[..., Any])

_KEYWORDS: dict[str, tuple[str, ...]] = {
    "dstRank": ("peer",),
    "input": ("source", "inputs"),
    "inputTensor": ("source",),
    "input_list": ("inputs",),
    "input_split_sizes": ("input_splits",),
    "input_tensor": ("inputs",),
    "input_tensors": ("inputs",),
    "op": ("op", "opts"),
    "output": ("output", "outputs"),
    "outputTensor": ("output",),
    "output_lists": ("outputs",),
    "output_split_sizes": ("output_splits",),
    "output_tensor": ("outputs",),
    "output_tensors": ("outputs",),
    "root": ("opts",),
    "srcRank": ("peer",),
    "tensor": ("tensors",),
    "timeout": ("timeout", "opts"),
}
"""Keywords of torch's own process groups, which differ between forms of one method, and the parameters here."""


def c10d_call(method: Method) -> Method:
    """A method of a process group that passes tensors of other devices to the group for that device."""
    name = method.__name__.removeprefix("_")
    parameters = set(inspect.signature(method).parameters)
    keywords = {
        keyword: next(one for one in known if one in parameters)
        for keyword, known in _KEYWORDS.items()
        if not parameters.isdisjoint(known)
    }

    @keep_out_of_graphs
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        tensor = _first(arguments) if arguments else _first(list(options.values()))
        if tensor is None:
            raise InvalidCall(f"{name} requires a non-empty tensor list")
        if not tensor.is_cpu:
            return getattr(self.elsewhere(tensor.device.type), name)(*arguments, **options)
        if options:
            options = {keywords.get(keyword, keyword): value for keyword, value in options.items()}
        return method(self, *arguments, **options)

    return cast(Method, call)


def _first(arguments: Sequence[Any]) -> torch.Tensor | None:
    """The first tensor among arguments and lists of arguments."""
    for argument in arguments:
        found = argument if isinstance(argument, torch.Tensor) else None
        if isinstance(argument, list | tuple):
            found = _first(argument)
        if found is not None:
            return found
    return None
