"""An ordinary torch optimizer, run by each worker on its own shard of the parameters only.

It works for optimizers that treat every element by itself. The worker's shard is cut into chunks that stay in the
cache: a chunk's gradients are summed and its values updated before the next chunk is touched, so that memory is crossed
once. The optimizer's state lies in shared memory too: it exists once per
machine, any worker can read it for a checkpoint, and it survives its owner.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.reduction import CHUNK, Weights, weighted_sum
from paceline.parameters.versions import Versions
from paceline.transport import Memory

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
"""Those whose whole step torch does in one pass over memory, also on the CPU."""


ByGroup = dict[int, list[torch.nn.Parameter]]
"""What to update, by parameter group."""
Mix = Callable[[torch.Tensor, int, int, int, Weights, float], None]
"""Sums gradients by weight into a tensor: those of a flat buffer's elements from a start to a stop, scaled."""

_OWN, _AT_HEAD = 1, 2
"""Marks of a piece whose state is placed: its scalars (the number of steps, say) are its own, or its run's head's."""


@dataclasses.dataclass(slots=True)
class _Piece:
    """The part of one parameter that lies in one chunk."""

    number: int
    flat: int
    slot: Slot
    group: int
    chunk: int
    start: int
    stop: int
    parameter: torch.nn.Parameter
    """Its values, with the summed gradient as `.grad`: what the optimizer sees. Autograd knows nothing of it."""
    head: int = 0
    """The number of the first piece of its run: neighbours of one group that can be updated as one."""
    settled: bool = False
    """Whether its state lies in shared memory."""


@dataclasses.dataclass(slots=True)
class _Chunk:
    flat: int
    start: int
    stop: int
    pieces: list[_Piece]
    by_group: ByGroup
    gradients: tuple[torch.Tensor, ...]
    """Each worker's gradients of this chunk."""
    total: torch.Tensor
    """Where they are summed."""
    buffers: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Its values in buffers of versions, as far as they were asked for."""


class ShardedOptimizer:
    """This worker's part of the team's optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        versions: Versions,
        gradients: Gradients,
        rank: int,
        workers: int,
    ) -> None:
        self._user = optimizer
        self._layout, self._versions, self._gradients = layout, versions, gradients
        self._rank = rank
        group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._pieces: list[_Piece] = []
        """Of all workers, in the same order everywhere, so that a piece's number is its address."""
        self._own: list[_Piece] = []
        for owner in range(workers):
            for number, flat in enumerate(layout.flats):
                before: _Piece | None = None
                for piece in _cut(number, flat.slots, flat.shards[owner], flat.dtype, group_of):
                    piece.number = piece.head = len(self._pieces)
                    if before is not None and (before.group, before.chunk) == (piece.group, piece.chunk):
                        piece.head = before.head
                    before = piece
                    self._pieces.append(piece)
                    if owner == rank:
                        self._own.append(piece)
        self._spec_of = {flat.dtype: _state_spec(optimizer, flat.dtype) for flat in layout.flats}
        """By dtype and parameter group."""
        self._spec = {
            dtype: {name: kind for spec in specs for name, kind in spec.items()}
            for dtype, specs in self._spec_of.items()
        }
        self._names = sorted({name for spec in self._spec.values() for name in spec})
        self._chunks = self._make_chunks()
        self._inner = self._make_inner()
        self._bare_step = _bare_step(optimizer)
        self._unsettled = len(self._own)
        """How many pieces have no state in shared memory yet."""
        self._runs: list[ByGroup] = []
        """Per chunk, its runs, once pieces are updated together."""
        self._spans: list[list[tuple[torch.nn.Parameter, int, int]]] = []
        """Per chunk, where they lie."""
        self._rate = self._plain_rate()
        """The learning rate, if all there is to do is plain gradient descent."""
        self.mix: Mix | None = None
        """Sums gradients that do not lie there as they are: compressed ones, say."""
        self._apart = False
        """Whether parameters have turned out to be used unevenly, so that each must be updated by itself."""
        self._bytes = sum(chunk.total.nbytes for chunk in self._chunks)
        self._memory: Memory | None = None
        self._state: dict[tuple[int, str], torch.Tensor] = {}
        self._scalars = 0
        self._placed = memoryview(b"")

    # -- setting up --------------------------------------------------------------------------------------------------

    def _make_chunks(self) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        for number, flat in enumerate(self._layout.flats):
            pieces = [piece for piece in self._own if piece.flat == number]
            start, stop = flat.shards[self._rank]
            step = max(1, CHUNK // flat.dtype.itemsize)
            total = torch.empty(min(step, max(0, stop - start)), dtype=flat.dtype)
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                inside = [piece for piece in pieces if begin <= piece.start < end]
                by_group: ByGroup = {}
                for piece in inside:
                    by_group.setdefault(piece.group, []).append(piece.parameter)
                    piece.parameter.data = self._versions.flats[number][piece.start : piece.stop]
                    piece.parameter.grad = total[piece.start - begin : piece.stop - begin]
                chunks.append(
                    _Chunk(
                        flat=number,
                        start=begin,
                        stop=end,
                        pieces=inside,
                        by_group=by_group,
                        gradients=tuple(tensors[number][begin:end] for tensors in self._gradients.flats),
                        total=total[: end - begin],
                    )
                )
        return chunks

    def _make_inner(self) -> Optimizer:
        groups = []
        for number, group in enumerate(self._user.param_groups):
            members = [piece.parameter for piece in self._own if piece.group == number]
            # An optimizer wants at least one parameter in all; a group may be empty.
            groups.append({**_hyperparameters(group), "params": members})
        if not any(group["params"] for group in groups):
            groups[0]["params"] = [torch.nn.Parameter(torch.zeros(1))]
        return _like(self._user, groups)

    def memory_size(self) -> int:
        """Bytes of shared memory that the optimizer's state needs."""
        return self._addresses()[2] + len(self._pieces)

    def _addresses(self) -> tuple[dict[tuple[int, str], int], int, int]:
        """Where the whole-parameter states, the scalars, and the marks of what is placed begin."""
        offset = 0
        starts = {}
        for number, flat in enumerate(self._layout.flats):
            for name, dtype in self._full(flat.dtype).items():
                starts[number, name] = offset
                offset += -(-flat.count * dtype.itemsize // 64) * 64
        return starts, offset, offset + 8 * len(self._names) * len(self._pieces)

    def owned(self) -> list[tuple[int, int]]:
        """Where in that memory this shard's state lies: from and to which bytes."""
        starts, scalars, marks = self._addresses()
        row = 8 * len(self._names)
        spans = [(marks + piece.number, marks + piece.number + 1) for piece in self._own]
        spans += [(scalars + row * piece.number, scalars + row * (piece.number + 1)) for piece in self._own]
        for number, flat in enumerate(self._layout.flats):
            start, stop = flat.shards[self._rank]
            for name, dtype in self._full(flat.dtype).items():
                at = starts[number, name]
                spans.append((at + start * dtype.itemsize, at + stop * dtype.itemsize))
        return spans

    def place(self, memory: Memory) -> None:
        """Let the state live in this memory, zeroed and equal on all workers."""
        self._memory = memory
        starts, self._scalars, marks = self._addresses()
        for number, flat in enumerate(self._layout.flats):
            for name, dtype in self._full(flat.dtype).items():
                self._state[number, name] = memory.tensor(starts[number, name], flat.count, dtype)
        self._placed = memory.bytes(marks, len(self._pieces))

    def _full(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {name: kind for name, (is_full, kind) in self._spec[dtype].items() if is_full}

    def _home(self, piece: _Piece, name: str, number: int | None = None) -> torch.Tensor | None:
        """Where a piece's state of this name lives; its scalars, if a number is given, at that other piece."""
        spec = self._spec[self._layout.flats[piece.flat].dtype]
        if name not in spec or self._memory is None:
            return None
        is_full, dtype = spec[name]
        if is_full:
            return self._state[piece.flat, name][piece.start : piece.stop]
        number = piece.number if number is None else number
        place = self._scalars + 8 * (number * len(self._names) + self._names.index(name))
        return self._memory.tensor(place, 1, dtype).view(())

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
        """Sum everybody's gradients by weight and write this worker's shard of the next version.

        `used` says per worker which parameters have a gradient; None if all have, everywhere. Gradients that were
        reduced before are passed as this worker's own with weight 1. `move` says from which buffer of versions to
        which, where the next version does not take the place of the last. Returns the bytes read from other workers.
        """
        if used is not None:
            self._part()
        elif not (self._runs or self._apart or self._unsettled):
            self._join()
        descent = self._rate if move is not None and used is None else None
        for number, chunk in enumerate(self._chunks):
            if descent is not None and move is not None:
                self._descend(chunk, weights, scale, descent, *move)
                continue
            if move is not None:
                self._move(number, chunk, *move)
            if used is not None:
                self._update_used(chunk, weights, used, scale)
                continue
            self._sum(chunk, weights, scale)
            self._step(self._runs[number] if self._runs else chunk.by_group, chunk.pieces)
        return self._bytes * len([rank for rank, _ in weights if rank != self._rank])

    def _sum(self, chunk: _Chunk, weights: Weights, scale: float) -> None:
        if self.mix is None:
            weighted_sum(chunk.total, chunk.gradients, weights, scale)
        else:
            self.mix(chunk.total, chunk.flat, chunk.start, chunk.stop, weights, scale)

    def _descend(self, chunk: _Chunk, weights: Weights, scale: float, rate: float, old: int, new: int) -> None:
        """Plain gradient descent from one buffer to another: as `_move` and `_step`, crossing memory once."""
        source, weight = weights[0]
        gradient = chunk.total
        if len(weights) == 1 and weight * scale == 1.0 and self.mix is None:
            gradient = chunk.gradients[source]
        else:
            self._sum(chunk, weights, scale)
        torch.add(self._in_buffer(chunk, old), gradient, alpha=-rate, out=self._in_buffer(chunk, new))

    def _in_buffer(self, chunk: _Chunk, buffer: int) -> torch.Tensor:
        """A chunk's values in one of the buffers of versions."""
        values = chunk.buffers.get(buffer)
        if values is None:
            values = chunk.buffers[buffer] = self._versions.buffers[buffer][chunk.flat][chunk.start : chunk.stop]
        return values

    def _move(self, number: int, chunk: _Chunk, old: int, new: int) -> None:
        """Let the optimizer see a chunk in another buffer, with the values that it has in the old one."""
        values = self._versions.buffers[new][chunk.flat]
        self._in_buffer(chunk, new).copy_(self._in_buffer(chunk, old))
        if self._runs:
            for run, start, stop in self._spans[number]:
                run.data = values[start:stop]
        else:
            for piece in chunk.pieces:
                piece.parameter.data = values[piece.start : piece.stop]

    def _update_used(self, chunk: _Chunk, weights: Weights, used: list[bytes], scale: float) -> None:
        """As `update`, parameter by parameter: those that nobody used stay exactly as they are."""
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

    def _join(self) -> None:
        """Let neighbouring pieces be updated as one from now on: many small parameters cost as much as one large."""
        for chunk in self._chunks:
            heads: dict[int, list[_Piece]] = {}
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

    def _run(self, chunk: _Chunk, pieces: list[_Piece]) -> torch.nn.Parameter:
        """Pieces that lie side by side, with what padding is between them, as one; its scalars are the first one's."""
        start, stop = pieces[0].start, pieces[-1].stop
        run = torch.nn.Parameter(self._versions.flats[chunk.flat][start:stop], requires_grad=False)
        run.grad = chunk.total[start - chunk.start : stop - chunk.start]
        state = {}
        for name, value in self._inner.state[pieces[0].parameter].items():
            full = isinstance(value, torch.Tensor) and value.dim() > 0
            state[name] = self._state[chunk.flat, name][start:stop] if full else value
        if state:
            self._inner.state[run] = state
        for piece in pieces[1:]:
            self._placed[piece.number] = _AT_HEAD
        return run

    def _alike(self, pieces: list[_Piece]) -> bool:
        """Whether all have had the same number of steps, and state of the same kinds in shared memory."""
        first, *others = (self._inner.state[piece.parameter] for piece in pieces)
        if not all(name in self._names for name in first):
            return False
        scalars = {name: value for name, value in first.items() if value.dim() == 0}
        return all(
            other.keys() == first.keys() and all(torch.equal(other[name], scalars[name]) for name in scalars)
            for other in others
        )

    def _part(self) -> None:
        """Give every piece its own scalars again."""
        self._apart = True
        for piece in self._own if self._runs else ():
            if self._placed[piece.number] != _AT_HEAD:
                continue
            head = self._pieces[piece.head]
            for name, value in self._inner.state[piece.parameter].items():
                if value.dim() == 0:
                    value.copy_(self._inner.state[head.parameter][name])
            self._placed[piece.number] = _OWN
        self._runs, self._spans = [], []

    def _step(self, by_group: ByGroup, pieces: list[_Piece]) -> None:
        if self._unsettled and len({piece.settled for piece in pieces}) > 1:
            # Some have had no gradient before: torch's fused SGD wants momentum of all of them, or of none.
            for piece in pieces:
                self._step({piece.group: [piece.parameter]}, [piece])
            return
        inner = self._inner
        for number, group in enumerate(inner.param_groups):
            group["params"] = by_group.get(number, [])
        self._bare_step(inner)
        if self._unsettled:
            for piece in pieces:
                if not piece.settled:
                    self._settle(piece)

    def _settle(self, piece: _Piece) -> None:
        """Move a piece's state, which the optimizer has just made, to where it lives from now on."""
        state = self._inner.state[piece.parameter]
        for name, value in state.items():
            home = self._home(piece, name) if isinstance(value, torch.Tensor) else None
            if home is not None:
                home.copy_(value)
                state[name] = home
        piece.settled = True
        self._unsettled -= 1
        self._placed[piece.number] = _OWN

    def ranges(self) -> list[tuple[int, int]]:
        """Where in the memory of the state this worker's part of it lies: offsets and sizes in bytes."""
        starts, scalars, marks = self._addresses()
        found = []
        for number, flat in enumerate(self._layout.flats):
            start, stop = flat.shards[self._rank]
            for name, dtype in self._full(flat.dtype).items():
                found.append((starts[number, name] + start * dtype.itemsize, (stop - start) * dtype.itemsize))
        if self._own:
            first, count, width = self._own[0].number, len(self._own), 8 * len(self._names)
            found += [(scalars + first * width, count * width), (marks + first, count)]
        return [(start, size) for start, size in found if size]

    def state(self) -> list[torch.Tensor]:
        """The state of all workers together, one flat tensor per name and dtype."""
        return list(self._state.values())

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def export_state(self, optimizer: Optimizer) -> None:
        """Fill `optimizer.state` with views of the whole state, as if it had run on whole parameters."""
        first: dict[int, _Piece] = {}
        for piece in self._pieces:
            first.setdefault(piece.slot.index, piece)
        optimizer.state.clear()
        for index, piece in first.items():
            mark = self._placed[piece.number]
            if not mark:
                continue
            slot = self._layout.slots[index]
            state: dict[str, torch.Tensor] = {}
            for name, (is_full, _) in self._spec_of[self._layout.flats[piece.flat].dtype][piece.group].items():
                home = self._home(piece, name, piece.head if mark == _AT_HEAD else None)
                if home is not None:
                    state[name] = slot.view(self._state[piece.flat, name]) if is_full else home
            if state:
                optimizer.state[slot.parameter] = state

    def adopt_state(self) -> None:
        """Go on with the state as it lies in shared memory, where somebody else has written it."""
        self._runs, self._spans, self._apart = [], [], False
        for piece in self._own:
            mark = self._placed[piece.number]
            piece.settled = bool(mark)
            self._inner.state.pop(piece.parameter, None)
            if mark:
                spec = self._spec_of[self._layout.flats[piece.flat].dtype][piece.group]
                if mark == _AT_HEAD:  # as its former owner had left it
                    for name, (is_full, _) in spec.items():
                        own, head = self._home(piece, name), self._home(piece, name, piece.head)
                        if not is_full and own is not None and head is not None:
                            own.copy_(head)
                    self._placed[piece.number] = _OWN
                homes = {name: self._home(piece, name) for name in spec}
                self._inner.state[piece.parameter] = {name: home for name, home in homes.items() if home is not None}
        self._unsettled = sum(not piece.settled for piece in self._own)

    def import_state(self, optimizer: Optimizer) -> None:
        """Take this worker's part of the state that lies in `optimizer.state`, and empty that."""
        self._part()
        self._apart = False
        for piece in self._own:
            state = optimizer.state.get(piece.slot.parameter)
            if not state:
                # It has none there, so it starts anew here too.
                self._inner.state.pop(piece.parameter, None)
                piece.settled = False
                self._placed[piece.number] = 0
                continue
            taken: dict[str, Any] = {}
            for name, value in state.items():
                home = self._home(piece, name)
                if home is None or not isinstance(value, torch.Tensor):
                    taken[name] = value
                    continue
                if home.dim():
                    offset = piece.slot.offset
                    home.copy_(piece.slot.flatten(value)[piece.start - offset : piece.stop - offset])
                else:
                    home.copy_(value)
                taken[name] = home
            self._inner.state[piece.parameter] = taken
            piece.settled = True
            self._placed[piece.number] = _OWN
        self._unsettled = sum(not piece.settled for piece in self._own)
        optimizer.state.clear()


def _cut(
    flat: int,
    slots: tuple[Slot, ...],
    shard: tuple[int, int],
    dtype: torch.dtype,
    group_of: dict[int, int],
) -> Iterable[_Piece]:
    """One worker's pieces: its shard, cut at the borders of parameters and of chunks."""
    first, last = shard
    step = max(1, CHUNK // dtype.itemsize)
    for slot in slots:
        start = max(first, slot.offset)
        stop = min(last, slot.offset + slot.count)
        while start < stop:
            chunk = (start - first) // step
            end = min(stop, first + (chunk + 1) * step)
            empty = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            yield _Piece(0, flat, slot, group_of[id(slot.parameter)], chunk, start, end, empty)
            start = end


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Without the profiling and the user's hooks that torch wraps around a step: those belong to the whole update."""
    step: Callable[[Optimizer], Any] = inspect.unwrap(type(optimizer).step)
    return step


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer of the same kind, on other parameters; fused where torch can."""
    kind = type(optimizer)
    for group in groups:
        if "lr" in group:
            group["lr"] = float(group["lr"])
        dtypes = {parameter.dtype for parameter in group["params"]}
        fused = kind in _FUSED and all(dtype.is_floating_point for dtype in dtypes)
        if kind is torch.optim.SGD:
            # Without momentum it is one operation anyway, and torch does it faster without the bookkeeping of the fused
            # form. Of half precision, torch's fused SGD leaves whatever fills a vector register as it was.
            fused = fused and group["momentum"] != 0 and dtypes <= {torch.float32, torch.float64}
        group["fused"] = fused
        group["foreach"] = group["differentiable"] = False
    return kind(groups)  # type: ignore[call-arg]


def _state_spec(optimizer: Optimizer, dtype: torch.dtype) -> list[dict[str, tuple[bool, torch.dtype]]]:
    """What state this optimizer keeps, by group: name -> (one value per element?, dtype). Found by trying."""
    specs = []
    for group in optimizer.param_groups:
        probe = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        probe.grad = torch.zeros(1, dtype=dtype)
        trial = _like(optimizer, [{**_hyperparameters(group), "params": [probe]}])
        with torch.no_grad():
            _bare_step(optimizer)(trial)
        state = trial.state[probe].items()
        specs.append({name: (v.dim() == 1, v.dtype) for name, v in state if isinstance(v, torch.Tensor)})
    return specs
