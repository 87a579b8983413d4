"""Properties of one node of an exported graph: its mutations, its randomness, the memory that it shares."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from paceline.graph.opaque_layers import LayerCall, layer_call

GRADIENTS = "with gradients"
"""Key of a node's metadata: False if it is computed under `no_grad`."""


def restore_layer(node: fx.Node) -> None:
    """Makes a node call the layer that was opaque to the trace."""
    call = layer_call(node.target, node.args[1] if len(node.args) == 2 else None)
    if call is not None:
        node.target, node.args = call, node.args[:1]


def mutated_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = [*zip(schema.arguments, node.args, strict=False)]
    arguments += [
        (argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs
    ]
    return [
        value
        for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node)
    ]


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def has_statistics(node: fx.Node) -> bool:
    """True if it is a norm that updates a running mean; its schema does not say so."""
    arguments = named_arguments(node)
    return arguments.get("running_mean") is not None and bool(
        arguments.get("training", arguments.get("use_input_stats"))
    )


def is_without_gradients(node: fx.Node) -> bool:
    """True if no gradient flows through a node."""
    return not node.meta.get(GRADIENTS, True) and isinstance(node.target, torch._ops.OpOverload)


def is_view(node: fx.Node) -> bool:
    """True if a node's output may share memory with an input."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def origin(node: fx.Node) -> fx.Node:
    """The value that a node is a view of; perhaps itself."""
    return aliases(node)[-1]


def aliases(node: fx.Node) -> list[fx.Node]:
    """A node, the node that it is a view of, and so on up to the origin."""
    found = [node]
    while node.op == "call_function" and (is_view(node) or node.target is operator.getitem):
        source = node.all_input_nodes[0]
        here, there = memory(node), memory(source)
        if here and there and not here & there:
            break  # it may be a view, but is a copy
        node = source
        found.append(node)
    return found


def memory(node: fx.Node) -> set[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def has_dynamic_rows(node: fx.Node) -> bool:
    """True if the number of rows is dynamic, as in a batched input and in values computed from it."""
    value = node.meta.get("val")
    rows = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0
    return isinstance(rows, torch.SymInt) and rows.node.maybe_as_int() is None


def is_random(node: fx.Node) -> bool:
    """True if a node draws random numbers, given its arguments."""
    if isinstance(node.target, LayerCall):
        return node.target.random
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    arguments = named_arguments(node)
    if "scaled_dot_product" in schema.name:
        return bool(arguments.get("dropout_p", 0.0))
    if "dropout" in schema.name or "train" in arguments:
        share = arguments.get("p", arguments.get("dropout", 1.0))
        return bool(arguments.get("train", True)) and share != 0
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def without_gradients(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return operation(*args, **kwargs)
