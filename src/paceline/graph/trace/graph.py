"""Any model, traced by `torch.export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.graph.batch_dim import batched_inputs
from paceline.graph.module_attributes import ModuleAttributes
from paceline.graph.opaque_layers import LayerCall
from paceline.graph.trace import nodes
from paceline.graph.trace.chain import deterministic
from paceline.graph.trace.exporting import exported
from paceline.graph.trace.operations import CHANGES_INPUT, ModelOperation, ModelPart, ModelTrace, Value, seed_operation
from paceline.graph.trace.tail import Tail, find_tail, left_to_stages

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
        self._all_nodes: list[fx.Node] = []
        self._returned: list[Any] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._inputs[node] = -1 - len(self._inputs)
            elif node.op == "call_function" and not any(word in str(node.target) for word in _IGNORED):
                nodes.restore_layer(node)
                self._all_nodes.append(node)
            elif node.op == "output":
                self._returned = list(pytree.tree_leaves(node.args[0]))
        if any(isinstance(node, fx.Node) and node.op == "get_attr" for node in self._returned):
            raise UsageError(
                "the model returns one of its parameters or buffers itself; in a pipeline it must return what it "
                "computes"
            )
        samples = zip(self._inputs, batched_inputs(leaves), strict=True)
        self.fixed_batch = any(rows and not nodes.has_dynamic_rows(node) for node, rows in samples)
        self._number_operations(None)
        if self.reduces_batch:
            self._number_operations(find_tail(module, self._returned))
        for node in self._nodes:
            if any(nodes.origin(changed) in self._inputs for changed in nodes.mutated_by(node)):
                raise UsageError(CHANGES_INPUT.format(self.operations[self._number[node]].kind))
        self.mutates_buffers = any(map(self._mutates_buffer, self._nodes))

    def _number_operations(self, tail: Tail | None) -> None:
        """Numbers the operations that are left to the stages, and their results."""
        computed = [node for node in self._returned if isinstance(node, fx.Node) and node.op == "call_function"]
        with_rows = [node for node in computed if nodes.has_dynamic_rows(node)]
        self._tail, self._nodes, self._results = tail, self._all_nodes, computed
        self.reduces_batch = not self.fixed_batch and len(with_rows) < len(computed) and tail is None
        if tail is not None:
            self._nodes = left_to_stages(self._all_nodes, tail, with_rows)
            self._results = list(dict.fromkeys([*with_rows, *tail.taken]))
        self._number = {node: number for number, node in enumerate(self._nodes)}
        self.operations = [self._operation(node) for node in self._nodes]
        self.results = tuple(self._number[node] for node in self._results)

    @property
    def has_tail(self) -> bool:
        return self._tail is not None

    def drop_tail(self) -> None:
        if self._tail is not None:
            self._number_operations(None)

    def _mutates_buffer(self, node: fx.Node) -> bool:
        """True if a node changes a buffer or a view of one."""
        changed = map(nodes.origin, nodes.mutated_by(node))
        return any(one.op == "get_attr" and self._parameter(one) is None for one in changed)

    def changes_buffers(self, first: int, last: int) -> bool:
        return any(self._mutates_buffer(node) or nodes.has_statistics(node) for node in self._nodes[first:last])

    def _operation(self, node: fx.Node) -> ModelOperation:
        inputs = [self._number.get(needed, self._inputs.get(needed)) for needed in node.all_input_nodes]
        attributes = [needed for needed in node.all_input_nodes if needed.op == "get_attr"]
        parameters = [str(one.target) for one in attributes if self._parameter(one) is not None]
        buffers = [str(one.target) for one in attributes if self._parameter(one) is None]
        if isinstance(node.target, LayerCall):
            parameters += node.target.parameters()
            buffers += node.target.buffers()
        kind = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
        known = tuple(one for one in inputs if one is not None)
        return ModelOperation(node.name, known, tuple(parameters), kind, tuple(buffers))

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
        known: dict[Any, Any] = {node: inputs[-1 - number] for node, number in self._inputs.items()}
        known.update(zip(self._results, values, strict=True))
        if self._tail is not None:
            self._tail.run(known)
        flat = [known[node] if isinstance(node, fx.Node) else node for node in self._returned]
        return pytree.tree_unflatten(flat, self._output_spec)

    def infer(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:

            def fake(value: Any) -> Any:
                # Also of parameters and buffers: an operation on real tensors alone would be computed.
                return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

            values: dict[int, Any] = {-1 - number: fake(value) for number, value in enumerate(inputs)}
            for number, node in enumerate(self._nodes):
                target = node.target.infer if isinstance(node.target, LayerCall) else node.target
                args, kwargs = self._arguments((node.args, node.kwargs), values, fake)
                values[number] = target(*args, **kwargs)  # type: ignore[operator]
            return [values[number] for number in self.results]

    def _arguments(
        self, arguments: Any, values: dict[int, Value], constant: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """The values of an operation's arguments; `constant` is applied to those of parameters and buffers."""

        def value(needed: fx.Node) -> Any:
            if needed.op == "get_attr":
                return constant(attrgetter(str(needed.target))(self._module))
            return values[self._number.get(needed, self._inputs.get(needed, 0))]

        return fx.map_arg(arguments, value)

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
        return self._execute(node, (), self._arguments({**arguments, **evaluation}, values))

    def execute(self, number: int, values: dict[int, Value]) -> Value:
        node = self._nodes[number]
        return self._execute(node, *self._arguments((node.args, node.kwargs), values))

    def _execute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Value:
        target: Any = node.target
        if nodes.is_without_gradients(node):
            return nodes.without_gradients(target, *args, **kwargs)
        return target(*args, **kwargs)


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces random numbers by equal ones."""
    return tensor.fill_(0.5) if tensor.is_floating_point() else tensor.zero_()
