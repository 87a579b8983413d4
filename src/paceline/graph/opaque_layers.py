"""Layers that a trace takes as they are: each call of one is one operation, whatever happens inside.

While a model with such layers is traced, an operator of our own stands in the place of each: all that is known of it is
what its results are like. In the trace it is the layer itself again, which is called with the tensors that were given.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_OPERATOR = "paceline::layer"
_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, LayerCall] = weakref.WeakValueDictionary()
"""By the numbers that the operator is given, as it takes nothing but tensors and numbers."""


class LayerCall:
    """One call of a sealed layer, as a function of tensors."""

    def __init__(self, path: str, layer: nn.Module, outline: nn.Module, leaves: list[Any], spec: Any) -> None:
        self.path, self.layer = path, layer
        self.__name__ = type(layer).__name__
        self.random = layer.training and bool(getattr(layer, "dropout", 0.0))
        self.empty: list[bool] = []
        """Which of what it returns is no tensor."""
        self.returned: pytree.TreeSpec | None = None
        self._outline, self._spec = outline, spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = self._arguments(inputs)
        # Not the layer: what hooks around it do is in the trace already.
        return self._tensors(self.layer.forward(*args, **kwargs))

    def outline(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same as far as it can be known without values."""
        args, kwargs = self._arguments(inputs)
        named = [*self._outline.named_parameters(), *self._outline.named_buffers()]
        weights = {name: inputs[0].new_empty(one.shape, dtype=one.dtype) for name, one in named}
        result = torch.func.functional_call(self._outline, weights, args, kwargs)
        leaves, self.returned = pytree.tree_flatten(result)
        self.empty = [not isinstance(leaf, torch.Tensor) for leaf in leaves]
        return self._tensors(result)

    def parameters(self) -> list[str]:
        """Their names in the model."""
        return [f"{self.path}.{name}" for name, _ in self.layer.named_parameters()]

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    @staticmethod
    def _tensors(result: Any) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class OpaqueLayers:
    """Some layers of a model; to be made while they are still whole."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {path: (layer, _outlined(layer)) for path, layer in layers.items()}
        self._made: list[LayerCall] = []

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """While in there, the model can be traced, or run without values; nothing is computed by these layers."""
        _operator()
        before: dict[str, Any] = {path: vars(layer).get("forward") for path, (layer, _) in self._layers.items()}
        for path, (layer, outline) in self._layers.items():
            layer.forward = self._forward(path, layer, outline)
        try:
            yield
        finally:
            for path, (layer, _) in self._layers.items():
                vars(layer).pop("forward")
                if before[path] is not None:
                    layer.forward = before[path]
            self._made.clear()

    def _forward(self, path: str, layer: nn.Module, outline: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            call, number = LayerCall(path, layer, outline, leaves, spec), next(_numbers)
            _calls[number] = call
            self._made.append(call)
            inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            made = iter(torch.ops.paceline.layer(inputs, number))
            assert call.returned is not None
            return pytree.tree_unflatten([None if empty else next(made) for empty in call.empty], call.returned)

        return forward


def called(target: Any, number: Any) -> LayerCall | None:
    """The call that an operation of a fresh trace stands for, if it is one."""
    return _calls[number] if str(target) == "paceline.layer.default" else None


@functools.cache
def _operator() -> torch.library.Library:
    library = torch.library.Library("paceline", "FRAGMENT")
    library.define("layer(Tensor[] inputs, int number) -> Tensor[]")
    torch.library.register_fake(_OPERATOR, lambda inputs, number: _calls[number].outline(inputs), lib=library)
    return library


def _outlined(layer: nn.Module) -> nn.Module:
    """The layer as it is now, without values and without what is hooked on it."""
    twin = copy.copy(layer)
    inside: Any = vars(twin)
    inside.pop("forward", None)
    for name, own in list(inside.items()):
        if name.endswith("_hooks"):
            inside[name] = type(own)()
    inside["_parameters"] = {
        name: None if one is None else nn.Parameter(one.detach().to("meta"), requires_grad=False)
        for name, one in layer._parameters.items()
    }
    inside["_buffers"] = {name: None if one is None else one.to("meta") for name, one in layer._buffers.items()}
    inside["_modules"] = {name: None if one is None else _outlined(one) for name, one in layer._modules.items()}
    # Attention would take a short cut, norms would count the samples that there are not.
    inside["training"] = isinstance(layer, nn.MultiheadAttention)
    return twin
