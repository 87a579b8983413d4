"""One shard of the parameters: its gradients, optimizer and versions; and the shards of all servers together."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline import failpoints
from paceline.config import OptimizerSpec, ParameterSpec, RunSpec, parse_compression, parse_correction
from paceline.errors import ServerLost
from paceline.parameters.compression import Codec, codec_class
from paceline.parameters.corrections import Corrections
from paceline.parameters.gradient_state import both, part_masks
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import plain
from paceline.parameters.joint import JointOptimizer, parts_of
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.optimizers import is_elementwise, same_kind
from paceline.parameters.reduction import CHUNK, Weights, combine_norms, weighted_sum
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.parameters.whole import WholeOptimizer
from paceline.parameters.worker_table import WorkerTable
from paceline.server import messages
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.server.record import ServerRecord, ShardNote


def describe_parameters(named: list[tuple[str, torch.nn.Parameter]], optimizer: Optimizer) -> tuple[ParameterSpec, ...]:
    """The parameters as a `RunSpec` describes them."""
    group_of = {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    return tuple(
        ParameterSpec(
            name,
            tuple(parameter.shape),
            parameter.stride(),
            str(parameter.dtype).removeprefix("torch."),
            group_of[id(parameter)],
        )
        for name, parameter in named
    )


def describe_optimizers(optimizer: Optimizer) -> tuple[OptimizerSpec, ...]:
    """The optimizer, or those that it stands for, as a `RunSpec` describes them."""
    return tuple(
        OptimizerSpec(
            type(part).__module__,
            type(part).__qualname__,
            [plain(group) for group in part.param_groups],
            plain(part.defaults),
        )
        for part in parts_of(optimizer)
    )


def rebuild(spec: RunSpec) -> tuple[list[tuple[str, torch.nn.Parameter]], Optimizer]:
    """Parameters without values, and an optimizer on them, as the workers have them."""
    named: list[tuple[str, torch.nn.Parameter]] = []
    members: list[list[torch.nn.Parameter]] = [[] for optimizer in spec.optimizers for _ in optimizer.groups]
    for known in spec.parameters:
        empty = torch.empty_strided(known.shape, known.stride, dtype=getattr(torch, known.dtype), device="meta")
        parameter = torch.nn.Parameter(empty, requires_grad=empty.is_floating_point() or empty.is_complex())
        named.append((known.name, parameter))
        members[known.group].append(parameter)
    made, inside = [], iter(members)
    for optimizer in spec.optimizers:
        kind = getattr(importlib.import_module(optimizer.module), optimizer.name)
        groups = [{**_tuples(group), "params": next(inside)} for group in optimizer.groups]
        made.append(same_kind(kind, groups, _tuples(optimizer.defaults)))
    return named, made[0] if len(made) == 1 else JointOptimizer(made)


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def memory_sizes(spec: RunSpec, layout: Layout) -> list[int]:
    """Bytes of each memory of a run, in the order of `RunMemory`, but for the optimizer's state."""
    codec = codec_class(parse_compression(spec.compress))
    return [
        Gradients.memory_size(layout, spec.gradients) if codec is None else codec.memory_size(layout, spec.capacity),
        Versions.memory_size(layout, spec.versions),
        WorkerTable.memory_size(spec.capacity, len(spec.parameters)),
        SharedFlags.memory_size(spec.capacity),
        spec.buffers,
    ]


def make_layout(
    spec: RunSpec, named: list[tuple[str, torch.nn.Parameter]], optimizer: Optimizer
) -> tuple[Layout, type[ShardedOptimizer] | type[WholeOptimizer]]:
    """The layout of a run's parameters over its servers, and the kind of optimizer that updates one server's shard."""
    whole = not is_elementwise(optimizer)
    layout = Layout(named, len(spec.servers), whole=whole, striped=spec.striped)
    return layout, WholeOptimizer if whole else ShardedOptimizer


class Shard:
    """The part of every version that one server updates."""

    def __init__(self, spec: RunSpec, index: int, memory: RunMemory) -> None:
        named, optimizer = rebuild(spec)
        layout, kind = make_layout(spec, named, optimizer)
        self._layout = layout
        self.size = layout.size
        """Bytes of all parameters."""
        self._versions = Versions(layout, memory.versions, spec.versions)
        codec = codec_class(parse_compression(spec.compress))
        self._codec: Codec | None = None
        sources: list[list[torch.Tensor]] = []
        if codec is None:
            sources = Gradients.shared(layout, memory.gradients, 0, spec.gradients).flats
        else:
            self._codec = codec(layout, memory.gradients, spec.capacity)
        self.run = ServerRecord(memory.record, layout, len(spec.servers))
        """The record of the run."""
        self._index, self._record = index, self.run.shards[index]
        # Memory is taken when it is first written, so only this shard's part of it ever is.
        self._sum = self.run.sum
        """The gradients summed before an update, as one more source after all others."""
        self.collected = len(sources) if sources else spec.gradients
        self._has_sum = False
        corrections = Corrections(map(parse_correction, spec.corrections))
        self._compensate = corrections.compensator([(flat.count, flat.dtype) for flat in layout.flats])
        self._bases: dict[int, tuple[int, float]] = {}
        """By source, the buffer of the version that it was computed on, and the factor that undoes its loss scale."""
        self._newest = 0
        everything = Gradients(layout, [*sources, self._sum] if sources else [self._sum], 0)
        self._optimizer = kind(optimizer, layout, self._versions, everything, index, len(spec.servers))
        self._optimizer.place(memory.state)
        self.kept = KeptVersion(layout, memory.kept)
        self._optimizer.adopt_state()
        if self._codec is not None or self._compensate is not None:
            self._optimizer.mix = self._mix
        self._sources = sources
        self._ranges = [flat.shards[index] for flat in layout.flats]
        self._everything = bytes([1]) * len(layout.slots)
        self._masks = part_masks(optimizer, layout)
        """Of several optimizers, a byte per parameter: 1 if it is updated by that one."""
        self._used_sum: bytes | None = None
        """Per parameter, 1 if the collected sum has a gradient of it; None if of all."""
        self._log = self._record.log
        self._optimizer.log = self._log
        self._record.incomplete |= self._compensate is not None and self._compensate.remembers
        self._note = self._record.read()
        self._go_on()

    def _go_on(self) -> None:
        """Takes up what a server before this one has left, if there was one."""
        if self._record.done and self._record.incomplete:
            raise ServerLost("it was killed, and has kept state that is not in shared memory")
        note = self._note
        self._has_sum, self._used_sum = note.has_sum, note.used_sum
        if note.groups is not None:
            self._optimizer.set_hyperparameters([_tuples(group) for group in note.groups])

    def hello(self, *, again: bool = False) -> messages.ShardHello:
        """Opens a further connection to the first server; again: True if this process takes over from a killed one."""
        record = self._record
        return messages.ShardHello(self._index, os.getpid(), again, record.done, self._note.value)

    # -- operations --------------------------------------------------------------------------------------------------

    def handle(self, request: messages.ShardRequest) -> float:
        """The value of a request's answer; 0 if it has none."""
        if isinstance(request, messages.MeasureDistance):
            return self.distance(request)
        self._log.open(self._record.done + 1)
        value, groups = 0.0, self._note.groups
        match request:
            case messages.ApplyUpdate():
                value, groups = self.apply(request), request.groups or groups
            case messages.AddGradient():
                self.add(request)
            case messages.ReloadState():
                self._optimizer.adopt_state()
        note = self._note
        if note.groups is not groups or (note.has_sum, note.used_sum, note.value) != (
            self._has_sum,
            self._used_sum,
            value,
        ):
            self._note = note = ShardNote(groups, self._has_sum, self._used_sum, value)
        if self._optimizer.private:
            self._record.incomplete = True
        self._record.finish(note)
        return value

    def answer(self) -> float:
        """The value of the last answer."""
        return self._note.value

    def add(self, message: messages.AddGradient) -> None:
        """Adds a gradient to the sum, so that its worker can use its buffer again."""
        source = message.source
        self._newest = message.old
        self._bases = {source.buffer: (source.base, source.factor)}
        used = source.used
        for number, (flat, begin, end) in enumerate(self._pieces()):
            if number < self._log.first:
                continue
            total = self._sum[flat][begin:end]
            if self._has_sum:
                self._protect(number, total)
            failpoints.hit("collect.chunk")
            if used is None and not (self._has_sum and self._used_sum is not None):
                part = self._dense(source.buffer, flat, begin, end)
                if self._has_sum:
                    total.add_(part, alpha=source.weight)
                else:
                    torch.mul(part, source.weight, out=total)
            else:
                self._add_used(total, flat, begin, end, source)
            failpoints.hit("chunk.written")
            if self._has_sum:
                self._log.end(number)
        if not self._has_sum:
            self._used_sum = used
        elif used is None or self._used_sum is None:
            self._used_sum = None
        else:
            self._used_sum = bytes(a | b for a, b in zip(self._used_sum, used, strict=True))
        self._has_sum = True

    def _protect(self, part: int, total: torch.Tensor) -> None:
        """Keeps a part of the sum until it has been changed; undoes a change that a server before this one began."""
        places = [total.view(torch.uint8).numpy().data]
        if self._log.torn:
            self._log.restore(places)
        self._log.begin(part, places)

    def _add_used(self, total: torch.Tensor, flat: int, begin: int, end: int, source: messages.GradientRef) -> None:
        """As `add`, parameter by parameter; a parameter without a gradient so far is zero."""
        for slot, first, last in self._slots(flat, begin, end):
            place = total[first - begin : last - begin]
            if not self._has_sum or (self._used_sum is not None and not self._used_sum[slot.index]):
                place.zero_()
            if source.used is None or source.used[slot.index]:
                place.add_(self._dense(source.buffer, flat, first, last), alpha=source.weight)

    def apply(self, message: messages.ApplyUpdate) -> float:
        """Writes the next version, or only makes the mean gradient and returns its norm."""
        if message.keep:
            self._optimizer.keep = self.kept
        if message.groups is not None:
            self._optimizer.set_hyperparameters([_tuples(group) for group in message.groups])
        if self._compensate is not None:
            self._newest = message.old
            self._bases = {source.buffer: (source.base, source.factor) for source in message.sources}
        weights: Weights = [(source.buffer, source.weight) for source in message.sources]
        used = self._used(message.sources)
        part = self._everything
        if message.optimizer >= 0:
            part = self._masks[message.optimizer]
            used = [both(flags, part) for flags in used or [self._everything] * (self.collected + 1)]
        if message.norm is not None:
            return self._collect(message, weights, used)
        self._optimizer.update(weights, used, message.scale, (message.old, message.new))
        if self._has_sum and any(source.buffer == self.collected for source in message.sources):
            self._forget_sum(part)
        return 0.0

    def _forget_sum(self, part: bytes) -> None:
        """The collected sum of these parameters was used; the others' waits for their own optimizer."""
        left = both(self._used_sum or self._everything, bytes(1 - flag for flag in part))
        self._has_sum = any(left)
        self._used_sum = left if self._has_sum else None

    def distance(self, message: messages.MeasureDistance) -> float:
        """The squared distance of two versions in this shard."""
        first, second = self._versions.buffers[message.first], self._versions.buffers[message.second]
        total = 0.0
        for flat, begin, end in self._pieces():
            apart = first[flat][begin:end] - second[flat][begin:end]
            total += float(torch.linalg.vector_norm(apart).double().square())
        return total

    # -- implementation ----------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """This shard in pieces of a chunk's size: flat, begin and end of each."""
        for flat, (start, stop) in enumerate(self._ranges):
            step = max(1, CHUNK // self._layout.flats[flat].dtype.itemsize)
            for begin in range(start, stop, step):
                yield flat, begin, min(begin + step, stop)

    def _slots(self, flat: int, begin: int, end: int) -> Iterator[tuple[Slot, int, int]]:
        """The parameters with elements in this range, and where these begin and end."""
        for slot in self._layout.flats[flat].slots:
            first, last = max(begin, slot.offset), min(end, slot.offset + slot.count)
            if first < last:
                yield slot, first, last

    def _used(self, sources: list[messages.GradientRef]) -> list[bytes] | None:
        """Per source and parameter, 1 if it has a gradient; None if all have, everywhere."""
        if self._used_sum is None and all(source.used is None for source in sources):
            return None
        known = {source.buffer: source.used for source in sources}
        if self.collected in known:
            known[self.collected] = self._used_sum
        if all(used is None for used in known.values()):
            return None
        flags = [self._everything] * (self.collected + 1)
        for buffer, used in known.items():
            flags[buffer] = self._everything if used is None else used
        return flags

    def _collect(self, message: messages.ApplyUpdate, weights: Weights, used: list[bytes] | None) -> float:
        """Makes the mean gradient of this shard; returns its norm to the power of its order, which shards can add."""
        norm, log, number = message.norm or 2.0, self._log, -1
        parts: list[float] = [0.0]
        again = any(buffer == self.collected for buffer, _ in weights)  # the sum is read, and overwritten
        for flat, (start, stop) in enumerate(self._ranges):
            for slot, first, last in self._slots(flat, start, stop):
                taken = [(b, w) for b, w in weights if used is None or used[b][slot.index]]
                if not taken:
                    continue
                number += 1
                total = torch.zeros(last - first, dtype=self._layout.flats[flat].dtype)
                if number < log.first:
                    total.copy_(self._sum[flat][first:last])
                else:
                    if again:
                        self._protect(number, self._sum[flat][first:last])
                    self._mix(total, flat, first, last, taken, message.scale)
                    self._sum[flat][first:last] = total
                    if again:
                        log.end(number)
                value = float(torch.linalg.vector_norm(total, norm))
                parts.append(value if norm == float("inf") else value**norm)
        anywhere = None
        if used is not None:
            taking_part = [used[buffer] for buffer, _ in weights]
            anywhere = bytes(any(flags) for flags in zip(*taking_part, strict=True))
            if message.optimizer >= 0 and self._used_sum is not None:  # with what others' optimizers have collected
                others = (max(pair) for pair in zip(anywhere, self._used_sum, strict=True))
                anywhere = bytes(others)
        self._has_sum, self._used_sum = True, anywhere
        return combine_norms(parts, norm)

    def _dense(self, buffer: int, flat: int, start: int, stop: int) -> torch.Tensor:
        """A gradient as it is used: decompressed and corrected."""
        if buffer == self.collected:
            return self._sum[flat][start:stop]
        if self._codec is not None:
            value = self._codec.decode(buffer, flat, start, stop)
        else:
            value = self._sources[buffer][flat][start:stop]
        base, factor = self._bases.get(buffer, (-1, 1.0))
        if self._compensate is None or base < 0 or (base == self._newest and not self._compensate.remembers):
            return value
        newest, old = (self._versions.buffers[number][flat][start:stop] for number in (self._newest, base))
        if factor == 1.0:
            return self._compensate(value, newest, old, flat, start, stop)
        return self._compensate(value * factor, newest, old, flat, start, stop) / factor

    def _mix(self, total: torch.Tensor, flat: int, start: int, stop: int, weights: Weights, scale: float) -> None:
        parts = tuple(self._dense(buffer, flat, start, stop) for buffer, _ in weights)
        weighted_sum(total, parts, [(place, weight) for place, (_, weight) in enumerate(weights)], scale)
