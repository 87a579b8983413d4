"""Shared memory of a split model: every tensor lies there once, and one worker of the replica writes it.

A worker touches only the pages of its own stages, so it holds no more of the model than these in its physical memory.
For a checkpoint a worker reads the other stages' tensors in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.parameters.versions import take_back
from paceline.transport import BarrierKind, Memory
from paceline.transport.copy_on_write import CopyOnWriteView

_LINE = 64
_ROOM = 8
"""Largest size of an optimizer's state, in bytes per byte of parameters; unused pages cost nothing."""
_SPARE = 1 << 20


class _Entry(msgspec.Struct, array_like=True):
    """Location of one tensor of the optimizer's state."""

    parameter: int
    name: str
    offset: int
    shape: list[int]
    dtype: str


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


class SharedState:
    """The parameters and buffers of a model, and its optimizer's state, shared by the workers of one replica."""

    def __init__(self, members: Members, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self._members, self._optimizer = members, optimizer
        self._rank, self._size = members.rank, members.size
        tensors = {id(one): one for one in [*model.parameters(), *model.buffers()]}
        self._tensors = list(tensors.values())
        self.parameters = list(model.parameters())
        self._number = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        size = _LINE * members.size
        offsets = []
        for tensor in self._tensors:
            offsets.append(size)
            size += _aligned(tensor.nbytes)
        self._directory = _SPARE + 512 * len(self.parameters)
        self._room = _ROOM * sum(parameter.nbytes for parameter in self.parameters) + _SPARE
        self._state = _aligned(size)
        self._memory: Memory = members.share(self._state + members.size * (self._directory + self._room), keep=True)
        self._private = CopyOnWriteView(self._memory)
        self._memory.close_descriptor()
        self._lengths = [self._memory.bytes(_LINE * rank, _LINE).cast("q") for rank in range(members.size)]
        views = [_view(self._memory, offset, one) for one, offset in zip(self._tensors, offsets, strict=True)]
        private = [_view(self._private, offset, one) for one, offset in zip(self._tensors, offsets, strict=True)]
        _move(members, self._tensors, views, write=self._rank == 0)
        self._places = list(zip(self.parameters, views, private, strict=False))
        """Per parameter, its place in shared memory, and the same as the script sees and may change it."""
        self._names = [name for name, _ in model.named_parameters()]
        self._span = (offsets[0], offsets[len(self.parameters) - 1] + _aligned(self.parameters[-1].nbytes))
        """The bytes [start, stop) of all parameters."""
        self._point(shared=False)
        self._placed: dict[tuple[int, str], torch.Tensor] = {}
        self._entries: list[_Entry] = []
        self._used = 0
        self._own: list[torch.nn.Parameter] = []

    # -- the parameters ----------------------------------------------------------------------------------------------

    def _point(self, *, shared: bool) -> None:
        for parameter, place, private in self._places:
            parameter.data = place if shared else private

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While entered, changes of parameters are seen by all."""
        self._point(shared=True)
        try:
            yield
        finally:
            self._point(shared=False)

    def traceable(self) -> contextlib.AbstractContextManager[None]:
        """The model can be traced as it is."""
        return contextlib.nullcontext()

    def changed(self) -> bool:
        """True if the script has changed parameters itself, outside of the optimizer."""
        for name, (parameter, _, private) in zip(self._names, self._places, strict=True):
            if parameter.data_ptr() != private.data_ptr() and private.numel():
                take_back(name, parameter, private)
        if not self._private.written(*self._span):
            return False
        if all(torch.equal(place, private) for _, place, private in self._places):
            self._private.discard()
            return False
        return True

    def share_changes(self) -> None:
        """Let all see what all scripts have changed alike: a parameter's owner counts; all workers call it."""
        self._members.barrier.wait(BarrierKind.GATHER)
        own = set(map(id, self._own))
        for parameter, place, private in self._places:
            if id(parameter) in own:
                place.copy_(private)
        self._members.barrier.wait(BarrierKind.GATHER)
        self._private.discard()

    # -- the optimizer's state ---------------------------------------------------------------------------------------

    def keep(self, own: Iterable[torch.nn.Parameter]) -> None:
        """Keeps the optimizer's state of this worker's own parameters only, in shared memory."""
        self._own = list(own)
        ids = {id(parameter) for parameter in self._own}
        for parameter in list(self._optimizer.state):
            if id(parameter) not in ids:
                del self._optimizer.state[parameter]
        self.share_new_state()

    def share_new_state(self) -> None:
        """Moves state that the optimizer has created since the last call into shared memory."""
        changed = False
        for parameter in self._own:
            state = self._optimizer.state.get(parameter)
            if not state:
                continue
            number = self._number[id(parameter)]
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and self._placed.get((number, name)) is not value:
                    state[name] = self._place(number, name, value)
                    changed = True
        if changed:
            payload = msgspec.json.encode(self._entries)
            self._memory.bytes(self._region(self._rank), len(payload))[:] = payload
            self._lengths[self._rank][0] = len(payload)

    def _region(self, rank: int) -> int:
        return self._state + rank * (self._directory + self._room)

    def _place(self, number: int, name: str, value: torch.Tensor) -> torch.Tensor:
        placed = self._placed.get((number, name))
        if placed is None or placed.shape != value.shape or placed.dtype != value.dtype:
            self._entries = [one for one in self._entries if (one.parameter, one.name) != (number, name)]
            if self._used + value.nbytes > self._room:
                raise MemoryError(f"the optimizer keeps more than {_ROOM} times the size of its parameters")
            offset = self._region(self._rank) + self._directory + self._used
            self._used += _aligned(value.nbytes)
            dtype = str(value.dtype).removeprefix("torch.")
            self._entries.append(_Entry(number, name, offset, list(value.shape), dtype))
            self._placed[number, name] = placed = self._tensor(offset, value.shape, value.dtype)
        placed.copy_(value)
        return placed

    def _tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        count = shape.numel()
        return self._memory.tensor(offset, max(1, count), dtype)[:count].view(shape)

    def all_state(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The optimizer's state for all parameters of the model."""
        found: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for rank in range(self._size):
            length = self._lengths[rank][0]
            if not length:
                continue
            text = bytes(self._memory.bytes(self._region(rank), length))
            for one in msgspec.json.decode(text, type=list[_Entry]):
                value = self._tensor(one.offset, torch.Size(one.shape), getattr(torch, one.dtype))
                found.setdefault(self.parameters[one.parameter], {})[one.name] = value
        known: dict[Any, dict[str, Any]] = self._optimizer.state
        for parameter, state in known.items():
            rest = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
            found.setdefault(parameter, {}).update(rest)
        return dict(sorted(found.items(), key=lambda item: self._number[id(item[0])]))

    def release(self) -> None:
        """Moves every tensor back into this process's own memory."""
        for tensor in self._tensors:
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)


def share_buffers(members: Members, buffers: Iterable[torch.Tensor], slot: int, slots: int, *, write: bool) -> None:
    """Moves a model's buffers into memory that all members map; all members call it.

    slot: this worker's of `slots` copies, for workers that update equal buffers each by itself.
    write: True on the worker whose values the slot gets.
    """
    tensors = [buffer for buffer in dict.fromkeys(buffers) if buffer.numel()]
    sizes = [_aligned(tensor.nbytes) for tensor in tensors]
    memory = members.share(max(1, slots * sum(sizes)))
    views, offset = [], slot * sum(sizes)
    for tensor, size in zip(tensors, sizes, strict=True):
        views.append(memory.tensor(offset, tensor.numel(), tensor.dtype).view(tensor.shape))
        offset += size
    _move(members, tensors, views, write=write)


def _view(memory: Memory | CopyOnWriteView, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """The place of a tensor at this offset, in its shape and memory format."""
    if not tensor.numel():
        return tensor.data
    dense = torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta")
    return memory.tensor(offset, tensor.numel(), tensor.dtype).as_strided(tensor.shape, dense.stride())


def _move(members: Members, tensors: list[torch.Tensor], views: list[torch.Tensor], *, write: bool) -> None:
    """Lets tensors refer to shared memory. write: True on the member whose values they get."""
    if write:
        for tensor, view in zip(tensors, views, strict=True):
            view.copy_(tensor.data)
    members.barrier.wait(BarrierKind.ALLOCATE)
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
