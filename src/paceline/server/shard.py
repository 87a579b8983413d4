"""One shard of the parameters: its gradients, optimizer and versions; and the shards of all servers together."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import OptimizerSpec, ParameterSpec, RunSpec, parse_compression, parse_correction
from paceline.errors import ServerLost, TeamTimeout
from paceline.parameters.compression import Codec, codec_class
from paceline.parameters.corrections import Corrections
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import plain
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.optimizers import ELEMENTWISE, same_kind
from paceline.parameters.reduction import CHUNK, Weights, combine_norms, weighted_sum
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.parameters.whole import WholeOptimizer
from paceline.parameters.worker_table import WorkerTable
from paceline.server import messages
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.transport.unix_connection import Closed, UnixConnection


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


def describe_optimizer(optimizer: Optimizer) -> OptimizerSpec:
    """The optimizer as a `RunSpec` describes it."""
    kind = type(optimizer)
    groups = [plain(group) for group in optimizer.param_groups]
    return OptimizerSpec(kind.__module__, kind.__qualname__, groups, plain(optimizer.defaults))


def rebuild(spec: RunSpec) -> tuple[list[tuple[str, torch.nn.Parameter]], Optimizer]:
    """Parameters without values, and an optimizer on them, as the workers have them."""
    named: list[tuple[str, torch.nn.Parameter]] = []
    optimizer = spec.optimizer
    members: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.groups]
    for known in spec.parameters:
        empty = torch.empty_strided(known.shape, known.stride, dtype=getattr(torch, known.dtype), device="meta")
        parameter = torch.nn.Parameter(empty, requires_grad=empty.is_floating_point() or empty.is_complex())
        named.append((known.name, parameter))
        members[known.group].append(parameter)
    kind = getattr(importlib.import_module(optimizer.module), optimizer.name)
    groups = [{**_tuples(group), "params": inside} for group, inside in zip(optimizer.groups, members, strict=True)]
    return named, same_kind(kind, groups, _tuples(optimizer.defaults))


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
    whole = type(optimizer) not in ELEMENTWISE
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
        # Memory is taken when it is first written, so only this shard's part of it ever is.
        self._sum = [torch.empty(flat.count, dtype=flat.dtype) for flat in layout.flats]
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
        self._optimizer.adopt_state()
        if self._codec is not None or self._compensate is not None:
            self._optimizer.mix = self._mix
        self._sources = sources
        self._ranges = [flat.shards[index] for flat in layout.flats]
        self._everything = bytes([1]) * len(layout.slots)
        self._used_sum: bytes | None = None
        """Per parameter, 1 if the collected sum has a gradient of it; None if of all."""

    # -- operations --------------------------------------------------------------------------------------------------

    def handle(self, request: messages.ShardRequest) -> float:
        """The value of a request's answer; 0 if it has none."""
        match request:
            case messages.ApplyUpdate():
                return self.apply(request)
            case messages.AddGradient():
                self.add(request)
            case messages.MeasureDistance():
                return self.distance(request)
            case messages.ReloadState():
                self._optimizer.adopt_state()
        return 0.0

    def add(self, message: messages.AddGradient) -> None:
        """Adds a gradient to the sum, so that its worker can use its buffer again."""
        source = message.source
        self._newest = message.old
        self._bases = {source.buffer: (source.base, source.factor)}
        used = source.used
        for flat, begin, end in self._pieces():
            total = self._sum[flat][begin:end]
            if used is None and not (self._has_sum and self._used_sum is not None):
                part = self._dense(source.buffer, flat, begin, end)
                if self._has_sum:
                    total.add_(part, alpha=source.weight)
                else:
                    torch.mul(part, source.weight, out=total)
            else:
                self._add_used(total, flat, begin, end, source)
        if not self._has_sum:
            self._used_sum = used
        elif used is None or self._used_sum is None:
            self._used_sum = None
        else:
            self._used_sum = bytes(a | b for a, b in zip(self._used_sum, used, strict=True))
        self._has_sum = True

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
        if message.groups is not None:
            self._optimizer.set_hyperparameters([_tuples(group) for group in message.groups])
        if self._compensate is not None:
            self._newest = message.old
            self._bases = {source.buffer: (source.base, source.factor) for source in message.sources}
        weights: Weights = [(source.buffer, source.weight) for source in message.sources]
        used = self._used(message.sources)
        if message.norm is not None:
            return self._collect(message, weights, used)
        self._optimizer.update(weights, used, message.scale, (message.old, message.new))
        if self._has_sum and any(source.buffer == self.collected for source in message.sources):
            self._has_sum, self._used_sum = False, None
        return 0.0

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
        norm = message.norm or 2.0
        parts: list[float] = [0.0]
        for flat, (start, stop) in enumerate(self._ranges):
            for slot, first, last in self._slots(flat, start, stop):
                taken = [(b, w) for b, w in weights if used is None or used[b][slot.index]]
                total = torch.zeros(last - first, dtype=self._layout.flats[flat].dtype)
                if taken:
                    self._mix(total, flat, first, last, taken, message.scale)
                self._sum[flat][first:last] = total
                value = float(torch.linalg.vector_norm(total, norm))
                parts.append(value if norm == float("inf") else value**norm)
        anywhere = None
        if used is not None:
            taking_part = [used[buffer] for buffer, _ in weights]
            anywhere = bytes(any(flags) for flags in zip(*taking_part, strict=True))
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


class ShardSet:
    """The shards of all servers, as the first server calls them: runs one operation on all at once."""

    def __init__(self, own: Shard, others: dict[int, UnixConnection[Any]], patience: float) -> None:
        self._own, self._others, self._patience = own, others, patience

    @property
    def size(self) -> int:
        """Bytes of an uncompressed gradient."""
        return self._own.size

    @property
    def collected(self) -> int:
        """Number of the buffer that stands for the sum of the added gradients."""
        return self._own.collected

    def close(self) -> None:
        """Ends the other servers."""
        for connection in self._others.values():
            connection.close()

    def handle(self, request: messages.ShardRequest) -> list[float]:
        """The answers of all shards, this server's first."""
        try:
            for index, connection in self._others.items():  # noqa: B007  (an error names it)
                connection.send(request)
            values = [self._own.handle(request)]
            for index, connection in self._others.items():
                answer = connection.receive_within(self._patience)
                if answer is None:
                    raise TeamTimeout(f"server {index} did not answer in {self._patience:g} s")
                if isinstance(answer, messages.RunFailed):
                    raise ServerLost(f"server {index} failed: {answer.message}")
                assert isinstance(answer, messages.ShardAnswer)
                values.append(answer.value)
        except Closed:
            raise ServerLost(f"server {index}, which holds a shard of the parameters, died") from None
        return values
