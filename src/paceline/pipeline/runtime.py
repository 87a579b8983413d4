"""A pipeline between the call of the model and the runner: who has which part, and what goes where when."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.collectives.group import Group
from paceline.errors import UsageError
from paceline.events import Recorder
from paceline.graph.batch_dim import batch_of, has_rows
from paceline.graph.module_attributes import module_attributes
from paceline.graph.trace import GraphTrace, ModelTrace
from paceline.pipeline import loss_check
from paceline.pipeline.batch_run import BatchRun
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.microbatch_loss import MicrobatchLoss
from paceline.pipeline.ownership import Ownership
from paceline.pipeline.shape_inference import outlined
from paceline.pipeline.shared_state import SharedState
from paceline.pipeline.stage_assignment import StageAssignment
from paceline.pipeline.stage_runner import Stage, StageRunner, laid_out, lifted
from paceline.schedules import SCHEDULES, Order, StageOperation, shared_orders

_TRACES = 256
"""How many are kept, of the model as it was called in different ways."""
_REHEARSALS = (1, 2, 4, 8, 16)
"""At which uses of a kind of loss it is tried."""
_END = -7
"""Tag of what the last stage tells all; those below are its owners'."""


@dataclasses.dataclass(frozen=True)
class RuntimeContext:
    """What a line needs to know of where it runs."""

    ranks: Sequence[int]
    """In the team, of the workers of this replica."""
    assignment: StageAssignment
    schedule: str
    recorder: Recorder
    slow: Callable[[float], None]
    """Called with the seconds of every pass: it may let it take longer."""
    traceable: Callable[[], contextlib.AbstractContextManager[None]]
    """While in there, the model can be traced, or called without values."""
    in_step: bool
    """Whether others do the same at the same time, so that the schedule's order must be kept, come what may."""
    meet: Callable[[], object]
    """Returns once all workers of the replica have called it."""


class PipelineRuntime:
    """The pipeline as one of its workers has it, once the model is cut."""

    def __init__(
        self,
        model: nn.Module,
        home: SharedState,
        group: Group,
        place: RuntimeContext,
        traced: ModelTrace,
        bounds: list[int],
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """bounds: where each part ends, in the trace of the model as it is called with the example."""
        self._model, self.home, self.group, self._place = model, home, group, place
        self._rank, self._size = group.rank, group.size
        self._count = len(bounds)
        self._assignment = place.assignment
        self._stages = self._assignment.stages_of(self._rank)
        self._end = self._assignment.workers[-1][0]
        self.is_end = self._end == self._rank
        self._first: ModelTrace = traced
        self._stage_of_name: dict[str, int] = {}
        start = 0
        for stage, end in enumerate(bounds):
            self._stage_of_name.update((operation.name, stage) for operation in traced.operations[start:end])
            start = end
        self._traces: dict[Any, tuple[ModelTrace, StageRunner]] = {}
        self._shapes: dict[Any, list[torch.Tensor]] = {}
        self._uses: Counter[Any] = Counter()
        """Of each kind of loss."""
        self._orders: dict[int, list[StageOperation]] = {}
        self._owners = Ownership(self._assignment, home.parameters, group.mailbox, place.recorder, place.ranks)
        runner = self._runner(traced, bounds)
        self._note_users(traced, bounds)
        self.own = self._owners.share_out()
        self._owners.find_routes()
        home.keep(self.own)
        for parameter in home.parameters:
            parameter.grad = None
        self._traces[self.key(*example)] = (traced, runner)

    # -- what the model is called with -------------------------------------------------------------------------------

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls that one trace is good for."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = batch_of(leaves)
        shapes = tuple(
            (leaf.dtype, has_rows(leaf, batch), tuple(leaf.shape)[1 if has_rows(leaf, batch) else 0 :])
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        )
        modes = tuple(module.training for module in self._model.modules())
        frozen = tuple(parameter.requires_grad for parameter in self._model.parameters())
        read = module_attributes(self._model) if isinstance(self._first, GraphTrace) else ()
        # A trace with one sample takes it that there always is one.
        return (shapes, str(spec), modes, frozen, read, batch if self._first.counts else batch == 1)

    def trace(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelTrace:
        """The model as it is called now: in another mode, or with inputs of another kind, it is another one."""
        if key not in self._traces:
            if isinstance(self._first, GraphTrace):
                with self._place.traceable():
                    traced: ModelTrace = GraphTrace(self._model, args, kwargs)
                traced.mixes = self._first.mixes
            else:
                traced = self._first
            bounds = self._bounds(traced)
            runner = self._runner(traced, bounds)
            self._note_users(traced, bounds)
            self._owners.find_routes()
            _make_room(self._traces)
            self._traces[key] = (traced, runner)
        self._traces[key] = self._traces.pop(key)  # the one that was used last comes last
        traced = self._traces[key][0]
        for module, name, value in traced.changed:
            setattr(module, name, value)
        return traced

    def _bounds(self, traced: ModelTrace) -> list[int]:
        """The same cut of another trace: operations stay with those of the same name, others with their inputs.

        No stage comes to use a parameter that belongs to a later one: whoever updates it must be the first to use it.
        """
        names = self._names()
        stages: list[int] = []
        for operation in traced.operations:
            before = stages[-1] if stages else 0
            first = [self._owners.first_stage(names[name]) for name in operation.parameters]
            stages.append(max(before, self._stage_of_name.get(operation.name, before), *first, 0))
        allowed = [0, *traced.cuts(), len(stages)]
        bounds = []
        for stage in range(self._count - 1):
            end = sum(one <= stage for one in stages)
            bounds.append(max(place for place in allowed if place <= end))
        return [*bounds, len(stages)]

    def outlines(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> list[torch.Tensor]:
        """What the model computes and returns for a batch of this size, without values."""
        key = (kind, batch, torch.is_autocast_enabled("cpu"))
        if key not in self._shapes:
            with self._place.traceable():
                made = outlined(self._model, args, kwargs)
            _make_room(self._shapes)
            self._shapes[key] = self._traces[kind][0].computed(made)
        return self._shapes[key]

    # -- who does what -----------------------------------------------------------------------------------------------

    def _runner(self, traced: ModelTrace, bounds: list[int]) -> StageRunner:
        starts = [0, *bounds[:-1]]
        self._check_buffers(traced, starts, bounds)
        ends = [traced.ends(start, end) for start, end in zip(starts, bounds, strict=True)]
        makers = {number: stage for stage, (_, gives) in enumerate(ends) for number in gives}
        takes = [list(taken) for taken, _ in ends]
        takes[-1] += [
            number for number in traced.results if makers[number] != self._count - 1 and number not in takes[-1]
        ]
        takers: dict[int, list[int]] = {}
        for stage, taken in enumerate(takes):
            for number in taken:
                takers.setdefault(number, []).append(stage)
        stages = {
            stage: Stage(stage, traced.part(starts[stage], bounds[stage]), tuple(takes[stage]))
            for stage in self._stages
        }
        return StageRunner(
            stages,
            makers,
            takers,
            traced.results,
            self._assignment,
            self.group.mailbox,
            self._place.recorder,
            self._place.ranks,
            self._place.slow,
            in_step=self._place.in_step,
        )

    def _check_buffers(self, traced: ModelTrace, starts: list[int], ends: list[int]) -> None:
        """Refuse what workers that share a stage would not agree on."""
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
            workers = self._assignment.replicas[stage]
            if workers > 1 and traced.changes_buffers(start, end):
                raise UsageError(
                    f"stage {stage} has {workers} workers, and its part of the model may change buffers with every "
                    "microbatch, as batch norm does, which they would not agree on; let it have one worker, or no such "
                    "layers"
                )

    def _names(self) -> dict[str, int]:
        """The number of each parameter."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.home.parameters)}
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: numbers[id(parameter)] for name, parameter in named}

    def _note_users(self, traced: ModelTrace, bounds: list[int]) -> None:
        """Remember which stages use which parameters."""
        names = self._names()
        start = 0
        for stage, end in enumerate(bounds):
            for operation in traced.operations[start:end]:
                for name in operation.parameters:
                    self._owners.note(names[name], stage)
            start = end

    def _order(self, microbatches: int) -> Order:
        if microbatches not in self._orders:
            chunks = len(self._stages)
            schedule = self._place.schedule
            if self._assignment.shared:
                order = shared_orders(schedule, self._assignment.replicas, microbatches)[self._rank]
            elif SCHEDULES[schedule].has_chunks and microbatches % self._size:
                order = _forwards(microbatches, chunks) + _backwards(microbatches, chunks)
            else:
                order = SCHEDULES[schedule].orders(self._size, microbatches, chunks)[self._rank]
            self._orders[microbatches] = order
        return self._orders[microbatches]

    # -- running -----------------------------------------------------------------------------------------------------

    def _runner_of(self, batch_run: BatchRun) -> StageRunner:
        return self._traces[batch_run.call.kind][1]

    def _own(self, order: Order) -> Order:
        """What of it is this worker's turn."""
        at = self._assignment.at
        return [one for one in order if at(self._stages[one.chunk], one.microbatch) == self._rank]

    def forward(self, batch_run: BatchRun) -> None:
        self._owners.meet()
        order = _forwards(len(batch_run.sizes), len(self._stages))
        self._runner_of(batch_run).run(self._own(order), batch_run)

    def backward(self, batch_run: BatchRun, *, forwarded: bool) -> None:
        self._owners.meet()
        count = len(batch_run.sizes)
        order = self._own(_backwards(count, len(self._stages))) if forwarded else self._order(count)
        self._runner_of(batch_run).run(order, batch_run)

    def after_backward(self, batch_run: BatchRun) -> None:
        """Let gradients be whole where parameters are updated."""
        self._owners.bring()
        if len(batch_run.sizes) < max(self._assignment.replicas):
            # Who had no microbatch may be behind, reading a version that would be overwritten.
            self._place.meet()

    def updated(self) -> None:
        """This worker's optimizer has made its step."""
        self._owners.updated()

    def check_loss(self, loss: Deferred, shares: MicrobatchLoss) -> None:
        """Where the last stage is, now and then while a kind of loss is new; all are told.

        Not only the first time: targets that are all the same hide with which rows they are compared.
        """
        kind = loss_check.kind(loss, shares.sizes)
        self._uses[kind] += 1
        if self._uses[kind] not in _REHEARSALS:
            return
        outcome = self.from_end(torch.tensor(loss_check.adds_up(loss, shares)) if self.is_end else None)
        if not outcome:
            raise UsageError(
                "what microbatches give to the loss does not add up to that of the batch: it compares samples with "
                "each other, or their rows are not outermost where it computes with them; let it keep samples in the "
                "first dimension, or write microbatches=1"
            )

    def to_end(self, own: dict[int, list[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        end, *others = self._assignment.workers[-1]
        if self._rank in others:
            counts = [[microbatch, len(values)] for microbatch, values in own.items()]
            self._tell([end], torch.tensor(counts, dtype=torch.long).view(-1, 2))
            for value in itertools.chain(*own.values()):
                self._tell([end], value)
        elif self._rank == end:
            for other in others:
                for microbatch, count in self._hear(other).tolist():
                    own[microbatch] = [self._hear(other) for _ in range(count)]
        return dict(sorted(own.items()))

    def from_end(self, value: torch.Tensor | None) -> torch.Tensor:
        if self._rank != self._end:
            return self._hear(self._end)
        assert value is not None
        return self._tell([peer for peer in range(self._size) if peer != self._end], value)

    def _tell(self, peers: Sequence[int], value: torch.Tensor) -> torch.Tensor:
        """Send a tensor to those who do not know what it will be like."""
        mailbox, order = self.group.mailbox, laid_out(value)
        whole = value.detach().permute(order).contiguous()
        label = msgspec.json.encode([str(whole.dtype).removeprefix("torch."), list(whole.shape), order])
        text = torch.frombuffer(bytearray(label.ljust(256)), dtype=torch.uint8)
        sent = [mailbox.send(peer, part, _END) for peer in peers for part in (text, whole)]
        for sending in sent:
            sending.wait()
        return lifted(whole, order)

    def _hear(self, peer: int) -> torch.Tensor:
        mailbox = self.group.mailbox
        text = torch.empty(256, dtype=torch.uint8)
        mailbox.receive(peer, text, _END).wait()
        dtype, shape, order = msgspec.json.decode(bytes(text.numpy()).strip())
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        mailbox.receive(peer, made, _END).wait()
        return lifted(made, order)


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) == _TRACES:
        del kept[next(iter(kept))]


def _forwards(microbatches: int, chunks: int) -> Order:
    return [
        StageOperation("F", number, chunk) for chunk, number in itertools.product(range(chunks), range(microbatches))
    ]


def _backwards(microbatches: int, chunks: int) -> Order:
    chunked = itertools.product(reversed(range(chunks)), range(microbatches))
    return [StageOperation("B", number, chunk) for chunk, number in chunked]
