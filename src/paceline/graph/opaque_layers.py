"""Layers that a trace does not look into: each call of one is one operation.

While a model with such layers is traced, each is replaced by an operator of our own, which only infers the shapes and
dtypes of its results. The trace then calls the layer itself.
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
"""By number: the operator takes only tensors and numbers as arguments."""


class LayerCall:
    """One call of an opaque layer, as a function of tensors."""

    def __init__(self, path: str, layer: nn.Module, meta: nn.Module, leaves: list[Any], spec: Any) -> None:
        self.path, self.layer = path, layer
        self.__name__ = type(layer).__name__
        self.random = layer.training and bool(getattr(layer, "dropout", 0.0))
        self.empty: list[bool] = []
        """For each leaf of its result, True if it is not a tensor."""
        self.returned: pytree.TreeSpec | None = None
        self._meta, self._spec = meta, spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = self._arguments(inputs)
        # Not the layer itself: the trace already has the effects of its hooks.
        return self._tensors(self.layer.forward(*args, **kwargs))

    def infer(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results without values."""
        args, kwargs = self._arguments(inputs)
        named = [*self._meta.named_parameters(), *self._meta.named_buffers()]
        weights = {name: inputs[0].new_empty(one.shape, dtype=one.dtype) for name, one in named}
        result = torch.func.functional_call(self._meta, weights, args, kwargs)
        leaves, self.returned = pytree.tree_flatten(result)
        self.empty = [not isinstance(leaf, torch.Tensor) for leaf in leaves]
        return self._tensors(result)

    def parameters(self) -> list[str]:
        """Their names in the model."""
        return [f"{self.path}.{name}" for name, _ in self.layer.named_parameters()]

    def buffers(self) -> list[str]:
        """Their names in the model."""
        return [f"{self.path}.{name}" for name, _ in self.layer.named_buffers()]

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
    """Some layers of a model; created before they are sharded."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {path: (layer, _meta_copy(layer)) for path, layer in layers.items()}
        self._made: list[LayerCall] = []

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Replaces the layers, so that the model can be traced or run without values, until the context exits."""
        _operator()
        before: dict[str, Any] = {path: vars(layer).get("forward") for path, (layer, _) in self._layers.items()}
        for path, (layer, meta) in self._layers.items():
            layer.forward = self._forward(path, layer, meta)
        try:
            yield
        finally:
            for path, (layer, _) in self._layers.items():
                vars(layer).pop("forward")
                if before[path] is not None:
                    layer.forward = before[path]
            self._made.clear()

    def _forward(self, path: str, layer: nn.Module, meta: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            call, number = LayerCall(path, layer, meta, leaves, spec), next(_numbers)
            _calls[number] = call
            self._made.append(call)
            inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            results = iter(torch.ops.paceline.layer(inputs, number))
            assert call.returned is not None
            return pytree.tree_unflatten([None if empty else next(results) for empty in call.empty], call.returned)

        return forward


def layer_call(target: Any, number: Any) -> LayerCall | None:
    """The layer's call that an operation of a new trace replaces; None for other operations."""
    return _calls[number] if str(target) == "paceline.layer.default" else None


@functools.cache
def _operator() -> torch.library.Library:
    library = torch.library.Library("paceline", "FRAGMENT")
    library.define("layer(Tensor[] inputs, int number) -> Tensor[]")
    torch.library.register_fake(_OPERATOR, lambda inputs, number: _calls[number].infer(inputs), lib=library)
    return library


def _meta_copy(layer: nn.Module) -> nn.Module:
    """A copy of the layer on the meta device, without its hooks."""
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
    inside["_modules"] = {name: None if one is None else _meta_copy(one) for name, one in layer._modules.items()}
    # In evaluation attention takes a fast path; in training norms check the number of samples.
    inside["training"] = isinstance(layer, nn.MultiheadAttention)
    return twin
