"""A pipeline between the call of the model and the conveyor: who has which part, and what goes where when."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.collectives.group import Group
from paceline.events import Recorder
from paceline.plan.sheet import batch_of, has_rows
from paceline.plan.trace import GraphTrace, Trace
from paceline.simulate.schedules import SCHEDULES, Operation, Order
from paceline.strategies.split.conveyor import Conveyor, Stage, laid_out, lifted
from paceline.strategies.split.home import Home
from paceline.strategies.split.outlines import outlines
from paceline.strategies.split.passage import Passage

_END = -7
"""Tag of what the last stage tells all; below it those of gradients of parameters that several stages use."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What a line needs to know of where it runs."""

    ranks: Sequence[int]
    """In the team, of the workers of this replica."""
    schedule: str
    recorder: Recorder
    slow: Callable[[float], None]
    """Called with the seconds of every pass: it may let it take longer."""
    traceable: Callable[[], contextlib.AbstractContextManager[None]]
    """While in there, the model can be traced, or called without values."""


class Line:
    """The pipeline as one of its workers has it, once the model is cut."""

    def __init__(
        self,
        model: nn.Module,
        home: Home,
        group: Group,
        place: Place,
        traced: Trace,
        bounds: list[int],
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """bounds: where each part ends, in the trace of the model as it is called with the example."""
        self._model, self.home, self.group, self._place = model, home, group, place
        self._rank, self._size = group.rank, group.size
        self._count = len(bounds)
        self._owners = [stage % self._size for stage in range(self._count)]
        self.is_end = self._owners[-1] == self._rank
        self._first: Trace = traced
        self._stage_of_name: dict[str, int] = {}
        start = 0
        for stage, end in enumerate(bounds):
            self._stage_of_name.update((operation.name, stage) for operation in traced.operations[start:end])
            start = end
        self._traces: dict[Any, tuple[Trace, Conveyor]] = {}
        self._shapes: dict[Any, list[torch.Tensor]] = {}
        self._orders: dict[int, list[Operation]] = {}
        self._users: dict[int, list[int]] = {}
        """By parameter, the ranks that use it."""
        self._first_user: dict[int, int] = {}
        """By parameter, the first stage that uses it."""
        self._note_users(traced, bounds)
        self.own = self._share_out()
        self._traces[self.key(*example)] = (traced, self._conveyor(traced, bounds))

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
        # A trace with one sample takes it that there always is one.
        return (shapes, str(spec), modes, frozen, batch if self._first.counts else batch == 1)

    def trace(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """The model as it is called now: in another mode, or with inputs of another kind, it is another one."""
        if key not in self._traces:
            if isinstance(self._first, GraphTrace):
                with self._place.traceable():
                    traced: Trace = GraphTrace(self._model, args, kwargs)
            else:
                traced = self._first
            bounds = self._bounds(traced)
            self._note_users(traced, bounds)
            self._traces[key] = (traced, self._conveyor(traced, bounds))
        return self._traces[key][0]

    def _bounds(self, traced: Trace) -> list[int]:
        """The same cut of another trace: operations stay with those of the same name, others with their inputs.

        No stage comes to use a parameter that belongs to a later one: whoever updates it must be the first to use it.
        """
        names = self._names()
        stages: list[int] = []
        for operation in traced.operations:
            before = stages[-1] if stages else 0
            owners = [self._first_user.get(names[name], self._count - 1) for name in operation.parameters]
            stages.append(max(before, self._stage_of_name.get(operation.name, before), *owners, 0))
        allowed = [0, *traced.cuts(), len(stages)]
        bounds = []
        for stage in range(self._count - 1):
            end = sum(one <= stage for one in stages)
            bounds.append(max(place for place in allowed if place <= end))
        return [*bounds, len(stages)]

    def outlines(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> list[torch.Tensor]:
        """What the model returns for a batch of this size, without values."""
        key = (kind, batch, torch.is_autocast_enabled("cpu"))
        if key not in self._shapes:
            with self._place.traceable():
                self._shapes[key] = outlines(self._model, args, kwargs)
        return self._shapes[key]

    # -- who does what -----------------------------------------------------------------------------------------------

    def _conveyor(self, traced: Trace, bounds: list[int]) -> Conveyor:
        starts = [0, *bounds[:-1]]
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
            for stage in range(self._count)
            if self._owners[stage] == self._rank
        }
        return Conveyor(
            stages,
            makers,
            takers,
            traced.results,
            self._count,
            self._owners,
            self.group.mailbox,
            self._place.recorder,
            self._place.ranks,
            self._place.slow,
        )

    def _names(self) -> dict[str, int]:
        """The number of each parameter."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.home.parameters)}
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: numbers[id(parameter)] for name, parameter in named}

    def _note_users(self, traced: Trace, bounds: list[int]) -> None:
        """Remember which workers use which parameters, in the order of their stages."""
        names = self._names()
        start = 0
        for stage, end in enumerate(bounds):
            for operation in traced.operations[start:end]:
                for name in operation.parameters:
                    self._first_user.setdefault(names[name], stage)
                    users = self._users.setdefault(names[name], [])
                    if self._owners[stage] not in users:
                        users.append(self._owners[stage])
            start = end

    def _share_out(self) -> list[nn.Parameter]:
        """What this worker updates: what it is the first to use; and the last one what nobody uses."""
        owner = {number: users[0] for number, users in self._users.items()}
        own = [
            parameter
            for number, parameter in enumerate(self.home.parameters)
            if owner.get(number, self._size - 1) == self._rank
        ]
        self.home.keep(own)
        for parameter in self.home.parameters:
            parameter.grad = None
        return own

    def _order(self, microbatches: int) -> Order:
        if microbatches not in self._orders:
            chunks = self._count // self._size
            schedule = self._place.schedule
            if schedule == "interleaved" and microbatches % self._size:
                order = _forwards(microbatches, chunks) + _backwards(microbatches, chunks)
            else:
                order = SCHEDULES[schedule](self._size, microbatches, chunks)[self._rank]
            self._orders[microbatches] = order
        return self._orders[microbatches]

    # -- running -----------------------------------------------------------------------------------------------------

    def _conveyor_of(self, passage: Passage) -> Conveyor:
        return self._traces[passage.call.kind][1]

    def forward(self, passage: Passage) -> None:
        chunks = self._count // self._size
        self._conveyor_of(passage).run(_forwards(len(passage.sizes), chunks), passage)

    def backward(self, passage: Passage, *, forwarded: bool) -> None:
        count = len(passage.sizes)
        order = _backwards(count, self._count // self._size) if forwarded else self._order(count)
        self._conveyor_of(passage).run(order, passage)

    def after_backward(self) -> None:
        """Bring the gradients of parameters that several stages use to the one that updates them."""
        mailbox = self.group.mailbox
        for number, (owner, *others) in sorted(self._users.items()):
            parameter = self.home.parameters[number]
            if not others or not parameter.requires_grad or self._rank not in (owner, *others):
                continue
            if self._rank != owner:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                mailbox.send(owner, gradient.detach().contiguous(), _END - 1 - number).wait()
                parameter.grad = None
                continue
            for other in others:
                gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
                mailbox.receive(other, gradient, _END - 1 - number).wait()
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def from_end(self, value: torch.Tensor | None) -> torch.Tensor:
        mailbox, end = self.group.mailbox, self._owners[-1]
        if self._rank == end:
            assert value is not None
            order = laid_out(value)
            whole = value.detach().permute(order).contiguous()
            label = msgspec.json.encode([str(whole.dtype).removeprefix("torch."), list(whole.shape), order])
            text = torch.frombuffer(bytearray(label.ljust(256)), dtype=torch.uint8)
            sent = []
            for peer in range(self._size):
                if peer != end:
                    sent += [mailbox.send(peer, text, _END), mailbox.send(peer, whole, _END)]
            for sending in sent:
                sending.wait()
            return lifted(whole, order)
        text = torch.empty(256, dtype=torch.uint8)
        mailbox.receive(end, text, _END).wait()
        dtype, shape, order = msgspec.json.decode(bytes(text.numpy()).strip())
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        mailbox.receive(end, made, _END).wait()
        return lifted(made, order)


def _forwards(microbatches: int, chunks: int) -> Order:
    return [Operation("F", number, chunk) for chunk, number in itertools.product(range(chunks), range(microbatches))]


def _backwards(microbatches: int, chunks: int) -> Order:
    chunked = itertools.product(reversed(range(chunks)), range(microbatches))
    return [Operation("B", number, chunk) for chunk, number in chunked]
