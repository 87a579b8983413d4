"""A model's graph from `torch.export`, with samples as many as there may be."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.graph.batch_dim import batch_of, with_rows
from paceline.graph.trace.nodes import GRADIENTS


def exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Its inputs are all that is in the arguments, one after the other."""
    before = _drawn()
    try:
        # What torch.export would print is more than the one sentence that it comes to.
        with torch.enable_grad(), _without_own_gradients(), contextlib.redirect_stderr(io.StringIO()):
            program = _program(model, args, kwargs)
    except UsageError:
        raise
    except Exception as error:  # whatever a model's own code raises, too
        if "register a pytree" in str(error):
            raise UsageError(
                "the model takes or returns an object of a class that torch.export cannot look into; let it be a "
                "tensor, a tuple, a list or a dict, or tell of the class with torch.export.register_dataclass"
            ) from None
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"the model cannot be traced by torch.export ({why}), nor is it an nn.Sequential with a layer for every "
            "part; write its forward without decisions that depend on values, or as an nn.Sequential"
        ) from None
    if _drawn() != before:
        raise UsageError(
            "the model draws from Python's or NumPy's random numbers as it is called, which a trace does only once; "
            "let it draw with torch, or let the script draw and give it the numbers"
        )
    module: fx.GraphModule = program.module(check_guards=False)
    _open(module)
    return module


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # Of one sample torch takes it that there always is one, whatever it is told.
    free = {0: torch.export.Dim.AUTO} if batch_of(leaves) > 1 else None
    shapes = tuple(free if one else None for one in with_rows(leaves))
    plain, own = model.forward, vars(model).get("forward")

    def forward(*inputs: Any) -> Any:
        given, named = pytree.tree_unflatten(inputs, spec)
        return plain(*given, **named)

    # Flat, as torch.export takes no shapes for `**names`.
    model.forward = forward
    try:
        return torch.export.export(model, tuple(leaves), dynamic_shapes={"inputs": shapes}, strict=False)
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _drawn() -> tuple[Any, ...]:
    """Where the random numbers are that torch knows nothing of."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state(legacy=False) if numpy else {}
    return random.getstate(), str(state.get("state"))


def _open(module: fx.GraphModule) -> None:
    """Lay open what a model computes under `no_grad`; those operations know that it is."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, inner, *operands = node.args
        body = attribute(module, inner.target)
        _open(body)
        values = dict(zip((one for one in body.graph.nodes if one.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body.graph, values)
        for old, new in values.items():
            if old.op == "get_attr":
                new.target = f"{inner.target}.{old.target}"
            elif old.op == "call_function":
                new.meta.setdefault(GRADIENTS, enabled)
        for taken in list(node.users):
            taken.replace_all_uses_with(results[taken.args[1]])
            graph.erase_node(taken)
        graph.erase_node(node)


@contextlib.contextmanager
def _without_own_gradients() -> Iterator[None]:
    """A trace has an autograd function's forward pass, but not its backward pass: it would be another model."""
    own = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise TypeError(f"it has a gradient of its own in {cls.__name__}, which a trace does not keep")

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


def attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
