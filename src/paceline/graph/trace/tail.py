"""The tail of an exported graph: the operations that reduce rows of samples to values of the batch, such as its loss.

A model that computes its loss itself ends in them. They belong to no stage. The trace applies them to the values that
the stages return, as a script would that computes the loss from the model's output: so the loss of a model is divided
into terms of microbatches, and checked, like the loss of a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import fx, nn
from torch.nn import functional

from paceline.graph.opaque_layers import LayerCall
from paceline.graph.trace import nodes

_SAME_NAME = """mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
soft_margin_loss multi_margin_loss multilabel_margin_loss"""
_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy_loss": functional.cross_entropy,
    "nll_loss": functional.nll_loss,
    "nll_loss2d": functional.nll_loss,
    "nll_loss_nd": functional.nll_loss,
    **{name: getattr(functional, name) for name in _SAME_NAME.split()},
}
"""Operators of torch's losses, and the functions that a script would call."""
_REDUCTIONS = ("none", "mean", "sum")
"""As operators number them."""
_RESHAPING = ("view", "reshape", "_unsafe_view", "expand")
_REARRANGING_NAMES = """view reshape _unsafe_view transpose permute slice select squeeze unsqueeze flatten unflatten
contiguous clone to _to_copy alias"""
_REARRANGING = frozenset(_REARRANGING_NAMES.split())
"""Operations that compute no new values."""


class Tail:
    """Operations on the results of the last stage, in order."""

    def __init__(self, operations: Sequence[fx.Node], taken: Sequence[fx.Node], module: fx.GraphModule) -> None:
        self.operations, self._module = operations, module
        self.taken = taken
        """The values with a row for every sample that it computes from."""

    def run(self, values: dict[fx.Node, Any]) -> None:
        """Adds its operations' results to the values of inputs and of `taken`, which may be deferred ones."""

        def value(node: fx.Node) -> Any:
            return attrgetter(str(node.target))(self._module) if node.op == "get_attr" else values[node]

        for node in self.operations:
            function, args, kwargs = _call(node)
            values[node] = function(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))


def _call(node: fx.Node) -> tuple[Callable[..., Any], Any, Any]:
    """The function and the arguments by which a script would call an operation."""
    target: Any = node.target
    name = getattr(target, "_opname", "")
    if name in _LOSSES:
        named = nodes.named_arguments(node)
        renamed = {"input" if key == "self" else key: value for key, value in named.items()}
        if "reduction" in renamed:
            renamed["reduction"] = _REDUCTIONS[int(renamed["reduction"])]
        return _LOSSES[name], (), renamed
    if name in _RESHAPING and isinstance(node.args[1], list | tuple):
        sizes = node.args[1]
        if sum(isinstance(size, fx.Node) for size in sizes) == 1:  # a number of samples
            sizes = [-1 if isinstance(size, fx.Node) else size for size in sizes]
        return target, (node.args[0], sizes, *node.args[2:]), node.kwargs
    return target, node.args, node.kwargs


def find_tail(module: fx.GraphModule, returned: Sequence[Any]) -> Tail | None:
    """The tail that computes the returned values without a row for every sample; None if it is not separable."""
    return _TailSearch(module, returned).find()


class _TailSearch:
    """Walks back from the values of the batch to the last values with a row for every sample."""

    def __init__(self, module: fx.GraphModule, returned: Sequence[Any]) -> None:
        self._graph, self._module = module.graph, module
        graph = module.graph
        results = [node for node in returned if isinstance(node, fx.Node) and node.op == "call_function"]
        self._with_rows = {node for node in results if nodes.has_dynamic_rows(node)}
        self._reduced = [node for node in results if node not in self._with_rows]
        self._samples = {
            _rows(node) for node in graph.nodes if node.op == "placeholder" and nodes.has_dynamic_rows(node)
        }
        self._mutators: dict[fx.Node, list[fx.Node]] = {}
        """By the origin of the memory that they change."""
        for node in graph.nodes:
            for changed in nodes.mutated_by(node):
                self._mutators.setdefault(nodes.origin(changed), []).append(node)
        self._modelled = self._find_modelled()

    def _find_modelled(self) -> set[fx.Node]:
        """The values that depend on more than the inputs: on parameters, on buffers that change, on random numbers."""
        found: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "get_attr":
                learned = isinstance(attrgetter(str(node.target))(self._module), nn.Parameter)
                own = learned or node in self._mutators
            else:
                own = node.op == "call_function" and (isinstance(node.target, LayerCall) or nodes.is_random(node))
            changing = self._mutators.get(nodes.origin(node), ()) if node.op == "call_function" else ()
            if own or any(needed in found for one in (node, *changing) for needed in one.all_input_nodes):
                found.add(node)
        return found

    def find(self) -> Tail | None:
        inside: set[fx.Node] = set()
        taken: dict[fx.Node, None] = {}
        left = list(self._reduced)
        while left:
            node = left.pop()
            if node in inside or node.op != "call_function":
                continue
            if node in self._modelled and not self._is_plain(node):
                return None
            inside.add(node)
            if node not in self._modelled:
                left += self._mutators.get(nodes.origin(node), ())
            for needed in node.all_input_nodes:
                if not self._is_taken(needed):
                    left.append(needed)
                elif nodes.origin(needed) in self._mutators:
                    return None  # the loss may use the value from before the change
                else:
                    taken[needed] = None
        return Tail([node for node in self._graph.nodes if node in inside], list(taken), self._module)

    def _is_plain(self, node: fx.Node) -> bool:
        """True if an operation on the model's values can be left to the tail."""
        if isinstance(node.target, LayerCall) or nodes.is_random(node) or nodes.is_without_gradients(node):
            return False
        learned = any(needed.op == "get_attr" and needed in self._modelled for needed in node.all_input_nodes)
        return not learned and nodes.origin(node) not in self._mutators

    def _is_taken(self, node: fx.Node) -> bool:
        """True if a value is left to the stages."""
        if node not in self._modelled or node.op != "call_function" or not self._rows_per_sample(node):
            return False
        if node in self._with_rows:
            return True
        if _rearranges(node) and self._rows_per_sample(node) > 1:
            return False
        source = node
        while _rearranges(source) and self._rows_per_sample(source) == 1:
            source = source.all_input_nodes[0]
            if source in self._with_rows:
                return False  # it is a view of a value that the model returns anyway
        return True

    def _rows_per_sample(self, node: fx.Node) -> int:
        """0 if a value does not have the same number of rows for every sample."""
        rows = _rows(node)
        ratios = [rows / samples for samples in self._samples] if rows is not None else []
        return next((int(ratio) for ratio in ratios if ratio.is_Integer), 0)


def _rearranges(node: fx.Node) -> bool:
    return getattr(node.target, "_opname", "") in _REARRANGING


def _rows(node: fx.Node) -> Any:
    """The number of a value's rows, as a symbolic expression; None if it is not dynamic."""
    return node.meta["val"].shape[0].node.expr if nodes.has_dynamic_rows(node) else None


def left_to_stages(operations: Sequence[fx.Node], tail: Tail, results: Iterable[fx.Node]) -> list[fx.Node]:
    """The operations that are not the tail's alone."""
    known, kept = set(operations), {*results, *tail.taken}
    alone: set[fx.Node] = set()
    for node in reversed(tail.operations):
        users = [user for user in node.users if user in known]
        if node not in kept and all(user in alone for user in users) and not nodes.mutated_by(node):
            alone.add(node)
    return [node for node in operations if node not in alone]
