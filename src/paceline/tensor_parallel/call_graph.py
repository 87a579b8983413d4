"""Graph of a model's operations, recorded by running it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.tensor_parallel.partial_tensor import METADATA, name_of


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the graph, by number."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class GraphCall:
    """One call of a torch function."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    """Numbers of the tensors that it returns; a tensor that it changes in place keeps its number."""
    path: tuple[str, ...]
    """Names of the modules that it is called in, the innermost last."""


class CallGraph:
    """The calls of one run of a model, in order."""

    def __init__(self) -> None:
        self.calls: list[GraphCall] = []
        self.shapes: dict[int, torch.Size] = {}
        self.parameters: dict[int, int] = {}
        """Numbers of the model's parameters and buffers, by id."""
        self.outputs: tuple[int, ...] = ()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is None:
            known = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)  # keeps its id from being reused
            self.shapes[known] = torch.Size(tensor.shape)
        return known

    def refs(self, tree: Any) -> Any:
        return tree_map(lambda value: Ref(self.number(value)) if isinstance(value, torch.Tensor) else value, tree)

    def release(self) -> None:
        """Drops the tensors; their numbers and shapes stay."""
        self._alive, self._numbers = [], {}


class _Recorder(TorchFunctionMode):
    def __init__(self, graph: CallGraph, path: list[str]) -> None:
        super().__init__()
        self._graph, self._path = graph, path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        result = func(*args, **kwargs)
        if name in METADATA:
            return result
        outs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        graph = self._graph
        arguments = graph.refs(list(args)), graph.refs(dict(kwargs))
        graph.calls.append(GraphCall(name, *arguments, tuple(graph.number(out) for out in outs), tuple(self._path)))
        return result


def record_calls(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any] | None = None) -> CallGraph:
    """Runs a model once, in training mode without gradients, and records its calls."""
    graph = CallGraph()
    path: list[str] = []
    for tensor in (*model.parameters(), *model.buffers()):
        graph.parameters[id(tensor)] = graph.number(tensor)

    def leave(_module: nn.Module, _arguments: Any, _result: Any) -> None:
        path.pop()

    hooks: list[Any] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _module, _arguments, name=name: path.append(name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    training = {module: module.training for module in model.modules()}
    model.train()
    try:
        with torch.no_grad(), _Recorder(graph, path):
            result = model(*inputs, **(named or {}))
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode
    outs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
    graph.outputs = tuple(graph.number(out) for out in outs)
    graph.release()
    return graph
