"""What a model keeps besides parameters and buffers: numbers, words and tensors that its forward pass may look at.

A trace has them as they were. So a model is traced anew where one is another, and what a forward pass itself changes is
changed again whenever its trace is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_EVERY_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (int, float, bool, str, type(None))


class _This:
    """A tensor as it is now; equal to itself alone, as long as nobody changes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and other._tensor is self._tensor and other._version == self._version

    def __hash__(self) -> int:
        return id(self._tensor)


def _worth(value: Any) -> Any:
    """What can be compared and kept; None where nothing can."""
    kind = type(value)
    if kind in _PLAIN:
        return (value,)
    if kind in (tuple, list):
        inner = [_worth(one) for one in value]
        return None if None in inner else (kind.__name__, *inner)
    return (_This(value),) if kind is torch.Tensor else None


def module_attributes(model: nn.Module) -> tuple[Any, ...]:
    """All of them; equal for a model whose forward pass reads the same."""
    return tuple(
        (name, worth)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _EVERY_MODULES and (worth := _worth(value)) is not None
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What is done meanwhile changes neither the model's buffers nor which random numbers come next."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


class ModuleAttributes:
    """The attributes of a model's modules as they are now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, {name: value for name, value in vars(module).items() if name not in _EVERY_MODULES})
            for module in model.modules()
        ]

    def changes(self) -> list[tuple[nn.Module, str, Any]]:
        """What numbers and words have become others since."""
        return [
            (module, name, value)
            for module, before in self._before
            for name, value in vars(module).items()
            if type(value) in _PLAIN and name not in _EVERY_MODULES and value != before.get(name, _MISSING)
        ]

    def restore(self) -> None:
        for module, before in self._before:
            for name in [name for name in vars(module) if name not in _EVERY_MODULES and name not in before]:
                del vars(module)[name]
            vars(module).update(before)


_MISSING = object()
