"""The state of an optimizer that treats every element by itself, in shared memory.

Values per element lie as the parameters do, in flat buffers. Scalars (the number of steps, say) are kept per piece.
One mark per piece tells where its scalars are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout
from paceline.parameters.optimizers import StateSpec, state_specs
from paceline.parameters.pieces import Piece
from paceline.parameters.reduction import CHUNK
from paceline.transport import Memory

NONE, OWN, AT_HEAD = 0, 1, 2
"""Marks of a piece: it has no state; its scalars are its own; its scalars are those of its run's head."""


class StateMemory:
    """Where the state of each piece lies."""

    def __init__(self, optimizer: Optimizer, layout: Layout, pieces: Sequence[Piece]) -> None:
        """pieces: of all workers."""
        self._layout, self._pieces = layout, pieces
        self._specs = {flat.dtype: state_specs(optimizer, flat.dtype) for flat in layout.flats}
        """By dtype and parameter group."""
        self._merged: dict[torch.dtype, StateSpec] = {
            dtype: {name: kind for spec in specs for name, kind in spec.items()} for dtype, specs in self._specs.items()
        }
        self.names = sorted({name for spec in self._merged.values() for name in spec})
        self._memory: Memory | None = None
        self._flat_state: dict[tuple[int, str], torch.Tensor] = {}
        self._scalars = 0
        self._copies: StateMemory | None = None
        """Of a kept version, once one was made."""
        self.marks = memoryview(b"")
        """A byte per piece."""

    @property
    def size(self) -> int:
        """In bytes."""
        return self._addresses()[2] + len(self._pieces)

    def _addresses(self) -> tuple[dict[tuple[int, str], int], int, int]:
        """Where the flat state begins, by flat buffer and name, and where scalars and marks begin."""
        offset = 0
        starts = {}
        for number, flat in enumerate(self._layout.flats):
            for name, dtype in self._full(flat.dtype).items():
                starts[number, name] = offset
                offset += -(-flat.count * dtype.itemsize // 64) * 64
        return starts, offset, offset + 8 * len(self.names) * len(self._pieces)

    def _full(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The names of state with one value per element, with its dtype."""
        return {name: kind for name, (is_full, kind) in self._merged[dtype].items() if is_full}

    def place(self, memory: Memory, base: int = 0) -> None:
        """Use this memory from this byte on, zeroed and equal on all workers."""
        self._memory = memory
        starts, scalars, marks = self._addresses()
        self._scalars = base + scalars
        for number, flat in enumerate(self._layout.flats):
            for name, dtype in self._full(flat.dtype).items():
                self._flat_state[number, name] = memory.tensor(base + starts[number, name], flat.count, dtype)
        self.marks = memory.bytes(base + marks, len(self._pieces))

    def twin(self, memory: Memory, base: int) -> StateMemory:
        """The same state elsewhere: of a copy that lies in this memory, from this byte on."""
        other = copy.copy(self)
        other._flat_state = {}
        other.place(memory, base)
        return other

    def spec(self, piece: Piece) -> StateSpec:
        return self._specs[self._layout.flats[piece.flat].dtype][piece.group]

    def of(self, piece: Piece, name: str, number: int | None = None) -> torch.Tensor | None:
        """A piece's state of this name; scalars, if a number is given, of the piece of that number."""
        spec = self._merged[self._layout.flats[piece.flat].dtype]
        if name not in spec or self._memory is None:
            return None
        is_full, dtype = spec[name]
        if is_full:
            return self._flat_state[piece.flat, name][piece.start : piece.stop]
        number = piece.number if number is None else number
        place = self._scalars + 8 * (number * len(self.names) + self.names.index(name))
        return self._memory.tensor(place, 1, dtype).view(())

    def flat(self, number: int, name: str) -> torch.Tensor:
        """The state of a whole flat buffer."""
        return self._flat_state[number, name]

    def tensors(self) -> list[torch.Tensor]:
        """The state of all workers, one flat tensor per name and flat buffer."""
        return list(self._flat_state.values())

    def spans(self, rank: int, own: Sequence[Piece]) -> list[tuple[int, int]]:
        """The bytes [start, stop) of one worker's state; first the marks of its pieces, one by one."""
        starts, scalars, marks = self._addresses()
        row = 8 * len(self.names)
        spans = [(marks + piece.number, marks + piece.number + 1) for piece in own]
        spans += [(scalars + row * piece.number, scalars + row * (piece.number + 1)) for piece in own]
        for number, flat in enumerate(self._layout.flats):
            start, stop = flat.shards[rank]
            for name, dtype in self._full(flat.dtype).items():
                at = starts[number, name]
                spans.append((at + start * dtype.itemsize, at + stop * dtype.itemsize))
        return spans

    def small(self, own: Sequence[Piece]) -> list[tuple[int, int]]:
        """Offsets and sizes in bytes of one worker's scalars and marks; its pieces are numbered one after the other."""
        _, scalars, marks = self._addresses()
        if not own:
            return []
        first, count, width = own[0].number, len(own), 8 * len(self.names)
        return [(scalars + first * width, count * width), (marks + first, count)]

    def ranges(self, rank: int, own: Sequence[Piece]) -> list[tuple[int, int]]:
        """All of one worker's state as few offsets and sizes in bytes."""
        starts, _, _ = self._addresses()
        found = []
        for number, flat in enumerate(self._layout.flats):
            start, stop = flat.shards[rank]
            for name, dtype in self._full(flat.dtype).items():
                found.append((starts[number, name] + start * dtype.itemsize, (stop - start) * dtype.itemsize))
        found += self.small(own)
        return [(start, size) for start, size in found if size]

    def places(self, number: int, start: int, stop: int, pieces: Sequence[Piece]) -> list[memoryview]:
        """Where the state of a chunk lies: of these elements of a flat buffer, and of its pieces."""
        assert self._memory is not None
        starts, _, _ = self._addresses()
        found = [
            (starts[number, name] + start * dtype.itemsize, (stop - start) * dtype.itemsize)
            for name, dtype in self._full(self._layout.flats[number].dtype).items()
        ]
        return [self._memory.bytes(first, size) for first, size in [*found, *self.small(pieces)] if size]

    def largest(self) -> int:
        """Bytes of all `places` of a chunk at most, with the values of its elements."""
        most = 0
        for flat in self._layout.flats:
            step = max(1, CHUNK // flat.dtype.itemsize)
            width = flat.dtype.itemsize + sum(dtype.itemsize for dtype in self._full(flat.dtype).values())
            most = max(most, step * width)
        return most + (8 * len(self.names) + 1) * len(self._pieces)

    def copy_small(self, own: Sequence[Piece], kept: KeptVersion) -> None:
        """Copies one worker's scalars and marks."""
        assert self._memory is not None
        for start, size in self.small(own):
            kept.copy_state(start, size, self._memory)

    def copy_elements(self, number: int, start: int, stop: int, kept: KeptVersion) -> None:
        """Copies the state of these elements of a flat buffer."""
        if self._copies is None:
            self._copies = self.twin(kept.memory, kept.state)
        for (flat, name), values in self._flat_state.items():
            if flat == number:
                self._copies.flat(number, name)[start:stop].copy_(values[start:stop])

    def export(self, optimizer: Optimizer) -> None:
        """Fill `optimizer.state` with views of the whole state, as if it had run on whole parameters."""
        first: dict[int, Piece] = {}
        for piece in self._pieces:
            first.setdefault(piece.slot.index, piece)
        optimizer.state.clear()
        for index, piece in first.items():
            mark = self.marks[piece.number]
            if mark == NONE:
                continue
            slot = self._layout.slots[index]
            state: dict[str, torch.Tensor] = {}
            for name, (is_full, _) in self.spec(piece).items():
                value = self.of(piece, name, piece.head if mark == AT_HEAD else None)
                if value is not None:
                    state[name] = slot.view(self._flat_state[piece.flat, name]) if is_full else value
            if state:
                optimizer.state[slot.parameter] = state
