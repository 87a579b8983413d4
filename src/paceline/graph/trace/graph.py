"""Any model, traced by `torch.export`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.graph.batch_dim import batched_inputs
from paceline.graph.module_attributes import ModuleAttributes
from paceline.graph.opaque_layers import LayerCall
from paceline.graph.trace import nodes
from paceline.graph.trace.chain import deterministic
from paceline.graph.trace.exporting import exported
from paceline.graph.trace.operations import CHANGES_INPUT, ModelOperation, ModelPart, ModelTrace, Value, seed_operation

_IGNORED = ("_assert", "sym_constrain_range", "_guards_fn")


class GraphTrace(ModelTrace):
    """The nodes of a model's exported graph."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = model
        before = ModuleAttributes(model)

        def note(*_: Any) -> None:
            self.changed_attributes = before.changes()

        hook = model.register_forward_hook(note)  # later torch.export restores most of them
        try:
            self._module = module = exported(model, args, kwargs)
        finally:
            hook.remove()
            before.restore()
        leaves, self._input_spec = pytree.tree_flatten((args, kwargs))
        info: Any = module.graph._codegen
        self._output_spec: pytree.TreeSpec = info.pytree_info.out_spec
        self._inputs: dict[fx.Node, int] = {}
        self._nodes: list[fx.Node] = []
        self._number: dict[fx.Node, int] = {}
        flat: list[fx.Node] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._inputs[node] = -1 - len(self._inputs)
            elif node.op == "call_function" and not any(word in str(node.target) for word in _IGNORED):
                nodes.restore_layer(node)
                self._number[node] = len(self._nodes)
                self._nodes.append(node)
            elif node.op == "output":
                flat = list(pytree.tree_leaves(node.args[0]))
        self.operations = [self._operation(node) for node in self._nodes]
        if any(isinstance(node, fx.Node) and node.op == "get_attr" for node in flat):
            raise UsageError(
                "the model returns one of its parameters or buffers itself; in a pipeline it must return what it "
                "computes"
            )
        self._returned: list[Any] = flat
        computed = [node for node in flat if node in self._number]
        self.results = tuple(self._number[node] for node in computed)
        samples = zip(self._inputs, batched_inputs(leaves), strict=True)
        self.fixed_batch = any(rows and not nodes.has_dynamic_rows(node) for node, rows in samples)
        self.reduces_batch = not self.fixed_batch and not all(map(nodes.has_dynamic_rows, computed))
        for node in self._nodes:
            if any(nodes.origin(changed) in self._inputs for changed in nodes.mutated_by(node)):
                raise UsageError(CHANGES_INPUT.format(self.operations[self._number[node]].kind))
        self.mutates_buffers = any(map(self._mutates_buffer, self._nodes))

    def _mutates_buffer(self, node: fx.Node) -> bool:
        """True if a node changes a buffer or a view of one."""
        changed = map(nodes.origin, nodes.mutated_by(node))
        return any(one.op == "get_attr" and self._parameter(one) is None for one in changed)

    def changes_buffers(self, first: int, last: int) -> bool:
        return any(self._mutates_buffer(node) or nodes.has_statistics(node) for node in self._nodes[first:last])

    def _operation(self, node: fx.Node) -> ModelOperation:
        inputs = [self._number.get(needed, self._inputs.get(needed)) for needed in node.all_input_nodes]
        parameters = [str(needed.target) for needed in node.all_input_nodes if self._parameter(needed) is not None]
        if isinstance(node.target, LayerCall):
            parameters += node.target.parameters()
        kind = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
        return ModelOperation(node.name, tuple(one for one in inputs if one is not None), tuple(parameters), kind)

    def _parameter(self, node: fx.Node) -> nn.Parameter | None:
        if node.op != "get_attr":
            return None
        value = attrgetter(str(node.target))(self._module)
        return value if isinstance(value, nn.Parameter) else None

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._input_spec:
            raise UsageError("the model is called with other arguments than when it was traced")
        return leaves

    def returned(self, values: Sequence[Value], inputs: Sequence[Any]) -> Any:
        left = iter(values)
        flat = [
            next(left) if node in self._number else inputs[-1 - self._inputs[node]] if node in self._inputs else node
            for node in self._returned
        ]
        return pytree.tree_unflatten(flat, self._output_spec)

    def computed(self, returned: Any) -> list[Value]:
        flat = pytree.tree_leaves(returned)
        return [value for value, node in zip(flat, self._returned, strict=True) if node in self._number]

    def _inseparable(self, source: int, target: int) -> bool:
        value = self._nodes[source].meta.get("val")
        # A tuple of values is unpacked in the part that computes it.
        return not isinstance(value, torch.Tensor | int | torch.SymInt)

    def cuts(self) -> list[int]:
        forbidden: set[int] = set()
        for number, node in enumerate(self._nodes):
            # A value is changed in the part that computes it, also through a view.
            for changed in nodes.mutated_by(node):
                known = [self._number[one] for one in nodes.aliases(changed) if one in self._number]
                first = min(known, default=number)
                forbidden.update(range(first + 1, number + 1))
        return [cut for cut in super().cuts() if cut not in forbidden]

    def may_mutate(self, number: int) -> bool:
        schema = getattr(self._nodes[number].target, "_schema", None)
        return schema is not None and bool(schema.is_mutable)

    def part(self, first: int, last: int) -> ModelPart:
        inputs, outputs = self.interface(first, last)
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        by_number = {number: node for node, number in [*self._number.items(), *self._inputs.items()]}
        for number in inputs:
            known[by_number[number]] = graph.placeholder(by_number[number].name)
        parameters: dict[int, nn.Parameter] = {}
        draws = False

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = graph.get_attr(str(node.target))
                value = attrgetter(str(node.target))(self._module)
                if isinstance(value, nn.Parameter):
                    parameters[id(value)] = value
            return known[node]

        for number, node in enumerate(self._nodes[first:last], first):
            if nodes.is_random(node):
                draws = True
                graph.call_function(seed_operation, (number,))
            known[node] = copy = graph.node_copy(node, copied)
            if nodes.is_without_gradients(node):
                operation: Any = node.target
                copy.target, copy.args = nodes.without_gradients, (operation, *copy.args)
            if isinstance(node.target, LayerCall):
                parameters.update((id(value), value) for value in node.target.layer.parameters())
        graph.output([known[by_number[number]] for number in outputs])
        module = fx.GraphModule(self._module, graph)

        def run(values: Sequence[Value]) -> list[Value]:
            return list(module(*values))

        return ModelPart(inputs, outputs, run, tuple(parameters.values()), draws)

    def execute_deterministic(self, number: int, values: dict[int, Value]) -> Value:
        node = self._nodes[number]
        if not nodes.is_random(node):
            return self.execute(number, values)
        if isinstance(node.target, LayerCall):
            with deterministic(node.target.layer):
                return self.execute(number, values)
        arguments = nodes.named_arguments(node)
        evaluation = {name: value for name, value in (("train", False), ("dropout_p", 0.0)) if name in arguments}
        if not evaluation:
            return pytree.tree_map_only(torch.Tensor, _constant, self.execute(number, values))
        return self.execute(number, values, {**arguments, **evaluation})

    def execute(self, number: int, values: dict[int, Value], arguments: dict[str, Any] | None = None) -> Value:
        """arguments: by name, instead of those in the trace."""
        node = self._nodes[number]

        def value(needed: fx.Node) -> Any:
            if needed.op == "get_attr":
                return attrgetter(str(needed.target))(self._module)
            return values[self._number.get(needed, self._inputs.get(needed, 0))]

        args = fx.map_arg(node.args if arguments is None else (), value)
        kwargs = fx.map_arg(node.kwargs if arguments is None else arguments, value)
        target: Any = node.target
        if nodes.is_without_gradients(node):
            return nodes.without_gradients(target, *args, **kwargs)
        return target(*args, **kwargs)


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces random numbers by equal ones."""
    return tensor.fill_(0.5) if tensor.is_floating_point() else tensor.zero_()
