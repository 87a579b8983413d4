"""An ordinary torch optimizer, run by each worker on its own shard of the parameters only.

It works for optimizers that treat every element by itself. The worker's shard is cut into chunks that stay in the
cache: a chunk's gradients are summed and its values updated before the next chunk is touched, so that memory is read
once. The optimizer's state lies in shared memory too: it exists once per machine, any worker can read it for a
checkpoint, and it survives its owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline import failpoints
from paceline.parameters.gradients import Gradients
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout
from paceline.parameters.optimizers import bare_step, same_kind_fused, without_parameters
from paceline.parameters.pieces import ByGroup, Piece, ShardChunk, cut_pieces, make_chunks
from paceline.parameters.progress import ProgressLog
from paceline.parameters.reduction import Weights, weighted_sum
from paceline.parameters.state_memory import AT_HEAD, NONE, OWN, StateMemory
from paceline.parameters.versions import Versions
from paceline.transport import Memory

Mix = Callable[[torch.Tensor, int, int, int, Weights, float], None]
"""Sums gradients by weight into a tensor: those of a flat buffer's elements from a start to a stop, scaled."""


class ShardedOptimizer:
    """The part of the team's optimizer that updates one shard."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        versions: Versions,
        gradients: Gradients,
        rank: int,
        workers: int,
    ) -> None:
        self._layout, self._versions, self._rank = layout, versions, rank
        by_owner = cut_pieces(optimizer, layout, workers)
        self._pieces = [piece for pieces in by_owner for piece in pieces]
        self._own = by_owner[rank]
        self._state = StateMemory(optimizer, layout, self._pieces)
        self._chunks = make_chunks(layout, versions, gradients, rank, self._own)
        self._inner = self._make_inner(optimizer)
        self._bare_step = bare_step(optimizer)
        self._stateless = len(self._own)
        """The number of pieces without state in shared memory."""
        self._runs: list[ByGroup] = []
        """Per chunk, its runs, once pieces are updated together."""
        self._spans: list[list[tuple[torch.nn.Parameter, int, int]]] = []
        """Per chunk, the elements [start, stop) of each run."""
        self._rate = self._plain_rate()
        """The learning rate, if the optimizer is plain gradient descent."""
        self.mix: Mix | None = None
        """Sums gradients that are not stored as they are: compressed ones, say."""
        self.keep: KeptVersion | None = None
        """Where the next update copies to what it overwrites."""
        self.log: ProgressLog | None = None
        """How far an update is, for the next owner of the shard if this process dies."""
        self.private = False
        """True if the optimizer keeps state that is not in shared memory."""
        self._apart = False
        """True if parameters have been used unevenly, so that each must be updated by itself."""
        self._exact = all(flat.dtype in (torch.float32, torch.float64) for flat in layout.flats)
        """True if sums of gradients can be larger than their mean without an overflow."""
        self._bytes = sum(chunk.total.nbytes for chunk in self._chunks)

    def _make_inner(self, optimizer: Optimizer) -> Optimizer:
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            members = [piece.parameter for piece in self._own if piece.group == number]
            groups.append({**without_parameters(group), "params": members})
        return same_kind_fused(optimizer, groups)

    # -- state in shared memory --------------------------------------------------------------------------------------

    def memory_size(self) -> int:
        """Bytes of shared memory that the optimizer's state needs."""
        return self._state.size

    def undo_size(self) -> int:
        """Bytes that one part of an update overwrites at most."""
        return self._state.largest()

    def place(self, memory: Memory) -> None:
        """Keep the state in this memory, zeroed and equal on all workers."""
        self._state.place(memory)

    def owned(self) -> list[tuple[int, int]]:
        """The bytes [start, stop) of that memory with this shard's state."""
        return self._state.spans(self._rank, self._own)

    def ranges(self) -> list[tuple[int, int]]:
        """The same as few offsets and sizes in bytes."""
        return self._state.ranges(self._rank, self._own)

    def state(self) -> list[torch.Tensor]:
        """The state of all shards, one flat tensor per name and dtype."""
        return self._state.tensors()

    def export_state(self, optimizer: Optimizer) -> None:
        """Fill `optimizer.state` with views of the whole state, as if it had run on whole parameters."""
        self._state.export(optimizer)

    def export_kept(self, kept: KeptVersion, optimizer: Optimizer) -> None:
        """As `export_state`, of a copy that updates have made of all shards."""
        self._state.twin(kept.memory, kept.state).export(optimizer)

    def adopt_state(self) -> None:
        """Use the state in shared memory, which another process has written."""
        self._runs, self._spans, self._apart = [], [], False
        for piece in self._own:
            mark = self._state.marks[piece.number]
            piece.in_memory = bool(mark)
            self._inner.state.pop(piece.parameter, None)
            if mark:
                spec = self._state.spec(piece)
                if mark == AT_HEAD:  # as its former owner had left it
                    for name, (is_full, _) in spec.items():
                        own, head = self._state.of(piece, name), self._state.of(piece, name, piece.head)
                        if not is_full and own is not None and head is not None:
                            own.copy_(head)
                    self._state.marks[piece.number] = OWN
                places = {name: self._state.of(piece, name) for name in spec}
                self._inner.state[piece.parameter] = {
                    name: place for name, place in places.items() if place is not None
                }
        self._stateless = sum(not piece.in_memory for piece in self._own)

    def import_state(self, optimizer: Optimizer) -> None:
        """Copy this shard's part of `optimizer.state`, and empty that."""
        self._split_runs()
        self._apart = False
        for piece in self._own:
            state = optimizer.state.get(piece.slot.parameter)
            if not state:
                # It has none there, so it starts anew here too.
                self._inner.state.pop(piece.parameter, None)
                piece.in_memory = False
                self._state.marks[piece.number] = NONE
                continue
            taken: dict[str, Any] = {}
            for name, value in state.items():
                place = self._state.of(piece, name)
                if place is None or not isinstance(value, torch.Tensor):
                    taken[name] = value
                    continue
                if place.dim():
                    offset = piece.slot.offset
                    place.copy_(piece.slot.flatten(value)[piece.start - offset : piece.stop - offset])
                else:
                    place.copy_(value)
                taken[name] = place
            self._inner.state[piece.parameter] = taken
            piece.in_memory = True
            self._state.marks[piece.number] = OWN
        self._stateless = sum(not piece.in_memory for piece in self._own)
        optimizer.state.clear()

    # -- updating ----------------------------------------------------------------------------------------------------

    def set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self._inner.param_groups, groups, strict=True):
            group.update(values)
        self._rate = self._plain_rate()

    def _plain_rate(self) -> float | None:
        if type(self._inner) is not torch.optim.SGD:
            return None
        groups = self._inner.param_groups
        if any(group["momentum"] or group["weight_decay"] or group["maximize"] for group in groups):
            return None
        rates = {float(group["lr"]) for group in groups}
        return rates.pop() if len(rates) == 1 else None

    def update(
        self, weights: Weights, used: list[bytes] | None, scale: float = 1.0, move: tuple[int, int] | None = None
    ) -> int:
        """Sum all workers' gradients by weight, and write this worker's shard of the next version.

        used: per worker, a byte per parameter, 1 if it has a gradient; None if all have. A gradient that is reduced
        already is passed as this worker's own with weight 1. move: the buffers of the last and of the next version, if
        they differ. Returns the bytes read from other workers.
        """
        first = self._resume(move)
        if used is not None:
            self._split_runs()
        elif not (self._runs or self._apart or self._stateless):
            self._join_runs()
        descent = self._rate if used is None else None
        if descent is not None:
            weights, scale, descent = self._fold(weights, scale, descent)
        keep, self.keep = self.keep, None
        if keep is not None and not first:
            self._state.copy_small(self._own, keep)
        log = self.log if descent is None or self._in_place(move) else None  # else it can be done again as a whole
        for number, chunk in enumerate(self._chunks[first:], first):
            if log is not None:
                log.begin(number, self._overwritten(chunk, move))
            failpoints.hit("update.chunk")
            if keep is not None:
                self._keep(keep, chunk, 0 if move is None else move[0])
            if descent is not None:
                self._descend(chunk, weights, scale, descent, *(move or (0, 0)))
            else:
                self._update_chunk(number, chunk, weights, used, scale, move)
            failpoints.hit("chunk.written")
            if log is not None:
                log.end(number)
        return self._bytes * len([rank for rank, _ in weights if rank != self._rank])

    def _update_chunk(
        self,
        number: int,
        chunk: ShardChunk,
        weights: Weights,
        used: list[bytes] | None,
        scale: float,
        move: tuple[int, int] | None,
    ) -> None:
        if move is not None:
            self._move(number, chunk, *move)
        if used is not None:
            self._update_used(chunk, weights, used, scale)
        else:
            self._sum(chunk, weights, scale)
            self._step(self._runs[number] if self._runs else chunk.by_group, chunk.pieces)

    def _resume(self, move: tuple[int, int] | None) -> int:
        """The first chunk of an update: not 0 if its owner before this one has died within it."""
        log = self.log
        if log is None or not (log.first or log.torn):
            return 0
        if log.torn:
            log.restore(self._overwritten(self._chunks[log.first], move))
        self.adopt_state()
        return log.first

    @staticmethod
    def _in_place(move: tuple[int, int] | None) -> bool:
        """True if the next version is written where the last one is."""
        return move is None or move[0] == move[1]

    def _overwritten(self, chunk: ShardChunk, move: tuple[int, int] | None) -> list[memoryview]:
        """The bytes that an update of this chunk overwrites, and that it depends on."""
        places = chunk.state
        if places is None:
            places = chunk.state = self._state.places(chunk.flat, chunk.start, chunk.stop, chunk.pieces)
        if not self._in_place(move):
            return places
        values = self._in_buffer(chunk, 0 if move is None else move[0])
        return [*places, values.view(torch.uint8).numpy().data]

    def _keep(self, keep: KeptVersion, chunk: ShardChunk, buffer: int) -> None:
        """Copy a chunk's values, which lie in this buffer, and its state."""
        start, stop = chunk.start, chunk.stop
        failpoints.hit("snapshot.copy")
        keep.values[chunk.flat][start:stop].copy_(self._in_buffer(chunk, buffer))
        self._state.copy_elements(chunk.flat, start, stop, keep)

    def _sum(self, chunk: ShardChunk, weights: Weights, scale: float) -> None:
        if self.mix is None:
            weighted_sum(chunk.total, chunk.gradients, weights, scale)
        else:
            self.mix(chunk.total, chunk.flat, chunk.start, chunk.stop, weights, scale)

    def _fold(self, weights: Weights, scale: float, rate: float) -> tuple[Weights, float, float]:
        """Moves a weight that all gradients have into the learning rate, if it is a power of 2: the bits stay."""
        weight = weights[0][1] * scale
        if math.frexp(weight)[0] != 0.5 or any(other != weights[0][1] for _, other in weights) or not self._exact:
            return weights, scale, rate
        return [(rank, 1.0) for rank, _ in weights], 1.0, rate * weight

    def _descend(self, chunk: ShardChunk, weights: Weights, scale: float, rate: float, old: int, new: int) -> None:
        """Plain gradient descent from one buffer to another, or in one: as `_move` and `_step`, reading memory once."""
        source, weight = weights[0]
        gradient = chunk.total
        if len(weights) == 1 and weight * scale == 1.0 and self.mix is None:
            gradient = chunk.gradients[source]
        else:
            self._sum(chunk, weights, scale)
        torch.add(self._in_buffer(chunk, old), gradient, alpha=-rate, out=self._in_buffer(chunk, new))

    def _in_buffer(self, chunk: ShardChunk, buffer: int) -> torch.Tensor:
        """A chunk's values in one of the buffers of versions."""
        values = chunk.buffers.get(buffer)
        if values is None:
            values = chunk.buffers[buffer] = self._versions.buffers[buffer][chunk.flat][chunk.start : chunk.stop]
        return values

    def _move(self, number: int, chunk: ShardChunk, old: int, new: int) -> None:
        """Point the optimizer at a chunk in another buffer, with the values of the old one."""
        values = self._versions.buffers[new][chunk.flat]
        self._in_buffer(chunk, new).copy_(self._in_buffer(chunk, old))
        if self._runs:
            for run, start, stop in self._spans[number]:
                run.data = values[start:stop]
        else:
            for piece in chunk.pieces:
                piece.parameter.data = values[piece.start : piece.stop]

    def _update_used(self, chunk: ShardChunk, weights: Weights, used: list[bytes], scale: float) -> None:
        """As `update`, parameter by parameter: those without a gradient stay exactly as they are."""
        for piece in chunk.pieces:
            contributing = [(rank, weight) for rank, weight in weights if used[rank][piece.slot.index]]
            if not contributing:
                continue
            begin, end = piece.start - chunk.start, piece.stop - chunk.start
            total = chunk.total[begin:end]
            if self.mix is None:
                parts = tuple(gradient[begin:end] for gradient in chunk.gradients)
                weighted_sum(total, parts, contributing, scale)
            else:
                self.mix(total, chunk.flat, piece.start, piece.stop, contributing, scale)
            self._step({piece.group: [piece.parameter]}, [piece])

    def _join_runs(self) -> None:
        """Update neighbouring pieces as one from now on: then many small parameters cost as much as a large one."""
        for chunk in self._chunks:
            heads: dict[int, list[Piece]] = {}
            for piece in chunk.pieces:
                heads.setdefault(piece.head, []).append(piece)
            runs: ByGroup = {}
            spans: list[tuple[torch.nn.Parameter, int, int]] = []
            for pieces in heads.values():
                joined = [self._run(chunk, pieces)] if len(pieces) > 1 and self._alike(pieces) else []
                spans += [(run, pieces[0].start, pieces[-1].stop) for run in joined]
                if not joined:
                    spans += [(piece.parameter, piece.start, piece.stop) for piece in pieces]
                for parameter in joined or [piece.parameter for piece in pieces]:
                    runs.setdefault(pieces[0].group, []).append(parameter)
            self._runs.append(runs)
            self._spans.append(spans)

    def _run(self, chunk: ShardChunk, pieces: list[Piece]) -> torch.nn.Parameter:
        """Adjacent pieces and the padding between them as one parameter, with the scalars of the first."""
        start, stop = pieces[0].start, pieces[-1].stop
        run = torch.nn.Parameter(self._versions.flats[chunk.flat][start:stop], requires_grad=False)
        run.grad = chunk.total[start - chunk.start : stop - chunk.start]
        state = {}
        for name, value in self._inner.state[pieces[0].parameter].items():
            full = isinstance(value, torch.Tensor) and value.dim() > 0
            state[name] = self._state.flat(chunk.flat, name)[start:stop] if full else value
        if state:
            self._inner.state[run] = state
        for piece in pieces[1:]:
            self._state.marks[piece.number] = AT_HEAD
        return run

    def _alike(self, pieces: list[Piece]) -> bool:
        """True if all have had the same number of steps, and have the same state in shared memory."""
        first, *others = (self._inner.state[piece.parameter] for piece in pieces)
        if not all(name in self._state.names for name in first):
            return False
        scalars = {name: value for name, value in first.items() if value.dim() == 0}
        return all(
            other.keys() == first.keys() and all(torch.equal(other[name], scalars[name]) for name in scalars)
            for other in others
        )

    def _split_runs(self) -> None:
        """Give every piece its own scalars again."""
        self._apart = True
        for piece in self._own if self._runs else ():
            if self._state.marks[piece.number] != AT_HEAD:
                continue
            head = self._pieces[piece.head]
            for name, value in self._inner.state[piece.parameter].items():
                if value.dim() == 0:
                    value.copy_(self._inner.state[head.parameter][name])
            self._state.marks[piece.number] = OWN
        self._runs, self._spans = [], []

    def _step(self, by_group: ByGroup, pieces: list[Piece]) -> None:
        if self._stateless and len({piece.in_memory for piece in pieces}) > 1:
            # Some have had no gradient before: torch's fused SGD wants momentum of all of them, or of none.
            for piece in pieces:
                self._step({piece.group: [piece.parameter]}, [piece])
            return
        inner = self._inner
        for number, group in enumerate(inner.param_groups):
            group["params"] = by_group.get(number, [])
        self._bare_step(inner)
        if self._stateless:
            for piece in pieces:
                if not piece.in_memory:
                    self._place_state(piece)

    def _place_state(self, piece: Piece) -> None:
        """Move a piece's state, which the optimizer has just made, to shared memory."""
        state = self._inner.state[piece.parameter]
        for name, value in state.items():
            place = self._state.of(piece, name) if isinstance(value, torch.Tensor) else None
            if place is not None:
                place.copy_(value)
                state[name] = place
            elif value is not None:
                self.private = True
        piece.in_memory = True
        self._stateless -= 1
        self._state.marks[piece.number] = OWN
