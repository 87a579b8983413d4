"""All-reduce that goes on, without a restart, when a worker dies or leaves.

Every barrier says who is gone, equally to all who are left: those who have died without coming to it. So no further
agreement is needed. The parameters are cut into more shards than there are workers; the shards of one who is gone are
dealt out to the others.

Whoever is lost inside an update leaves its shards half done. So the next version is written into a second buffer, and
the optimizer's state of a shard is copied before it is changed: its new owner puts the copy back, and makes the shard
again from the gradients, which all lie in shared memory still, those of the one who is lost, too.

On several machines each has all of this. Whoever is lost in an update breaks an exchange between them, so all make it
again, from the version before, with the gradients that are left: those of a machine that is gone are gone with it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.servers import StartServers, start_servers
from paceline.config import AllReduce
from paceline.errors import JoinError, TeamError, UsageError, names
from paceline.events import Lost, Reduce, Roster
from paceline.parameters.elastic_reduction import ElasticReduction, shard_owner
from paceline.parameters.reduction import CHUNK, Weights, together, weighted_sum
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.base import Options, TrainerContext
from paceline.strategies.step_table import StepAgreement
from paceline.transport import BarrierKind
from paceline.transport.futex import FutexArray

_VALUE = struct.Struct("=dd")
_SHARDS_EACH = 4
"""Shards per worker at the start: what one leaves can then be divided among all others."""
_TRIES = 8
"""How often an update is made again though nobody was lost."""


class ElasticAllReduceTrainer(AllReduceTrainer):
    """One worker's part in training a model by all-reduce with whoever is left."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        self._gone: set[int] = set()
        self._owned: dict[int, ShardedOptimizer] = {}
        """By the number of the shard."""
        self._buffer = 0
        """The one of two in which the newest version lies."""
        self._agreed: StepAgreement | None = None
        """What the running update is made of."""
        self._scale = 1.0
        """What its mean is multiplied with."""
        self._active: list[int] = []
        """Who brought a gradient to the last update, and so still takes part in the epoch."""
        self._say = context.say
        self._ties: ElasticReduction | None = None
        """To other machines."""
        self._summed: set[int] | None = None
        """Who was gone when the sums were made that a clipped gradient is in, if there is one."""
        self._mended = 0
        """How often connections were made anew for the running update."""
        self._sums = int(len(context.members.machines) > 1)
        super().__init__(model, optimizer, options, context)
        if self._shard is None or self._visible:
            raise UsageError(
                f"an elastic run by all-reduce needs parameters on the CPU, gradients='local', and an optimizer that "
                f"treats every element by itself, which {type(optimizer).__name__} with these options is not"
            )
        self._barrier.spare = True
        if self._rank == 0:  # tell the launcher that one may be lost
            start_servers(context.launch, StartServers(0, "", 0.0, [], True))

    # -- who is here -------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """Those who are left."""
        return [rank for rank in range(self._size) if rank not in self._gone]

    @property
    def present(self) -> int:
        return len(self.ranks)

    @property
    def lead(self) -> int:
        return min(set(range(self._size)) - self._barrier.departed)

    def _owner(self, shard: int) -> int:
        """Who has it on this machine."""
        here = self._members.machines[self._members.machine]
        return shard_owner([rank for rank in here if rank not in self._gone], shard, self._cuts)

    # -- setting up --------------------------------------------------------------------------------------------------

    def _shard_count(self) -> int:
        self._cuts = self._size * _SHARDS_EACH
        return self._cuts

    def _reach_out(self, context: TrainerContext) -> None:
        if len(self._members.machines) > 1:
            topology = context.strategy.topology if isinstance(context.strategy, AllReduce) else "auto"
            self._ties = ElasticReduction(self._layout, self._gradients, self._members, topology, self._cuts)
            self._ties.form(())
            if self._ties.broken:
                raise JoinError(self._ties.trouble)

    def _share_versions(self) -> None:
        members, layout = self._members, self._layout
        self._versions = versions = Versions(layout, members.share(Versions.memory_size(layout, 2)), 2)
        if self._ties is not None:
            members.mirror([slot.parameter for slot in layout.slots])
        if self._place == 0:
            versions.fill()
        self._barrier.wait(BarrierKind.ALLOCATE)
        versions.pull()
        self._shard = ShardedOptimizer(self._optimizer, layout, versions, self._gradients, 0, self._cuts)
        size = self._shard.memory_size()
        self._state, self._kept = members.share(size), members.share(size)
        self._shard.place(self._state)
        begun = members.share(FutexArray.STRIDE * self._cuts)
        self._begun = FutexArray(begun.bytes(0, FutexArray.STRIDE * self._cuts), self._cuts)
        """By shard, the version for which its state was copied, and perhaps changed since."""
        self._take_shards()
        self._import_state()

    def _take_shards(self) -> list[int]:
        """Own what is to be owned by this worker now; returns what is new."""
        mine = [shard for shard in range(self._cuts) if self._owner(shard) == self._rank]
        new = [shard for shard in mine if shard not in self._owned]
        before, self._owned = self._owned, {}
        assert self._versions is not None
        for shard in mine:
            self._owned[shard] = before.get(shard) or ShardedOptimizer(
                self._optimizer, self._layout, self._versions, self._gradients, shard, self._cuts
            )
        for shard in new:
            self._owned[shard].place(self._state)
            self._owned[shard].adopt_state()
            if self._groups:
                self._owned[shard].set_hyperparameters(self._groups)
        return new

    def _import_state(self) -> None:
        state = dict(self._optimizer.state)
        for shard in self._owned.values():
            self._optimizer.state.update(state)
            shard.import_state(self._optimizer)
        self._optimizer.state.clear()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        type(self._optimizer).load_state_dict(self._optimizer, state)
        self._import_state()

    # -- barriers, at which it shows who is gone ---------------------------------------------------------------------

    def _meet(self, intent: BarrierKind, length: int = 0) -> BarrierKind:
        topic = super()._meet(intent, self._own_trouble() if intent is BarrierKind.PUBLISH else length)
        if topic is BarrierKind.UPDATE:
            self._active = [rank for rank, passive in enumerate(self._barrier.passive) if not passive]
        if topic is BarrierKind.PUBLISH:
            self._make_sure()
        elif gone := set(self._barrier.departed) - self._gone:
            self._lose(gone)
        if topic is BarrierKind.PUBLISH and self._versions is not None:
            self._buffer ^= 1
            self._versions.pull(self._buffer)
        return topic

    def _make_sure(self) -> None:
        """At the end of an update: make it again until nobody was lost in it."""
        while True:
            gone = set(self._barrier.departed) - self._gone
            if not gone and not self._broken:
                self._mended = 0
                return
            new = self._lose(gone, counted=True) if gone else self._mend()
            if self._ties is None:
                for shard in new:
                    self._update_again(shard)
            else:
                self._update_all_again(self._ties)
            super()._meet(BarrierKind.PUBLISH, self._own_trouble())

    @property
    def _broken(self) -> bool:
        """Whether somebody's exchange with another machine has failed in this update."""
        return self._ties is not None and any(self._barrier.notes[rank][0] for rank in self.ranks)

    def _mend(self) -> list[int]:
        """A connection between machines has broken, and nobody is known to be lost: have others, and go on."""
        assert self._ties is not None
        self._mended += 1
        if self._mended > _TRIES:
            raise TeamError(f"an update failed {_TRIES} times though no worker was lost: {self._ties.trouble}")
        self._ties.form(self._gone)
        return []

    def _own_trouble(self) -> int:
        """Bring to a barrier whether this worker's exchange has failed; returns how long that note is."""
        self._barrier.note[0] = self._ties is not None and self._ties.broken
        return 1

    def _lose(self, gone: set[int], counted: bool = False) -> list[int]:
        """Go on without these; returns the shards that are this worker's from now on.

        counted: the gradients that they brought to the update count, where they have not gone with their machine.
        """
        before = self.present
        died = sorted(rank for rank in gone if not self._barrier.has_left(rank))
        self._gone |= gone
        if self._weight == 1.0 / before:
            self._weight = 1.0 / self.present
        if gone and self._rank == min(self.ranks):
            now = time.perf_counter()
            for rank in died:
                self._recorder.add(Lost(rank, now))
            self._recorder.add(Roster(self._rank, now, self.ranks, self.version))
            word = "died" if died else "left"
            rest = "the other goes" if self.present == 1 else f"the other {self.present} go"
            self._say(f"{names(sorted(gone))} {word}; {rest} on from version {self.version}")
        self._rate = self._rate.of(self.present)
        new = self._take_shards()
        if self._ties is not None:
            self._ties.form(self._gone)
        kept = {rank for rank in gone if counted and (self._ties is None or self._ties.alive(rank))}
        for some, counts in ((kept, True), (gone - kept, False)):
            if some:
                self.lost(some, counts, self._active)
        return new

    def _update_again(self, shard: int) -> None:
        """Make a shard of the next version whose owner was lost while it did, or before."""
        assert self._agreed is not None
        self._restore(shard)
        self._update_one(shard, self._agreed)

    def _restore(self, shard: int) -> None:
        """Let the optimizer's state be what it was before the update that was begun."""
        own = self._owned[shard]
        if self._begun.values[shard * self._begun.step] == (self.version + 1) & 0xFFFFFFFF:
            for start, size in own.ranges():
                self._state.bytes(start, size)[:] = self._kept.bytes(start, size)
        own.adopt_state()

    def _update_all_again(self, ties: ElasticReduction) -> None:
        """Make this worker's part of the next version from what is left of the gradients."""
        assert self._agreed is not None
        before, self._agreed = self._agreed.share, self._left_of(self._agreed)
        if not self._agreed.weights:  # all are gone with their machines: the version stays what it is
            self._keep_version()
            return
        self._scale *= before / self._agreed.share
        ties.sum(self._agreed.weights, self._agreed.used)
        for shard in [] if ties.broken else list(self._owned):
            self._update_again(shard)

    def _left_of(self, agreed: StepAgreement) -> StepAgreement:
        """The same without the gradients that were lost with their machines."""
        if self._ties is None or not agreed.weights:
            return agreed
        weights = [(rank, weight) for rank, weight in agreed.weights if self._ties.alive(rank)]
        part = sum(weight for _, weight in weights) / sum(weight for _, weight in agreed.weights)
        return agreed._replace(weights=weights, share=agreed.share * part)

    def _keep_version(self) -> None:
        """Let the next version be the last one, in this worker's shards."""
        assert self._versions is not None
        old, new = self._versions.buffers[self._buffer], self._versions.buffers[self._buffer ^ 1]
        for shard in self._owned:
            self._restore(shard)
            for number, flat in enumerate(self._layout.flats):
                start, stop = flat.shards[shard]
                new[number][start:stop].copy_(old[number][start:stop])

    # -- updating ----------------------------------------------------------------------------------------------------

    def _update_shard(self, agreed: StepAgreement) -> int:
        self._agreed = agreed
        self._scale = self._whole(agreed) * (1.0 if self._clipped is None else self._clipped)
        groups = self._rate.scaled(agreed.groups, self.version)
        if groups is not self._groups:
            self._groups = groups
            for shard in self._owned.values():
                shard.set_hyperparameters(groups)
        read = 0
        if self._ties is not None and (self._clipped is None or self._summed != self._gone):
            read = self._ties.sum(agreed.weights, agreed.used)
            if self._ties.broken:
                return read
        return read + sum(self._update_one(shard, agreed) for shard in list(self._owned))

    def _update_one(self, shard: int, agreed: StepAgreement) -> int:
        own = self._owned[shard]
        for start, size in own.ranges():
            self._kept.bytes(start, size)[:] = self._state.bytes(start, size)
        self._begun.write(shard, (self.version + 1) & 0xFFFFFFFF)
        read = own.update(*self._sources(agreed), self._scale, (self._buffer, self._buffer ^ 1))
        return read if self._ties is None else 0  # what came from other machines is counted there

    def _sources(self, agreed: StepAgreement) -> tuple[Weights, list[bytes] | None]:
        """What an update is made of here: everybody's gradients, or the sums that were made over machines."""
        if self._ties is None:
            return agreed.weights, agreed.used
        anywhere, place = agreed.anywhere(), self._ties.place
        return [(place, 1.0)], None if anywhere is None else [anywhere] * (place + 1)

    def _whole(self, agreed: StepAgreement) -> float:
        """What makes a mean of the gradients, if one is missing whose samples were counted on."""
        return 1.0 if abs(agreed.share - 1.0) < 1e-6 or not self._gone else 1.0 / agreed.share

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """As of the team without elasticity, but the mean is made twice: nothing is overwritten that may be needed."""
        agreed = self._table.read()
        _VALUE.pack_into(self._barrier.note, 0, limit, norm)
        self._meet(BarrierKind.CLIP, _VALUE.size)
        known = [rank for rank, _ in agreed.weights if rank not in self._gone]
        limit, norm = _VALUE.unpack_from(self._barrier.notes[known[0]])
        parts = [0.0]
        before = None
        while before != self._gone:  # whose part is missing is made by another
            before = set(self._gone)
            start = time.perf_counter()
            read = 0
            if self._ties is not None:
                agreed = self._left_of(agreed)
                read = self._ties.sum(agreed.weights, agreed.used)
            broken = self._ties is not None and self._ties.broken
            part = 0.0 if broken else self._norm(agreed, norm)
            self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
            _VALUE.pack_into(self._barrier.note, 0, part, broken)
            self._meet(BarrierKind.CLIP, _VALUE.size)
            said = {rank: _VALUE.unpack_from(self._barrier.notes[rank]) for rank in self.ranks}
            if any(failed for _, failed in said.values()) and before == self._gone:
                self._mend()
                before = None
            # Every machine has all parts: those of the first are taken.
            parts = [said[rank][0] for rank in self._members.machines[0] if rank in said]
        self._summed = set(self._gone)
        total = together(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        self._clipped = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(total, dtype=self._layout.flats[0].dtype)

    def _norm(self, agreed: StepAgreement, kind: float) -> float:
        """The norm of the mean gradient of this worker's shards, raised to `kind` so that parts can be added."""
        values, scale = [0.0], self._whole(agreed)
        weights, used = self._sources(agreed)
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
        return together(values, kind)
