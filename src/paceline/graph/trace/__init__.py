"""A model as a list of operations in the order in which they are computed, and the parts that it can be cut into.

The operations are those of `torch.export`, or the children of an `nn.Sequential`. A part is a contiguous range of them,
with the values that it takes from earlier operations and gives to later ones.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.graph.trace.chain import ChainTrace, has_hooks, may_mutate_buffers
from paceline.graph.trace.graph import GraphTrace
from paceline.graph.trace.operations import ModelPart, ModelTrace

__all__ = ["ChainTrace", "GraphTrace", "ModelPart", "ModelTrace", "trace"]


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> ModelTrace:
    """Traces a model into at least as many operations as parts."""
    chain = ChainTrace(model) if type(model) is nn.Sequential and not has_hooks(model) else None
    if chain is not None and len(chain.operations) >= 2 * parts and not may_mutate_buffers(model):
        return chain
    try:
        return GraphTrace(model, args, kwargs)
    except UsageError:
        if chain is not None and len(chain.operations) >= parts:
            return chain
        raise
