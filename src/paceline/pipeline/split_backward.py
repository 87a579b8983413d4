"""A backward pass in two parts: gradients of a stage's inputs, for which others wait, and later those of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

_TOGETHER = ("NativeGroupNormBackward0",)
"""What torch can not make the gradients of weights of by themselves, for all layouts of memory."""


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: list[torch.Tensor],
    weights: list[torch.nn.Parameter],
) -> Callable[[], None]:
    """Make the inputs' gradients; returns what makes those of the weights."""
    # Only where it is needed: this takes seconds to import.
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    flat = [value.clone() if value._is_view() else value for value in outputs]
    _, groups = stage_backward_input(flat, list(gradients), inputs, iter(weights))

    def rest() -> None:
        stage_backward_weight(iter(weights), groups)

    return rest


def separable(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether that can be done: not where a weight is used in several places, each of which would end the graph."""
    nodes, arrivals = _graph([value.grad_fn for value in outputs if value.grad_fn is not None])
    ends = {id(value) for value in inputs}
    leads = {node for node in nodes if id(getattr(node, "variable", None)) in ends}
    for node in reversed(nodes):  # what comes after it has been looked at
        if any(following in leads for following, _ in node.next_functions):
            leads.add(node)
    repeated = any(arrivals[node] > 1 for node in nodes if node not in leads)
    return not repeated and not any(node.name() in _TOGETHER for node in nodes)


def _graph(roots: Sequence[Any]) -> tuple[list[Any], Counter[Any]]:
    """The nodes of a backward pass, each before those that follow it, and how many lead to each."""
    arrivals: Counter[Any] = Counter()
    seen, left = set(roots), list(roots)
    while left:
        for following, _ in left.pop().next_functions:
            if following is not None:
                arrivals[following] += 1
                if following not in seen:
                    seen.add(following)
                    left.append(following)
    waiting, order = Counter(arrivals), []
    ready = [root for root in seen if not arrivals[root]]
    while ready:
        order.append(node := ready.pop())
        for following, _ in node.next_functions:
            if following is not None:
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
    return order, arrivals
