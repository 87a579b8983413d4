"""The shards of an elastic team's parameters that one worker updates.

The parameters are cut into more shards than there are workers, so that the shards of a lost worker can be dealt out to
the others. A worker may be lost inside an update and leave its shards half done. Therefore the next version is written
into a second buffer, and the optimizer's state of a shard is copied before it is changed: the new owner restores the
copy and makes the shard again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.parameters.elastic_reduction import shard_owner
from paceline.parameters.gradients import Gradients
from paceline.parameters.reduction import CHUNK, Weights, combine_norms, weighted_sum
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.transport import BarrierKind
from paceline.transport.futex import FutexArray


class ElasticShards:
    """This worker's shards, by number, with the two buffers of versions."""

    def __init__(self, optimizer: Optimizer, members: Members, gradients: Gradients, count: int) -> None:
        """count: shards of all workers."""
        self._optimizer, self._members, self._gradients, self._count = optimizer, members, gradients, count
        self._layout = layout = gradients.layout
        memory = members.share(Versions.memory_size(layout, 2), keep=True)
        self.versions = Versions(layout, memory, 2, private=True)
        memory.close_descriptor()
        self.buffer = 0
        """The buffer, 0 or 1, with the newest version."""
        if len(members.machines) > 1:
            members.mirror([slot.parameter for slot in layout.slots])
        if members.local.rank == 0 and members.joining is None:
            self.versions.fill()
        members.barrier.wait(BarrierKind.ALLOCATE)
        if members.joining is None:
            self.versions.pull()
        size = self._shard(0).memory_size()
        self._state, self._copy = members.share(size), members.share(size)
        begun = members.share(FutexArray.STRIDE * count)
        self._begun = FutexArray(begun.bytes(0, FutexArray.STRIDE * count), count)
        """By shard, the version for which its state was copied, and possibly changed since."""
        self._owned: dict[int, ShardedOptimizer] = {}
        if members.joining is None:
            self.assign((), [])

    def enter(self, buffer: int) -> None:
        """Join the others, whose newest version is in this buffer."""
        self.buffer = buffer
        self.versions.pull(buffer)

    def _shard(self, number: int) -> ShardedOptimizer:
        return ShardedOptimizer(self._optimizer, self._layout, self.versions, self._gradients, number, self._count)

    @property
    def numbers(self) -> list[int]:
        return list(self._owned)

    def shards(self) -> Iterable[ShardedOptimizer]:
        return self._owned.values()

    def assign(self, gone: Iterable[int], groups: list[dict[str, Any]]) -> list[int]:
        """Divide all shards among the workers of this machine that are left; returns the numbers of new own shards.

        groups: the hyperparameters of new shards.
        """
        members, lost = self._members, set(gone)
        left = [rank for rank in members.machines[members.machine] if rank not in lost]
        own = [number for number in range(self._count) if shard_owner(left, number, self._count) == members.rank]
        new = [number for number in own if number not in self._owned]
        self._owned = {number: self._owned.get(number) or self._shard(number) for number in own}
        for number in new:
            self._owned[number].place(self._state)
            self._owned[number].adopt_state()
            if groups:
                self._owned[number].set_hyperparameters(groups)
        return new

    def set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for shard in self._owned.values():
            shard.set_hyperparameters(groups)

    # -- updating ----------------------------------------------------------------------------------------------------

    def update(self, number: int, version: int, weights: Weights, used: list[bytes] | None, scale: float) -> int:
        """Make a shard of the next version; returns the bytes read from other workers."""
        shard = self._owned[number]
        for start, size in shard.ranges():
            self._copy.bytes(start, size)[:] = self._state.bytes(start, size)
        self._begun.write(number, version & 0xFFFFFFFF)
        return shard.update(weights, used, scale, (self.buffer, self.buffer ^ 1))

    def restore(self, number: int, version: int) -> None:
        """Restore the optimizer's state of a shard to what it was before its update to this version began."""
        shard = self._owned[number]
        if self._begun.values[number * self._begun.step] == version & 0xFFFFFFFF:
            for start, size in shard.ranges():
                self._state.bytes(start, size)[:] = self._copy.bytes(start, size)
        shard.adopt_state()

    def repeat_version(self, version: int) -> None:
        """Make the next version of this worker's shards equal to the last one."""
        old, new = self.versions.buffers[self.buffer], self.versions.buffers[self.buffer ^ 1]
        for number in self._owned:
            self.restore(number, version)
            for flat_number, flat in enumerate(self._layout.flats):
                start, stop = flat.shards[number]
                new[flat_number][start:stop].copy_(old[flat_number][start:stop])

    def publish(self) -> None:
        """All shards of the next version are written: point the parameters at it."""
        self.buffer ^= 1
        self.versions.pull(self.buffer)

    def norm(self, kind: float, weights: Weights, used: list[bytes] | None, scale: float) -> float:
        """The norm of the mean gradient of this worker's shards, raised to `kind` so that parts can be added."""
        values = [0.0]
        for number, flat in enumerate(self._layout.flats):
            step = max(1, CHUNK // flat.dtype.itemsize)
            parts: Sequence[torch.Tensor] = [tensors[number] for tensors in self._gradients.flats]
            for shard in self._owned:
                start, stop = flat.shards[shard]
                for slot in flat.slots:
                    first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
                    having = [(rank, weight) for rank, weight in weights if used is None or used[rank][slot.index]]
                    for begin in range(first, last, step) if having else ():
                        end = min(begin + step, last)
                        total = torch.empty(end - begin, dtype=flat.dtype)
                        weighted_sum(total, tuple(part[begin:end] for part in parts), having, scale)
                        value = float(torch.linalg.vector_norm(total, kind))
                        values.append(value if kind == float("inf") else value**kind)
        return combine_norms(values, kind)
