"""The graph of a model: which operation was called on what, seen by running it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.tensor_parallel.partial_tensor import ABOUT, name_of


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the graph."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class GraphCall:
    """One operation."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    """The tensors that came out; one that was changed is there under the number that it had."""
    path: tuple[str, ...]
    """The modules that it was called in."""


class CallGraph:
    """What happened, in its order."""

    def __init__(self) -> None:
        self.calls: list[GraphCall] = []
        self.shapes: dict[int, torch.Size] = {}
        self.parameters: dict[int, int] = {}
        """Numbers of the model's own parameters and buffers, by their ids."""
        self.outputs: tuple[int, ...] = ()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is None:
            known = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)  # as long as it lives no other has its id
            self.shapes[known] = torch.Size(tensor.shape)
        return known

    def refs(self, tree: Any) -> Any:
        return tree_map(lambda value: Ref(self.number(value)) if isinstance(value, torch.Tensor) else value, tree)

    def forget(self) -> None:
        """Let go of the values."""
        self._alive, self._numbers = [], {}


class _Recorder(TorchFunctionMode):
    def __init__(self, graph: CallGraph, path: list[str]) -> None:
        super().__init__()
        self._graph, self._path = graph, path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        result = func(*args, **kwargs)
        if name in ABOUT:
            return result
        outs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        graph = self._graph
        given = graph.refs(list(args)), graph.refs(dict(kwargs))
        graph.calls.append(GraphCall(name, *given, tuple(graph.number(out) for out in outs), tuple(self._path)))
        return result


def traced(model: nn.Module, inputs: Sequence[Any]) -> CallGraph:
    """Run a model once, without gradients, and write down what it does."""
    graph = CallGraph()
    path: list[str] = []
    for tensor in (*model.parameters(), *model.buffers()):
        graph.parameters[id(tensor)] = graph.number(tensor)
    hooks: list[Any] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(_entering(path, name)))
        hooks.append(module.register_forward_hook(_leaving(path), always_call=True))
    training = {module: module.training for module in model.modules()}
    model.train()
    try:
        with torch.no_grad(), _Recorder(graph, path):
            result = model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode
    outs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
    graph.outputs = tuple(graph.number(out) for out in outs)
    graph.forget()
    return graph


def _entering(path: list[str], name: str) -> Any:
    def enter(_module: nn.Module, _arguments: Any) -> None:
        path.append(name)

    return enter


def _leaving(path: list[str]) -> Any:
    def leave(_module: nn.Module, _arguments: Any, _result: Any) -> None:
        path.pop()

    return leave
