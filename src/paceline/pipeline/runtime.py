"""One worker's pipeline once the model is cut: its traces, the order of its passes, and its parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.collectives.group import Group
from paceline.collectives.machines_group import MachinesGroup
from paceline.graph.batch_dim import batch_size, is_batched
from paceline.graph.module_attributes import ModuleAttributes, module_attributes
from paceline.graph.trace import GraphTrace, ModelTrace
from paceline.parameters.step_snapshot import StepSnapshot
from paceline.pipeline.context import PipelineContext, Traceable
from paceline.pipeline.loss_check import LossChecker
from paceline.pipeline.microbatches import Microbatches, ModelCall
from paceline.pipeline.model_loss import loss_is_divisible
from paceline.pipeline.ownership import Ownership
from paceline.pipeline.stage_links import ResultExchange, StageLinks
from paceline.pipeline.stage_runner import StageRunner
from paceline.pipeline.stages import StageAssignment, check_buffers, stage_graph
from paceline.schedules import SCHEDULES, Order, StageOperation, shared_orders

_TRACES = 256
"""Most traces, and shapes of outputs, that are kept."""


class PipelineRuntime:
    """Runs this worker's passes of each batch, and reduces gradients to the owners of parameters."""

    def __init__(
        self,
        model: nn.Module,
        group: Group | MachinesGroup,
        context: PipelineContext,
        traceable: Traceable,
        trace: ModelTrace,
        bounds: list[int],
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """bounds: the operation at which each stage ends, in the trace of the model's call with the example."""
        self._model, self.group, self.context, self._traceable = model, group, context, traceable
        self._assignment = assignment = StageAssignment.from_spec(context.spec)
        self._stages = assignment.stages_of(group.rank)
        self._links = StageLinks(group.mailbox, context.recorder, context.team_ranks, context.calls)
        self.exchange = ResultExchange(self._links, assignment)
        self.loss_checker = LossChecker(self.exchange)
        self._first = trace
        self._stage_of_name: dict[str, int] = {}
        """By the name of an operation in the first trace."""
        for stage, (start, end) in enumerate(itertools.pairwise([0, *bounds])):
            self._stage_of_name.update((operation.name, stage) for operation in trace.operations[start:end])
        self._traces: dict[Any, tuple[ModelTrace, StageRunner]] = {}
        self._output_shapes: dict[Any, list[torch.Tensor]] = {}
        self._orders: dict[int, Order] = {}
        self._parameters = list(model.parameters())
        self.ownership = Ownership(assignment, self._parameters, self._links)
        self.buffer_stages: dict[int, set[int]] = {}
        """By buffer, the stages that use it."""
        self.changing_stages: set[int] = set()
        """Stages that may change buffers."""
        self._said_changing = False
        self.on_routes: Callable[[], None] = lambda: None
        """Called after a trace in which stages may use other parameters and buffers than before."""
        runner = self._runner(trace, bounds)
        self.own = self.ownership.assign()
        """The parameters that this worker updates."""
        self.ownership.find_routes()
        for parameter in self._parameters:
            parameter.grad = None
        self._traces[self.key(*example)] = (trace, runner)

    # -- traces ------------------------------------------------------------------------------------------------------

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Key of the trace of a call: equal for calls that differ only in values and batch size."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = batch_size(leaves)
        shapes = tuple(
            (leaf.dtype, is_batched(leaf, batch), tuple(leaf.shape)[1 if is_batched(leaf, batch) else 0 :])
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        )
        modes = tuple(module.training for module in self._model.modules())
        frozen = tuple(parameter.requires_grad for parameter in self._model.parameters())
        attributes = module_attributes(self._model) if isinstance(self._first, GraphTrace) else ()
        # torch.export specialises a trace of one sample to batches of one.
        return (shapes, str(spec), modes, frozen, attributes, batch if self._first.fixed_batch else batch == 1)

    def trace(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelTrace:
        """The trace of this call; a call in another mode, or with inputs of another kind, is traced anew."""
        if key not in self._traces:
            if isinstance(self._first, GraphTrace):
                trace: ModelTrace = self._trace(args, kwargs)
            else:
                trace = self._first
            bounds = self._bounds(trace)
            runner = self._runner(trace, bounds)
            self.ownership.find_routes()
            self.on_routes()
            _evict(self._traces)
            self._traces[key] = (trace, runner)
        self._traces[key] = self._traces.pop(key)  # last in the order of use
        trace = self._traces[key][0]
        for module, name, value in trace.changed_attributes:
            setattr(module, name, value)
        return trace

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelTrace:
        with self._traceable():
            trace = GraphTrace(self._model, args, kwargs)
            results = infer_results(trace, self._model, args, kwargs) if trace.has_tail else []
        inputs, microbatches = trace.flat_inputs(args, kwargs), self.context.spec.microbatches
        # Its values are checked when it is used: only then the workers can agree on what the first of them finds.
        if self._first.reduces_batch or not loss_is_divisible(trace, results, inputs, microbatches, tried=False):
            trace.drop_tail()
        trace.mixes_samples = self._first.mixes_samples
        return trace

    def _bounds(self, trace: ModelTrace) -> list[int]:
        """The same cut for another trace: operations keep the stage of their name, new ones join their predecessor's.

        No stage may use a parameter of a later one: a parameter's owner is in the first stage that uses it.
        """
        numbers = self._parameter_numbers()
        stages: list[int] = []
        for operation in trace.operations:
            before = stages[-1] if stages else 0
            first = [self.ownership.first_stage(numbers[name]) for name in operation.parameters]
            stages.append(max(before, self._stage_of_name.get(operation.name, before), *first, 0))
        allowed = [0, *trace.cuts(), len(stages)]
        bounds = []
        for stage in range(len(self._assignment.workers) - 1):
            end = sum(one <= stage for one in stages)
            bounds.append(max(cut for cut in allowed if cut <= end))
        return [*bounds, len(stages)]

    def output_shapes(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> list[torch.Tensor]:
        """The model's results for a batch of this size, as meta tensors."""
        key = (kind, batch, torch.is_autocast_enabled("cpu"))
        if key not in self._output_shapes:
            with self._traceable():
                found = infer_results(self._traces[kind][0], self._model, args, kwargs)
            _evict(self._output_shapes)
            self._output_shapes[key] = found
        return self._output_shapes[key]

    def _runner(self, trace: ModelTrace, bounds: list[int]) -> StageRunner:
        """The runner of a trace's stages, whose use of parameters is recorded."""
        check_buffers(trace, bounds, self._assignment)
        graph = stage_graph(trace, bounds, self._stages)
        numbers, buffers = self._parameter_numbers(), self._buffer_numbers()
        for stage, (start, end) in enumerate(itertools.pairwise([0, *bounds])):
            for operation in trace.operations[start:end]:
                for name in operation.parameters:
                    self.ownership.add_user(numbers[name], stage)
                for name in operation.buffers:
                    if name in buffers:  # else it is a constant
                        self.buffer_stages.setdefault(buffers[name], set()).add(stage)
            if trace.changes_buffers(start, end):
                self.changing_stages.add(stage)
        return StageRunner(graph, self._assignment, self._links, self.context, self._recomputed(trace, bounds))

    def _recomputed(self, trace: ModelTrace, bounds: list[int]) -> set[int]:
        """The stages whose forward passes are computed again; not the last, whose backward passes follow at once."""
        if not self.context.spec.recompute:
            return set()
        ranges = list(itertools.pairwise([0, *bounds]))[:-1]
        changing = {stage for stage, part in enumerate(ranges) if trace.changes_buffers(*part)}
        if changing and not self._said_changing:
            self._said_changing = True
            stages = ", ".join(map(str, sorted(changing)))
            self.context.say(
                f"recompute leaves out stage{'s' * (len(changing) > 1)} {stages}: a second forward pass would change "
                "buffers, as those of batch norm, a second time"
            )
        return set(range(len(ranges))) - changing

    def _buffer_numbers(self) -> dict[str, int]:
        """Index of each buffer, by all of its names."""
        numbers = {id(buffer): number for number, buffer in enumerate(self._model.buffers())}
        named = self._model.named_buffers(remove_duplicate=False)
        return {name: numbers[id(buffer)] for name, buffer in named}

    def workers_of(self, stages: Iterable[int]) -> list[int]:
        """The workers of these stages; the last stage's without any."""
        chosen = sorted(stages) or [len(self._assignment.workers) - 1]
        return list(dict.fromkeys(worker for stage in chosen for worker in self._assignment.workers[stage]))

    def _parameter_numbers(self) -> dict[str, int]:
        """Index of each parameter, by all of its names."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: numbers[id(parameter)] for name, parameter in named}

    # -- running -----------------------------------------------------------------------------------------------------

    def enter(self, call: ModelCall) -> None:
        """What is sent and received from now on is of this call of the model."""
        self._links.call = call.number

    def forward(self, microbatches: Microbatches) -> None:
        """Runs all forward passes."""
        self._run(self._own_turns(self._passes("F", len(microbatches.sizes))), microbatches)

    def backward(self, microbatches: Microbatches, *, forwarded: bool) -> None:
        """Runs the schedule; only its backward passes if the forward passes have run already."""
        count = len(microbatches.sizes)
        order = self._own_turns(self._passes("B", count)) if forwarded else self._schedule(count)
        self._run(order, microbatches)

    def _run(self, order: Order, microbatches: Microbatches) -> None:
        self._traces[microbatches.call.kind][1].run(order, microbatches)
        self._links.record_arrivals()

    def _own_turns(self, order: Order) -> Order:
        """The operations that this worker runs, of all of its stages'."""
        worker, rank = self._assignment.worker, self.group.rank
        return [one for one in order if worker(self._stages[one.chunk], one.microbatch) == rank]

    def _passes(self, kind: str, microbatches: int) -> Order:
        """All forward or all backward passes of this worker's stages, stage by stage."""
        chunks = range(len(self._stages)) if kind == "F" else reversed(range(len(self._stages)))
        pairs = itertools.product(chunks, range(microbatches))
        return [StageOperation(kind, microbatch, chunk) for chunk, microbatch in pairs]

    def _schedule(self, microbatches: int) -> Order:
        if microbatches not in self._orders:
            chunks, size, rank = len(self._stages), self.group.size, self.group.rank
            schedule = self.context.spec.schedule
            if self._assignment.shared:
                order = shared_orders(schedule, self._assignment.counts, microbatches)[rank]
            elif SCHEDULES[schedule].has_chunks and microbatches % size:
                order = self._passes("F", microbatches) + self._passes("B", microbatches)
            else:
                order = SCHEDULES[schedule].orders(size, microbatches, chunks)[rank]
            self._orders[microbatches] = order
        return self._orders[microbatches]


def _evict(cache: dict[Any, Any]) -> None:
    """Makes room for one more entry by dropping the oldest."""
    if len(cache) == _TRACES:
        del cache[next(iter(cache))]


def infer_results(
    trace: ModelTrace, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The results of a trace as meta tensors."""
    results = trace.infer(trace.flat_inputs(args, kwargs))
    return [_meta(result) for result in ([_infer_output(model, args)] if results is None else results)]


def _infer_output(model: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    """A chain's output without values; random state, buffers and plain attributes are restored."""
    attributes = ModuleAttributes(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            output = _run_fake(model, args)
        except Exception:  # a layer that reads values cannot run on fake tensors
            snapshot = StepSnapshot(model)
            snapshot.take()
            try:
                output = model(*args)
            finally:
                snapshot.restore()
    attributes.restore()
    return output


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_fake(model: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    # Tensors that a model creates, or has besides its parameters and buffers, such as a mask, are not fake.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor.detach()) for name, tensor in tensors}
        fake: torch.Tensor = torch.func.functional_call(model, weights, tuple(map(mode.from_tensor, args)))
        return fake
