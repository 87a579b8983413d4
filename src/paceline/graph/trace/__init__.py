"""A model as operations in the order in which they are done, and the parts that it can be cut into.

`torch.export` traces a model; an `nn.Sequential` is its children, one after the other. Either is a list of operations,
and a part is a stretch of that list: what it takes from before, what it gives to those after.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.graph.trace.chain import ChainTrace, hooked, may_remember
from paceline.graph.trace.graph import GraphTrace
from paceline.graph.trace.operations import ModelOperation, ModelPart, ModelTrace

__all__ = ["ChainTrace", "GraphTrace", "ModelOperation", "ModelPart", "ModelTrace", "trace"]


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> ModelTrace:
    """The model as operations, of which there are enough for so many parts."""
    chain = ChainTrace(model) if type(model) is nn.Sequential and not hooked(model) else None
    if chain is not None and len(chain.operations) >= 2 * parts and not may_remember(model):
        return chain
    try:
        return GraphTrace(model, args, kwargs)
    except UsageError:
        if chain is not None and len(chain.operations) >= parts:
            return chain
        raise
