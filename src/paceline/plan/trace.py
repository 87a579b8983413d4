"""A model as operations in the order in which they are done, and the parts that it can be cut into.

`torch.export` traces a model; an `nn.Sequential` is its children, one after the other. Either is a list of operations,
and a part is a stretch of that list: what it takes from before, what it gives to those after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.plan.sealed import LayerCall, called

Value = Any
"""What an operation gives: a tensor, a number, or, where it may not be cut off, several of them."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a model, by what it needs."""

    name: str
    inputs: tuple[int, ...]
    """The operations whose values it takes."""
    parameters: tuple[str, ...] = ()
    """Those that it uses, by name."""
    shown: str = ""
    """What it is, for people."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of a model's operations, to be run by one stage."""

    takes: tuple[int, ...]
    """Numbers of the values that it needs: from 0 on those of operations, below 0 the model's inputs, -1 the first."""
    gives: tuple[int, ...]
    """Values that are needed after it."""
    run: Callable[[Sequence[Value]], list[Value]]
    """From what it takes to what it gives."""
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]
    random: bool
    """Whether it draws random numbers."""


_OPERATIONS = 0xF_FFFF
"""Bits of a seed that tell operations apart."""


def draw_for(number: int) -> None:
    """Let what one operation draws depend on the seed and on the operation alone, wherever the model is cut."""
    torch.default_generator.manual_seed(torch.default_generator.initial_seed() & ~_OPERATIONS | number)


class Trace(ABC):
    """A model as operations."""

    operations: list[Operation]
    results: tuple[int, ...]
    """The values that the model returns."""
    summarises: bool = False
    """Whether one of these has no row for every sample: a loss, say."""
    remembers: bool = False
    """Whether a call changes what the model keeps."""
    counts: bool = False
    """Whether it is good for batches of one size only, as the model computes with how many samples there are."""

    @abstractmethod
    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The model's inputs, in the order of their numbers."""

    @abstractmethod
    def returned(self, values: Sequence[Value]) -> Any:
        """What the model returns, from its results."""

    @abstractmethod
    def part(self, first: int, last: int) -> Part:
        """The operations from `first` up to, not including, `last`."""

    @abstractmethod
    def execute(self, number: int, values: dict[int, Value]) -> Value:
        """Run one operation on the values there are."""

    def cuts(self) -> list[int]:
        """Where the list may be cut: in front of which operations."""
        forbidden: set[int] = set()
        for number, operation in enumerate(self.operations):
            for needed in operation.inputs:
                if needed >= 0 and self._inseparable(needed, number):
                    forbidden.update(range(needed + 1, number + 1))
        return [number for number in range(1, len(self.operations)) if number not in forbidden]

    def changes(self, number: int) -> bool:
        """Whether an operation may change what it is given in place."""
        return True

    def changes_buffers(self, first: int, last: int) -> bool:
        """Whether a stretch may change what the model keeps from one call to the next."""
        return True

    def _inseparable(self, source: int, target: int) -> bool:
        """Whether two operations must be in one part."""
        return False

    def crossing(self) -> list[list[int]]:
        """In front of each operation, the values of earlier ones that are still needed."""
        last = list(range(len(self.operations)))
        for number, operation in enumerate(self.operations):
            for needed in operation.inputs:
                if needed >= 0:
                    last[needed] = number
        for result in self.results:
            last[result] = len(self.operations)
        alive: list[list[int]] = []
        open_: list[int] = []
        for number in range(len(self.operations)):
            open_ = [value for value in open_ if last[value] >= number]
            alive.append(list(open_))
            open_.append(number)
        return alive

    def ends(self, first: int, last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a stretch takes from before and gives to those after."""
        takes: dict[int, None] = {}
        for operation in self.operations[first:last]:
            takes.update((needed, None) for needed in operation.inputs if not first <= needed < last)
        later = {needed for operation in self.operations[last:] for needed in operation.inputs} | set(self.results)
        return tuple(takes), tuple(number for number in range(first, last) if number in later)


# -- an nn.Sequential ------------------------------------------------------------------------------------------------


class ChainTrace(Trace):
    """An `nn.Sequential`, with those inside it laid open."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self._layers = list(_flattened(model, ""))
        self.operations = [
            Operation(
                name,
                (number - 1,),
                tuple(f"{name}.{own}" for own, _ in layer.named_parameters()),
                type(layer).__name__,
            )
            for number, (name, layer) in enumerate(self._layers)
        ]
        self.results = (len(self._layers) - 1,)

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if len(args) != 1 or kwargs:
            raise UsageError(f"an nn.Sequential takes one input; it got {len(args) + len(kwargs)}")
        return [args[0]]

    def returned(self, values: Sequence[Value]) -> Any:
        return values[0]

    def part(self, first: int, last: int) -> Part:
        layers = [layer for _, layer in self._layers[first:last]]
        draws = [_draws(layer) for layer in layers]

        def run(values: Sequence[Value]) -> list[Value]:
            (value,) = values
            for number, (layer, random) in enumerate(zip(layers, draws, strict=True), first):
                if random:
                    draw_for(number)
                value = layer(value)
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"layer '{self._layers[last - 1][0]}' of the nn.Sequential gives a {type(value).__name__}; between "
                    "parts of a pipeline it must be one tensor"
                )
            return [value]

        own = nn.ModuleList(layers)
        takes, gives = self.ends(first, last)
        return Part(takes, gives, run, tuple(own.parameters()), tuple(own.buffers()), any(draws))

    def changes_buffers(self, first: int, last: int) -> bool:
        inside = (module for _, layer in self._layers[first:last] for module in layer.modules())
        return any(module.training and any(True for _ in module.buffers(recurse=False)) for module in inside)

    def _inseparable(self, source: int, target: int) -> bool:
        return bool(getattr(self._layers[target][1], "inplace", False))

    def execute(self, number: int, values: dict[int, Value]) -> Value:
        return self._layers[number][1](values[number - 1])


def _flattened(model: nn.Sequential, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in model._modules.items():
        if type(layer) is nn.Sequential and not _hooked(layer):
            yield from _flattened(layer, f"{path}{name}.")
        elif layer is not None:
            yield f"{path}{name}", layer


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw random numbers: what is not one of torch's own layers may."""
    for inner in module.modules():
        if isinstance(inner, nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.MultiheadAttention):
            return True
        if not type(inner).__module__.startswith("torch.nn"):
            return True
    return False


def _may_remember(module: nn.Module) -> bool:
    """Whether a layer that is not one of torch's own has buffers: it may change them."""
    own = (inner for inner in module.modules() if not type(inner).__module__.startswith("torch.nn"))
    return any(True for inner in own for _ in inner.buffers(recurse=False))


# -- any model -------------------------------------------------------------------------------------------------------

_IGNORED = ("_assert", "sym_constrain_range", "_guards_fn")
_GRADIENTS = "with gradients"
"""What an operation knows of itself, if it is under `no_grad` or the like."""


class GraphTrace(Trace):
    """A model that `torch.export` has traced."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = model
        self._module = module = _exported(model, args, kwargs)
        info: Any = module.graph._codegen
        self._given: pytree.TreeSpec = info.pytree_info.in_spec
        self._spec: pytree.TreeSpec = info.pytree_info.out_spec
        self._inputs: dict[fx.Node, int] = {}
        self._nodes: list[fx.Node] = []
        self._number: dict[fx.Node, int] = {}
        flat: list[fx.Node] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._inputs[node] = -1 - len(self._inputs)
            elif node.op == "call_function" and not any(word in str(node.target) for word in _IGNORED):
                _unseal(node)
                self._number[node] = len(self._nodes)
                self._nodes.append(node)
            elif node.op == "output":
                flat = list(pytree.tree_leaves(node.args[0]))
        self.operations = [self._operation(node) for node in self._nodes]
        if not all(isinstance(node, fx.Node) and node in self._number for node in flat):
            raise UsageError(
                "the model returns one of its inputs or parameters, or a constant; a pipeline needs it to return only "
                "what it computes"
            )
        self.results = tuple(self._number[node] for node in flat)
        batched = pytree.tree_leaves(_batched(args, kwargs))
        self.counts = any(one and not _has_free_rows(node) for node, one in zip(self._inputs, batched, strict=True))
        self.summarises = not self.counts and not all(_has_free_rows(node) for node in flat)
        self.remembers = any(map(self._remembers, self._nodes))

    def _remembers(self, node: fx.Node) -> bool:
        return any(map(self._buffer, _changed(node)))

    def changes_buffers(self, first: int, last: int) -> bool:
        return any(self._remembers(node) or _has_statistics(node) for node in self._nodes[first:last])

    def _buffer(self, node: fx.Node) -> bool:
        """Whether it is a buffer, or a view of one."""
        while node.op == "call_function" and _is_view(node):
            node = node.all_input_nodes[0]
        return node.op == "get_attr" and self._parameter(node) is None

    def _operation(self, node: fx.Node) -> Operation:
        inputs = [self._number.get(needed, self._inputs.get(needed)) for needed in node.all_input_nodes]
        parameters = [str(needed.target) for needed in node.all_input_nodes if self._parameter(needed) is not None]
        if isinstance(node.target, LayerCall):
            parameters += node.target.parameters()
        shown = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
        return Operation(node.name, tuple(one for one in inputs if one is not None), tuple(parameters), shown)

    def _parameter(self, node: fx.Node) -> nn.Parameter | None:
        if node.op != "get_attr":
            return None
        value = _attribute(self._module, str(node.target))
        return value if isinstance(value, nn.Parameter) else None

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._given:
            raise UsageError("the model is called with other arguments than when it was traced")
        return leaves

    def returned(self, values: Sequence[Value]) -> Any:
        return pytree.tree_unflatten(list(values), self._spec)

    def _inseparable(self, source: int, target: int) -> bool:
        value = self._nodes[source].meta.get("val")
        if not isinstance(value, torch.Tensor | int | torch.SymInt):
            return True  # several values at once are taken apart where they are made
        return self._nodes[source] in _changed(self._nodes[target])

    def changes(self, number: int) -> bool:
        schema = getattr(self._nodes[number].target, "_schema", None)
        return schema is not None and bool(schema.is_mutable)

    def part(self, first: int, last: int) -> Part:
        takes, gives = self.ends(first, last)
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        by_number = {number: node for node, number in [*self._number.items(), *self._inputs.items()]}
        for number in takes:
            known[by_number[number]] = graph.placeholder(by_number[number].name)
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, torch.Tensor] = {}
        random = False

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = graph.get_attr(str(node.target))
                value = _attribute(self._module, str(node.target))
                (parameters if isinstance(value, nn.Parameter) else buffers)[id(value)] = value
            return known[node]

        for number, node in enumerate(self._nodes[first:last], first):
            if _is_random(node):
                random = True
                graph.call_function(draw_for, (number,))
            known[node] = copy = graph.node_copy(node, copied)
            if _is_quiet(node):
                operation: Any = node.target
                copy.target, copy.args = _without_gradients, (operation, *copy.args)
            if isinstance(node.target, LayerCall):
                parameters.update((id(value), value) for value in node.target.layer.parameters())
                buffers.update((id(value), value) for value in node.target.layer.buffers())
        graph.output([known[by_number[number]] for number in gives])
        module = fx.GraphModule(self._module, graph)

        def run(values: Sequence[Value]) -> list[Value]:
            return list(module(*values))

        return Part(takes, gives, run, tuple(parameters.values()), tuple(buffers.values()), random)

    def execute(self, number: int, values: dict[int, Value]) -> Value:
        node = self._nodes[number]

        def value(needed: fx.Node) -> Any:
            if needed.op == "get_attr":
                return _attribute(self._module, str(needed.target))
            return values[self._number.get(needed, self._inputs.get(needed, 0))]

        args = fx.map_arg(node.args, value)
        kwargs = fx.map_arg(node.kwargs, value)
        target: Any = node.target
        return _without_gradients(target, *args, **kwargs) if _is_quiet(node) else target(*args, **kwargs)


def _batched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of each argument, whether it has a row for every sample."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    size = leaves[0].shape[0] if leaves else 0
    return pytree.tree_map(
        lambda leaf: isinstance(leaf, torch.Tensor) and bool(leaf.dim()) and leaf.shape[0] == size, (args, kwargs)
    )


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    shapes = pytree.tree_map(lambda one: {0: torch.export.Dim.AUTO} if one else None, _batched(args, kwargs))
    try:
        # What torch.export would print is more than the one sentence that it comes to.
        with torch.enable_grad(), _without_own_gradients(), contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()), strict=False
            )
    except Exception as error:  # whatever a model's own code raises, too
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"the model cannot be traced by torch.export ({why}), nor is it an nn.Sequential with a layer for every "
            "part; write its forward without decisions that depend on values, or as an nn.Sequential"
        ) from None
    module = program.module(check_guards=False)
    _open(module)
    return module


def _open(module: fx.GraphModule) -> None:
    """Lay open what a model computes under `no_grad`; those operations know that it is."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, inner, *operands = node.args
        body = _attribute(module, inner.target)
        _open(body)
        values = dict(zip((one for one in body.graph.nodes if one.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body.graph, values)
        for old, new in values.items():
            if old.op == "get_attr":
                new.target = f"{inner.target}.{old.target}"
            elif old.op == "call_function":
                new.meta.setdefault(_GRADIENTS, enabled)
        for taken in list(node.users):
            taken.replace_all_uses_with(results[taken.args[1]])
            graph.erase_node(taken)
        graph.erase_node(node)


def _without_gradients(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return operation(*args, **kwargs)


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


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _unseal(node: fx.Node) -> None:
    """Let the layer itself be called, where it was sealed for the trace."""
    call = called(node.target, node.args[1] if len(node.args) == 2 else None)
    if call is not None:
        node.target, node.args = call, node.args[:1]


def _changed(node: fx.Node) -> list[fx.Node]:
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


def _given(node: fx.Node) -> dict[str, Any]:
    """What an operation is called with, by name."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _has_statistics(node: fx.Node) -> bool:
    """Whether it is a norm that keeps a running mean of what it sees; its schema does not tell that it does."""
    given = _given(node)
    return given.get("running_mean") is not None and bool(given.get("training", given.get("use_input_stats")))


def _is_quiet(node: fx.Node) -> bool:
    """Whether no gradient goes through an operation."""
    return not node.meta.get(_GRADIENTS, True) and isinstance(node.target, torch._ops.OpOverload)


def _is_view(node: fx.Node) -> bool:
    """Whether an operation gives the same memory that it takes."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _has_free_rows(node: fx.Node) -> bool:
    """Whether there may be any number of rows, as in an input of samples and in what is made of it."""
    value = node.meta.get("val")
    rows = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0
    return isinstance(rows, torch.SymInt) and rows.node.maybe_as_int() is None


def _is_random(node: fx.Node) -> bool:
    """Whether an operation draws, with the arguments that it has."""
    if isinstance(node.target, LayerCall):
        return node.target.random
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = _given(node)
    if "scaled_dot_product" in schema.name:
        return bool(given.get("dropout_p", 0.0))
    if "dropout" in schema.name or "train" in given:
        share = given.get("p", given.get("dropout", 1.0))
        return bool(given.get("train", True)) and share != 0
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> Trace:
    """The model as operations, of which there are enough for so many parts."""
    chain = ChainTrace(model) if type(model) is nn.Sequential and not _hooked(model) else None
    if chain is not None and len(chain.operations) >= 2 * parts and not _may_remember(model):
        return chain
    try:
        return GraphTrace(model, args, kwargs)
    except UsageError:
        if chain is not None and len(chain.operations) >= parts:
            return chain
        raise
