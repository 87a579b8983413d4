"""Attributes of a model's modules besides parameters and buffers: plain values that its forward pass may read.

A trace has them as constants. So a model is traced anew if one changes, and changes by a forward pass are repeated
whenever its trace is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_COMMON = frozenset(vars(nn.Module()))
_SCALARS = (int, float, bool, str, type(None))


class _TensorState:
    """A tensor and its version; equal to the same tensor as long as that is not changed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorState) and other._tensor is self._tensor and other._version == self._version

    def __hash__(self) -> int:
        return id(self._tensor)


def _comparable(value: Any) -> Any:
    """A hashable stand-in for a value; None for values of other types."""
    kind = type(value)
    if kind in _SCALARS:
        return (value,)
    if kind in (tuple, list):
        inner = [_comparable(one) for one in value]
        return None if None in inner else (kind.__name__, *inner)
    return (_TensorState(value),) if kind is torch.Tensor else None


def module_attributes(model: nn.Module) -> tuple[Any, ...]:
    """A key, equal if the forward pass reads equal attributes, of modules and of their `config`."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")}
    return tuple(
        (name, comparable)
        for owner in (*modules, *configs.values())
        for name, value in vars(owner).items()
        if name not in _COMMON and (comparable := _comparable(value)) is not None
    )


@contextlib.contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restores the model's buffers and torch's random state on exit."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


class ModuleAttributes:
    """A snapshot of the attributes of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, {name: value for name, value in vars(module).items() if name not in _COMMON})
            for module in model.modules()
        ]

    def changes(self) -> list[tuple[nn.Module, str, Any]]:
        """Scalars and strings that have changed since: module, name, value."""
        return [
            (module, name, value)
            for module, before in self._before
            for name, value in vars(module).items()
            if type(value) in _SCALARS and name not in _COMMON and value != before.get(name, _MISSING)
        ]

    def restore(self) -> None:
        for module, before in self._before:
            for name in [name for name in vars(module) if name not in _COMMON and name not in before]:
                del vars(module)[name]
            vars(module).update(before)


_MISSING = object()
