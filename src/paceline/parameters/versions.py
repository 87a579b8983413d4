"""The buffers that hold versions of the parameters, shared by all workers of a machine.

A buffer is free when no worker computes on the version that it holds. Under all-reduce the only version is free as soon
as all workers have reached the barrier of an update, so the next version takes its place: one buffer is enough, a pull
costs nothing, and `parameter.data` stays where it is. (A second buffer to swap with was measured: it costs a copy
of all parameters per update and as much memory again.) A parameter server whose workers compute on versions of
different age needs one buffer for each of them, one for the newest version and one for the next.

The model's parameters are a private view of a buffer: a script that changes them in place, outside of the optimizer,
changes its own pages only, and `changed` finds that.
"""

from __future__ import annotations

import zlib

import torch

from paceline.errors import UsageError
from paceline.parameters.layout import Layout, Slot
from paceline.transport import Memory
from paceline.transport.copy_on_write import CopyOnWriteView


class Versions:
    """Buffers of versions in shared memory, with the model's parameters as views of one of them."""

    def __init__(self, layout: Layout, memory: Memory, buffers: int = 1, *, private: bool = False) -> None:
        """private: the parameters will be a private view; the memory's descriptor is open."""
        self.layout = layout
        self.private = CopyOnWriteView(memory) if private else None
        self.buffers: list[list[torch.Tensor]] = []
        """Per buffer, one flat tensor per dtype."""
        self._own: list[list[torch.Tensor]] = []
        """The same as this process sees and may change them."""
        self._offsets: list[int] = []
        """Of all flat tensors, in bytes."""
        offset = 0
        for _ in range(buffers):
            flats, own = [], []
            for flat in layout.flats:
                flats.append(memory.tensor(offset, flat.count, flat.dtype))
                own.append(self.private.tensor(offset, flat.count, flat.dtype) if self.private else flats[-1])
                self._offsets.append(offset)
                offset += flat.size
            self.buffers.append(flats)
            self._own.append(own)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._pairs: dict[int, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
        """By buffer, the model's parameters, and where they lie in it."""
        self._addresses: dict[int, list[int]] = {}
        """The addresses of that."""
        self._pulled = 0
        """The buffer that the parameters are views of."""
        self._kept: set[int] | None = None
        """The parameters that are; None for all."""

    @classmethod
    def memory_size(cls, layout: Layout, buffers: int = 1) -> int:
        return buffers * layout.size

    @property
    def flats(self) -> list[torch.Tensor]:
        """Of the first buffer, which is the only one under all-reduce."""
        return self.buffers[0]

    def views(self, buffer: int) -> list[torch.Tensor]:
        """The parameters as they are in a buffer."""
        if buffer not in self._views:
            self._views[buffer] = self.layout.buffers(self.buffers[buffer])
        return self._views[buffer]

    def fill(self, buffer: int = 0) -> None:
        """Write this process's parameter values into a buffer."""
        for slot, view in zip(self.layout.slots, self.views(buffer), strict=True):
            view.copy_(slot.parameter.data)

    def pull(self, buffer: int = 0) -> None:
        """Point the model's parameters at a buffer; on another device than the host, copy it there."""
        if self.private is not None and buffer != self._pulled:
            if self._written():
                self.private.discard()  # another version will be there, which must be seen
            self.private.forget()
        self._pulled = buffer
        for parameter, view in self._places(buffer):
            if parameter.is_cpu:
                parameter.data = view
            else:
                parameter.data.copy_(view, non_blocking=True)

    def restrict(self, kept: set[int] | None) -> set[int] | None:
        """From now on only these parameters are views of a buffer, by their indices; returns what were before."""
        before, self._kept = self._kept, kept
        self._pairs.clear()
        self._addresses.clear()
        self.pull(self._pulled)
        return before

    @property
    def _here(self) -> list[Slot]:
        """The parameters that are views of a buffer."""
        return [slot for slot in self.layout.slots if self._kept is None or slot.index in self._kept]

    def _places(self, buffer: int) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        places = self._pairs.get(buffer)
        if places is None:
            views = self.layout.buffers(self._own[buffer])
            places = self._pairs[buffer] = [(slot.parameter, views[slot.index]) for slot in self._here]
            self._addresses[buffer] = [view.data_ptr() for _, view in places]
        return places

    # -- changes by hand ---------------------------------------------------------------------------------------------

    def changed(self) -> list[Slot]:
        """The parameters that the script has changed itself, outside of the optimizer, since the last `discard`."""
        if self.private is None:
            return []
        places = self._places(self._pulled)
        if [parameter.data_ptr() for parameter, _ in places] != self._addresses[self._pulled]:
            for slot, (parameter, view) in zip(self._here, places, strict=True):
                if parameter.data_ptr() != view.data_ptr() and view.numel():
                    take_back(slot.name, parameter, view)
        written = self._written()
        if not written:
            return []
        found = []
        for number, flat in enumerate(self.layout.flats):
            base = self._offsets[self._pulled * len(self.layout.flats) + number]
            for slot in flat.slots:
                if self._kept is not None and slot.index not in self._kept:
                    continue
                start = base + slot.offset * flat.dtype.itemsize
                stop = start + slot.count * flat.dtype.itemsize
                if any(first < stop and start < last for first, last in written) and self._differs(number, slot):
                    found.append(slot)
        if not found:
            self.private.discard()
        return found

    def _written(self) -> list[tuple[int, int]]:
        """The bytes of the current buffer's pages that the script has written."""
        assert self.private is not None
        start = self._pulled * self.layout.size
        return self.private.written(start, start + self.layout.size)

    def _flat(self, number: int, slot: Slot, own: bool) -> torch.Tensor:
        """A parameter's bytes, as this process sees them or as they are in shared memory."""
        flats = self._own if own else self.buffers
        return flats[self._pulled][number][slot.offset : slot.offset + slot.count].view(torch.uint8)

    def _differs(self, number: int, slot: Slot) -> bool:
        return not torch.equal(self._flat(number, slot, own=True), self._flat(number, slot, own=False))

    def digest(self, slots: list[Slot]) -> int:
        """A number, not 0, that is equal for equal changes of these parameters."""
        known, value = {slot.index for slot in slots}, 1
        for number, flat in enumerate(self.layout.flats):
            for slot in flat.slots:
                if slot.index in known:
                    value = zlib.crc32(self._flat(number, slot, own=True).numpy().data, value + slot.index)
        return value or 1

    def commit(self, slots: list[Slot]) -> None:
        """Write changes of these parameters to shared memory, for all."""
        known = {slot.index for slot in slots}
        for number, flat in enumerate(self.layout.flats):
            for slot in flat.slots:
                if slot.index in known:
                    self._flat(number, slot, own=False).copy_(self._flat(number, slot, own=True))

    def discard(self) -> None:
        """See the shared values again."""
        if self.private is not None:
            self.private.discard()


def take_back(name: str, parameter: torch.Tensor, view: torch.Tensor) -> None:
    """The script has given a parameter another tensor (`p.data = …`): its values go where they were."""
    value = parameter.data
    if (value.dtype, value.shape, value.device) != (view.dtype, view.shape, view.device):
        raise UsageError(
            f"the parameter '{name}' was {view.dtype} of shape {tuple(view.shape)} on {view.device} at setup and is "
            f"{value.dtype} of shape {tuple(value.shape)} on {value.device} now; convert, move or resize the model "
            "before team.setup"
        )
    view.copy_(value)
    parameter.data = view
