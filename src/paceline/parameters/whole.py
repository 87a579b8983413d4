"""An optimizer that needs whole parameters, run by a server on those that it owns."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from paceline import failpoints
from paceline.parameters.gradients import Gradients
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.optimizers import same_kind_as, without_parameters
from paceline.parameters.progress import ProgressLog
from paceline.parameters.reduction import Weights, weighted_sum
from paceline.parameters.sharding import Mix
from paceline.parameters.versions import Versions
from paceline.transport import Memory

_Spec = dict[str, tuple[torch.Size, torch.dtype]]
"""The tensors that an optimizer keeps for one parameter: shapes and dtypes."""


class WholeOptimizer:
    """The part of the team's optimizer that one server runs, as `ShardedOptimizer` is for those by element."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        versions: Versions,
        gradients: Gradients,
        rank: int,
        workers: int,
    ) -> None:
        self._user, self._layout, self._versions, self._gradients = optimizer, layout, versions, gradients
        self.mix: Mix | None = None
        self.keep: KeptVersion | None = None
        self.log: ProgressLog | None = None
        self.private = False
        self._flat_of = {slot.index: number for number, flat in enumerate(layout.flats) for slot in flat.slots}
        self._own = [
            slot
            for flat in layout.flats
            for slot in flat.slots
            if slot.count and flat.shards[rank][0] <= slot.offset < flat.shards[rank][1]
        ]
        self._parameters = {
            slot.index: torch.nn.Parameter(slot.view(versions.flats[self._flat_of[slot.index]]), requires_grad=False)
            for slot in self._own
        }
        self._totals = {slot.index: torch.zeros_like(self._parameters[slot.index]) for slot in self._own}
        self._inner = self._make(self._own, self._parameters)
        self._specs = self._try()
        self._memory: Memory | None = None
        self._homes: dict[tuple[int, str], torch.Tensor] = {}
        self._placed = memoryview(b"")

    def _make(self, slots: list[Slot], parameters: dict[int, torch.nn.Parameter]) -> Optimizer:
        index_of = {id(slot.parameter): slot.index for slot in self._layout.slots}
        wanted = {slot.index for slot in slots}
        groups = []
        for group in self._user.param_groups:
            inside = [parameters[i] for p in group["params"] if (i := index_of[id(p)]) in wanted]
            groups.append({**without_parameters(group), "params": inside})
        return same_kind_as(self._user, groups)

    def _try(self) -> dict[int, _Spec]:
        """The state that the optimizer keeps for each parameter, found by a step on probes."""
        probes = {
            slot.index: torch.nn.Parameter(torch.zeros(slot.shape, dtype=self._layout.flats[flat].dtype))
            for slot in self._layout.slots
            if (flat := self._flat_of[slot.index]) is not None
        }
        for probe in probes.values():
            probe.grad = torch.zeros_like(probe)
        trial = self._make(list(self._layout.slots), probes)
        trial.step()
        return {
            index: {
                name: (value.shape, value.dtype)
                for name, value in trial.state[probe].items()
                if isinstance(value, torch.Tensor)
            }
            for index, probe in probes.items()
        }

    # -- state in shared memory --------------------------------------------------------------------------------------

    def _addresses(self) -> tuple[dict[tuple[int, str], int], int]:
        offset, places = 0, {}
        for index, spec in sorted(self._specs.items()):
            for name, (shape, dtype) in sorted(spec.items()):
                places[index, name] = offset
                offset += -(-max(1, shape.numel()) * dtype.itemsize // 64) * 64
        return places, offset

    def memory_size(self) -> int:
        return self._addresses()[1] + len(self._layout.slots)

    def undo_size(self) -> int:
        """As `ShardedOptimizer.undo_size`: an update is one part, as it may concern all parameters at once."""
        return self.memory_size() + self._layout.size

    def owned(self) -> list[tuple[int, int]]:
        """As `ShardedOptimizer.owned`."""
        places, end = self._addresses()
        spans = [(end + slot.index, end + slot.index + 1) for slot in self._own]
        mine = {slot.index for slot in self._own}
        for (index, name), place in places.items():
            if index in mine:
                shape, dtype = self._specs[index][name]
                spans.append((place, place + max(1, shape.numel()) * dtype.itemsize))
        return spans

    def place(self, memory: Memory) -> None:
        self._memory = memory
        self._homes, self._placed = self._places(memory, 0)

    def _places(self, memory: Memory, base: int) -> tuple[dict[tuple[int, str], torch.Tensor], memoryview]:
        """The state in this memory, from this byte on, and a byte per parameter: 1 if it has state."""
        places, end = self._addresses()
        homes = {}
        for (index, name), place in places.items():
            shape, dtype = self._specs[index][name]
            homes[index, name] = memory.tensor(base + place, max(1, shape.numel()), dtype).view(shape)
        return homes, memory.bytes(base + end, len(self._layout.slots))

    def adopt_state(self) -> None:
        for slot in self._own:
            parameter = self._parameters[slot.index]
            self._inner.state.pop(parameter, None)
            if self._placed[slot.index]:
                self._inner.state[parameter] = {name: self._homes[slot.index, name] for name in self._specs[slot.index]}

    def import_state(self, optimizer: Optimizer) -> None:
        for slot in self._own:
            state = optimizer.state.get(slot.parameter)
            self._placed[slot.index] = bool(state)
            for name, value in (state or {}).items():
                if (slot.index, name) in self._homes:
                    self._homes[slot.index, name].copy_(value)
        optimizer.state.clear()

    def export_state(self, optimizer: Optimizer) -> None:
        self._export(self._homes, self._placed, optimizer)

    def export_kept(self, kept: KeptVersion, optimizer: Optimizer) -> None:
        self._export(*self._places(kept.memory, kept.state), optimizer)

    def _export(self, homes: dict[tuple[int, str], torch.Tensor], placed: memoryview, optimizer: Optimizer) -> None:
        optimizer.state.clear()
        for slot in self._layout.slots:
            if slot.index < len(placed) and placed[slot.index]:
                optimizer.state[slot.parameter] = {name: homes[slot.index, name] for name in self._specs[slot.index]}

    # -- updating ----------------------------------------------------------------------------------------------------

    def set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self._inner.param_groups, groups, strict=True):
            group.update(values)

    def update(
        self, weights: Weights, used: list[bytes] | None, scale: float = 1.0, move: tuple[int, int] | None = None
    ) -> int:
        """As `ShardedOptimizer.update`."""
        old, new = move or (0, 0)
        if self.log is not None:
            if self.log.first:
                return 0
            places = self._overwritten(new if old == new else None)
            if self.log.torn:
                self.log.restore(places)
                self.adopt_state()
            self.log.begin(0, places)
        keep, self.keep = self.keep, None
        if keep is not None:
            self._keep(keep, old)
        for slot in self._own:
            failpoints.hit("update.chunk")
            flat = self._flat_of[slot.index]
            start, stop = slot.offset, slot.offset + slot.count
            parameter = self._parameters[slot.index]
            target = self._versions.buffers[new][flat]
            if old != new:
                target[start:stop].copy_(self._versions.buffers[old][flat][start:stop])
            parameter.data = slot.view(target)
            taken = [(rank, weight) for rank, weight in weights if used is None or used[rank][slot.index]]
            if not taken:
                parameter.grad = None
                continue
            total = self._totals[slot.index]
            flat_total = total.as_strided((slot.count,), (1,))
            if self.mix is None:
                parts = tuple(tensors[flat][start:stop] for tensors in self._gradients.flats)
                weighted_sum(flat_total, parts, taken, scale)
            else:
                self.mix(flat_total, flat, start, stop, taken, scale)
            parameter.grad = total
        self._inner.step()
        for slot in self._own:
            self._settle(slot)
        failpoints.hit("chunk.written")
        if self.log is not None:
            self.log.end(0)
        return 0

    def _overwritten(self, buffer: int | None) -> list[memoryview]:
        """The state of this server's parameters, and their values if they are updated in place in this buffer."""
        assert self._memory is not None
        places = [self._memory.bytes(start, end - start) for start, end in self.owned()]
        for slot in self._own if buffer is not None else ():
            assert buffer is not None
            values = self._versions.buffers[buffer][self._flat_of[slot.index]][slot.offset : slot.offset + slot.count]
            places.append(values.view(torch.uint8).numpy().data)
        return places

    def _keep(self, keep: KeptVersion, buffer: int) -> None:
        """Copy the values of this server's parameters, which lie in this buffer, and their state."""
        assert self._memory is not None
        for slot in self._own:
            flat, stop = self._flat_of[slot.index], slot.offset + slot.count
            failpoints.hit("snapshot.copy")
            keep.values[flat][slot.offset : stop].copy_(self._versions.buffers[buffer][flat][slot.offset : stop])
        for start, end in self.owned():
            keep.copy_state(start, end - start, self._memory)

    def _settle(self, slot: Slot) -> None:
        """Move a parameter's state to shared memory."""
        state = self._inner.state.get(self._parameters[slot.index])
        if not state:
            return
        for name, value in state.items():
            home = self._homes.get((slot.index, name))
            self.private |= home is None and value is not None
            if home is not None and value is not home:
                home.copy_(value)
                state[name] = home
        self._placed[slot.index] = 1
