"""An `nn.Sequential` as a chain of operations, one per child."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.graph.trace.operations import CHANGES_INPUT, ModelOperation, ModelPart, ModelTrace, Value, seed_operation


class ChainTrace(ModelTrace):
    """The layers of an `nn.Sequential`, with nested ones flattened."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self._layers = list(_flattened(model, ""))
        self.operations = [
            ModelOperation(
                name,
                (number - 1,),
                tuple(f"{name}.{own}" for own, _ in layer.named_parameters()),
                type(layer).__name__,
                tuple(f"{name}.{own}" for own, _ in layer.named_buffers()),
            )
            for number, (name, layer) in enumerate(self._layers)
        ]
        self.results = (len(self._layers) - 1,)
        self.mutates_buffers = may_mutate_buffers(model)
        self._not_one_tensor: set[int] = set()
        """Layers that have returned something else than one tensor."""
        if getattr(self._layers[0][1], "inplace", False):
            raise UsageError(CHANGES_INPUT.format(self._layers[0][0]))

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if len(args) != 1 or kwargs:
            raise UsageError(f"an nn.Sequential takes one input; it got {len(args) + len(kwargs)}")
        return [args[0]]

    def returned(self, values: Sequence[Value], inputs: Sequence[Any]) -> Any:
        return values[0]

    def part(self, first: int, last: int) -> ModelPart:
        layers = [layer for _, layer in self._layers[first:last]]
        random = [may_draw(layer) for layer in layers]

        def run(values: Sequence[Value]) -> list[Value]:
            (value,) = values
            for number, (layer, draws) in enumerate(zip(layers, random, strict=True), first):
                if draws:
                    seed_operation(number)
                value = layer(value)
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"layer '{self._layers[last - 1][0]}' of the nn.Sequential returns a {type(value).__name__}; "
                    "between stages of a pipeline it must be one tensor"
                )
            return [value]

        return ModelPart(*self.interface(first, last), run, tuple(nn.ModuleList(layers).parameters()), any(random))

    def changes_buffers(self, first: int, last: int) -> bool:
        inside = (module for _, layer in self._layers[first:last] for module in layer.modules())
        return any(module.training and any(True for _ in module.buffers(recurse=False)) for module in inside)

    def _inseparable(self, source: int, target: int) -> bool:
        return source in self._not_one_tensor or bool(getattr(self._layers[target][1], "inplace", False))

    def execute(self, number: int, values: dict[int, Value]) -> Value:
        value = self._layers[number][1](values[number - 1])
        if not isinstance(value, torch.Tensor):
            self._not_one_tensor.add(number)
        return value

    def execute_deterministic(self, number: int, values: dict[int, Value]) -> Value:
        with deterministic(self._layers[number][1]):
            return self.execute(number, values)


@contextlib.contextmanager
def deterministic(layer: nn.Module) -> Iterator[None]:
    """Puts a layer that may draw random numbers into evaluation mode until the context exits."""
    modes = [(inner, inner.training) for inner in layer.modules()]
    if may_draw(layer):
        layer.eval()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def _flattened(model: nn.Sequential, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in model._modules.items():
        if type(layer) is nn.Sequential and not has_hooks(layer):
            yield from _flattened(layer, f"{path}{name}.")
        elif layer is not None:
            yield f"{path}{name}", layer


def is_custom(module: nn.Module) -> bool:
    """True if it is not one of torch's own layers, so that its behaviour is unknown."""
    return not type(module).__module__.startswith("torch.nn")


def has_hooks(module: nn.Module) -> bool:
    """True if hooks of the user may change what a module computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def may_draw(module: nn.Module) -> bool:
    """True if a module may draw random numbers; a layer that is not torch's own may."""
    drawing = nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.MultiheadAttention
    return any(isinstance(inner, drawing) or is_custom(inner) for inner in module.modules())


def may_mutate_buffers(module: nn.Module) -> bool:
    """True if a layer has buffers that its calls may change, and that are no statistics of a norm.

    Of torch's own layers those do that a parametrization or a hook gives buffers, such as `spectral_norm`.
    """
    norms = nn.modules.batchnorm._NormBase
    others = (inner for inner in module.modules() if not isinstance(inner, norms))
    return any(True for inner in others for _ in inner.buffers(recurse=False))
