"""A backward pass in two parts: first the gradients of a stage's inputs, later those of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from typing import Any

import torch

_INSEPARABLE = ("NativeGroupNormBackward0",)
"""Nodes for which torch cannot compute the gradients of weights by themselves in every memory layout."""


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: list[torch.Tensor],
    weights: list[torch.nn.Parameter],
) -> Callable[[], None]:
    """Computes the inputs' gradients; the returned function computes those of the weights."""
    # Imported here, since it takes seconds.
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    # It detaches them in place, which views do not allow, nor values that the graph needs for the weights' gradients.
    copies = [value.clone() for value in outputs]
    _, groups = stage_backward_input(copies, list(gradients), inputs, iter(weights))

    def backward_of_weights() -> None:
        stage_backward_weight(iter(weights), groups)

    return backward_of_weights


def separable(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """True if the two parts can be computed apart: not if a weight is used in several places."""
    nodes, arrivals = _graph([value.grad_fn for value in outputs if value.grad_fn is not None])
    ends = {id(value) for value in inputs}
    reaching = {node for node in nodes if id(getattr(node, "variable", None)) in ends}
    for node in nodes:
        if any(following in reaching for following, _ in node.next_functions):
            reaching.add(node)
    repeated = any(arrivals[node] > 1 for node in nodes if node not in reaching)
    return not repeated and not any(node.name() in _INSEPARABLE for node in nodes)


def _graph(roots: Sequence[Any]) -> tuple[list[Any], Counter[Any]]:
    """The nodes of a backward graph, each after its successors, and the in-degree of each."""
    arrivals: Counter[Any] = Counter()
    successors: dict[Any, list[Any]] = {}
    left = list(roots)
    while left:
        node = left.pop()
        if node not in successors:
            successors[node] = [following for following, _ in node.next_functions if following is not None]
            arrivals.update(successors[node])
            left += successors[node]
    return list(TopologicalSorter(successors).static_order()), arrivals
