"""What one operation of a graph is like: what it changes, what it draws, whose memory it shares."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from paceline.graph.opaque_layers import LayerCall, called

GRADIENTS = "with gradients"
"""What an operation knows of itself, if it is under `no_grad` or the like."""


def unseal(node: fx.Node) -> None:
    """Let the layer itself be called, where it was sealed for the trace."""
    call = called(node.target, node.args[1] if len(node.args) == 2 else None)
    if call is not None:
        node.target, node.args = call, node.args[:1]


def changed_by(node: fx.Node) -> list[fx.Node]:
    """What an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [*zip(schema.arguments, node.args, strict=False)]
    given += [(argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs]
    return [
        value
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node)
    ]


def given_to(node: fx.Node) -> dict[str, Any]:
    """What an operation is called with, by name."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def has_statistics(node: fx.Node) -> bool:
    """Whether it is a norm that keeps a running mean of what it sees; its schema does not tell that it does."""
    given = given_to(node)
    return given.get("running_mean") is not None and bool(given.get("training", given.get("use_input_stats")))


def is_quiet(node: fx.Node) -> bool:
    """Whether no gradient goes through an operation."""
    return not node.meta.get(GRADIENTS, True) and isinstance(node.target, torch._ops.OpOverload)


def is_view(node: fx.Node) -> bool:
    """Whether an operation gives the same memory that it takes."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def origin(node: fx.Node) -> fx.Node:
    """What a value is a view of, perhaps itself."""
    return aliases(node)[-1]


def aliases(node: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, what that is a view of, and so on."""
    found = [node]
    while node.op == "call_function" and (is_view(node) or node.target is operator.getitem):
        source = node.all_input_nodes[0]
        here, there = memory(node), memory(source)
        if here and there and not here & there:
            break  # it might have been a view, but is a copy
        node = source
        found.append(node)
    return found


def memory(node: fx.Node) -> set[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def has_free_rows(node: fx.Node) -> bool:
    """Whether there may be any number of rows, as in an input of samples and in what is made of it."""
    value = node.meta.get("val")
    rows = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0
    return isinstance(rows, torch.SymInt) and rows.node.maybe_as_int() is None


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws, with the arguments that it has."""
    if isinstance(node.target, LayerCall):
        return node.target.random
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = given_to(node)
    if "scaled_dot_product" in schema.name:
        return bool(given.get("dropout_p", 0.0))
    if "dropout" in schema.name or "train" in given:
        share = given.get("p", given.get("dropout", 1.0))
        return bool(given.get("train", True)) and share != 0
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def without_gradients(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return operation(*args, **kwargs)
