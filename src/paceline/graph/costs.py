"""Costs of each operation of a model: seconds forward and backward, bytes of its output and of its parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.graph.module_attributes import preserved_state
from paceline.graph.trace import ModelTrace


class Cost(msgspec.Struct, frozen=True):
    """Cost of one operation for one microbatch."""

    forward: float = 0.0
    """Seconds."""
    backward: float = 0.0
    """Seconds."""
    bytes: int = 0
    """Bytes of its output: those that cross a cut behind it."""
    parameters: int = 0
    """Bytes of parameters that no earlier operation uses."""
    whole: bool = True
    """True if each worker has the whole output; False if each has a shard of it."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def measure(trace: ModelTrace, model: nn.Module, inputs: Sequence[Any], repeats: int = 3) -> list[Cost]:
    """Runs every operation by itself, forward and backward, several times; the shortest time counts."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    best: list[tuple[float, float]] = [(float("inf"), float("inf"))] * len(trace.operations)
    last = {needed: number for number, operation in enumerate(trace.operations) for needed in operation.inputs}
    sizes, wholes = [0] * len(trace.operations), [True] * len(trace.operations)
    with preserved_state(model):
        for _ in range(repeats + 1):  # the first run warms up
            values: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
            for number, operation in enumerate(trace.operations):
                weights = [parameters[name] for name in operation.parameters if name in parameters]
                with trace.with_values(number):
                    forward, backward, value = _timed(trace, number, values, weights)
                values[number] = value
                for needed in operation.inputs:
                    if needed >= 0 and last[needed] == number:
                        values.pop(needed, None)
                best[number] = (min(best[number][0], forward), min(best[number][1], backward))
                sizes[number] = sum(one.nbytes for one in _tensors(value))
                wholes[number] = all(_own(one) is one for one in _tensors(value))
    unseen = {id(parameter): parameter.nbytes for parameter in parameters.values()}
    costs = []
    for number, operation in enumerate(trace.operations):
        own = sum(unseen.pop(id(parameters.get(name)), 0) for name in operation.parameters)
        costs.append(Cost(*best[number], sizes[number], own, wholes[number]))
    return costs


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's shard of a sharded tensor; any other tensor itself."""
    shard: torch.Tensor = getattr(tensor, "local", tensor)
    return shard


def _timed(
    trace: ModelTrace, number: int, values: dict[int, Any], weights: list[nn.Parameter]
) -> tuple[float, float, Any]:
    needed = {one: values[one] for one in trace.operations[number].inputs}
    leaves: list[torch.Tensor] = [weight for weight in weights if weight.requires_grad]

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach()
        if not _own(tensor).requires_grad:
            return leaf
        leaves.append(_own(leaf).requires_grad_())
        # Not the leaf itself: the operation may change its input in place.
        return leaf.clone() if trace.may_mutate(number) else leaf

    inputs = {
        one: pytree.tree_map_only(torch.Tensor, detached if one >= 0 else torch.Tensor.detach, value)
        for one, value in needed.items()
    }
    with torch.enable_grad():
        start = time.perf_counter()
        value = trace.execute(number, inputs)
        forward = time.perf_counter() - start
    outputs = [_own(one) for one in _tensors(value) if _own(one).grad_fn is not None]
    backward = 0.0
    if outputs and leaves:
        gradients = [torch.ones_like(one) for one in outputs]
        start = time.perf_counter()
        torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        backward = time.perf_counter() - start
    return forward, backward, pytree.tree_map_only(torch.Tensor, _leaf, value)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph, which requires a gradient as before."""
    leaf = tensor.detach()
    if _own(tensor).requires_grad:
        _own(leaf).requires_grad_()
    return leaf
