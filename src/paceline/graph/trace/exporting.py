"""The graph of a model from `torch.export`, with a dynamic batch size."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx import config as fx_config
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from paceline.errors import PacelineError, UsageError
from paceline.graph.batch_dim import batch_size, batched_inputs
from paceline.graph.key_value_caches import without_caches
from paceline.graph.trace.nodes import GRADIENTS

_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice)
"""Classes of what is no tensor, and a constant of a trace."""
_OF_OPERATOR = "GeneratedBackwardFor_"
"""The gradient of a registered operator, which a trace keeps by keeping the operator."""


def exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Exports a model; the graph's inputs are the leaves of its arguments, in order."""
    before = _other_random_state()
    try:
        # torch.export prints far more than the one sentence of the error below.
        quiet = contextlib.redirect_stderr(io.StringIO())
        with torch.enable_grad(), _refuse_custom_gradients(), _no_stack_traces(), without_caches(model), quiet:
            program = _program(model, args, kwargs)
    except PacelineError:
        raise
    except Exception as error:  # including any error of the model's own code
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"the model cannot be traced by torch.export ({why}), nor is it an nn.Sequential with a layer for every "
            "stage; write its forward without decisions that depend on values, or as an nn.Sequential, or split it by "
            "'tensor', which does not trace it"
        ) from None
    if _other_random_state() != before:
        raise UsageError(
            "the model draws from Python's or NumPy's random numbers when it is called, which a trace does only once; "
            "draw with torch, or draw in the script and pass the numbers as inputs"
        )
    try:
        module: fx.GraphModule = program.module(check_guards=False)
    except KeyError as error:
        raise UsageError(
            f"torch.export cannot trace the model ({error.args[0]}): its graphs use the name of one of the model's "
            "parameters or buffers themselves; rename it, or split the model by 'tensor', which does not trace it"
        ) from None
    _inline_no_grad(module)
    return module


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    _check_leaves(leaves, "is given")
    # torch specialises on a batch of one sample, even if told otherwise.
    dynamic = {0: torch.export.Dim.AUTO} if batch_size(leaves) > 1 else None
    shapes = tuple(dynamic if one else None for one in batched_inputs(leaves))
    plain, own = model.forward, vars(model).get("forward")

    def forward(*inputs: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(inputs, spec)
        result = plain(*args, **kwargs)
        _check_leaves(result, "returns")
        return result

    # Flat, since torch.export takes no dynamic shapes for `**kwargs`.
    model.forward = forward
    try:
        return torch.export.export(model, tuple(leaves), dynamic_shapes={"inputs": shapes}, strict=False)
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _check_leaves(values: Any, verb: str) -> None:
    """Refuses objects that a trace cannot take or return."""
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *_VALUES)
    unknown = next((leaf for leaf in pytree.tree_leaves(values) if not isinstance(leaf, known)), None)
    if unknown is None:
        return
    name = type(unknown).__name__
    if name.endswith("Cache"):
        raise UsageError(
            f"the model {verb} a {name}, a key-value cache, which a split model does not have; call it, or generate, "
            "with use_cache=False, or load its state_dict into a plain model for that"
        )
    raise UsageError(
        f"the model {verb} a {name}, an object of a class that torch.export does not know; use a tensor, a tuple, a "
        "list or a dict, or register the class with torch.export.register_dataclass"
    )


def _other_random_state() -> tuple[Any, ...]:
    """Random state of Python and NumPy."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state(legacy=False) if numpy else {}
    return random.getstate(), str(state.get("state"))


def _inline_no_grad(module: fx.GraphModule) -> None:
    """Inlines the subgraphs that are computed under `no_grad`, and marks their nodes."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, inner, *operands = node.args
        body = attrgetter(inner.target)(module)
        _inline_no_grad(body)
        values = dict(zip((one for one in body.graph.nodes if one.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body.graph, values)
        for old, new in values.items():
            if old.op == "get_attr":
                new.target = f"{inner.target}.{old.target}"
            elif old.op == "call_function":
                new.meta.setdefault(GRADIENTS, enabled)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Keeps torch from looking up the script's lines for every node: it takes time, and nothing here reads them."""
    before = fx_config.do_not_emit_stack_traces
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = before


@contextlib.contextmanager
def _refuse_custom_gradients() -> Iterator[None]:
    """Refuses custom autograd functions: a trace would keep their forward pass, but not their backward pass."""
    own = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__.startswith(_OF_OPERATOR):
            return own.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # its gradient is that of the function that it is given
            function, _, *inputs = args
            return function(*inputs)
        raise UsageError(
            f"the model has a custom gradient in {cls.__name__}, which a trace does not keep; compute it with torch's "
            "own functions, register it by torch.library.register_autograd, or split the model by 'tensor', which does "
            "not trace it"
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
