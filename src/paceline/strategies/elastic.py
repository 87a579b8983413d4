"""All-reduce that goes on, without a restart, when a worker dies or leaves.

Every meeting says who is gone, equally to all who are left: those who have died without coming to it. So no further
agreement is needed. The parameters are cut into more shards than there are workers; the shards of one who is gone are
dealt out to the others.

Whoever is lost inside an update leaves its shards half done. So the next version is written into a second buffer, and
the optimizer's state of a shard is copied before it is changed: its new owner puts the copy back, and makes the shard
again from the gradients, which all lie in shared memory still, those of the one who is lost, too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.servers import Start, start_servers
from paceline.errors import UsageError, names
from paceline.events import Lost, Reduce, Roster
from paceline.parameters.reduction import CHUNK, together, weighted_sum
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.agreement import Agreement
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.base import Options, Surroundings
from paceline.transport import Intent
from paceline.transport.futex import Words

_VALUE = struct.Struct("=dd")
_SHARDS_EACH = 4
"""Shards per worker at the start: what one leaves can then be divided among all others."""


class ElasticAllReduceTrainer(AllReduceTrainer):
    """One worker's part in training a model by all-reduce with whoever is left."""

    shards_each = _SHARDS_EACH

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, around: Surroundings) -> None:
        self._gone: set[int] = set()
        self._owned: dict[int, ShardedOptimizer] = {}
        """By the number of the shard."""
        self._buffer = 0
        """The one of two in which the newest version lies."""
        self._agreed: Agreement | None = None
        """What the running update is made of."""
        self._scale = 1.0
        """What its mean is multiplied with."""
        self._active: list[int] = []
        """Who brought a gradient to the last update, and so still takes part in the epoch."""
        self._say = around.say
        if len(around.members.machines) > 1:
            raise UsageError(
                "an elastic run by all-reduce must be on one machine; over several, use a parameter server whose "
                "policy can spare workers, such as async"
            )
        super().__init__(model, optimizer, options, around)
        if self._shard is None or self._visible:
            raise UsageError(
                f"an elastic run by all-reduce needs parameters on the CPU, gradients='local', and an optimizer that "
                f"treats every element by itself, which {type(optimizer).__name__} with these options is not"
            )
        self._meeting.spare = True
        if self._rank == 0:  # tell the launcher that one may be lost
            start_servers(around.launch, Start(0, "", 0.0, [], True))

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
        return min(set(range(self._size)) - self._meeting.departed)

    def _owner(self, shard: int) -> int:
        ranks = self.ranks
        return ranks[shard * len(ranks) // self._cuts]

    # -- setting up --------------------------------------------------------------------------------------------------

    def _share_versions(self) -> None:
        members, layout = self._members, self._layout
        self._cuts = self._size * self.shards_each
        self._versions = versions = Versions(layout, members.share(Versions.memory_size(layout, 2)), 2)
        if self._rank == 0:
            versions.fill()
        self._meeting.meet(Intent.ALLOCATE)
        versions.pull()
        self._shard = ShardedOptimizer(self._optimizer, layout, versions, self._gradients, 0, self._cuts)
        size = self._shard.memory_size()
        self._state, self._kept = members.share(size), members.share(size)
        self._shard.place(self._state)
        begun = members.share(Words.STRIDE * self._cuts)
        self._begun = Words(begun.bytes(0, Words.STRIDE * self._cuts), self._cuts)
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

    # -- meetings, at which it shows who is gone ---------------------------------------------------------------------

    def _meet(self, intent: Intent, length: int = 0) -> Intent:
        topic = super()._meet(intent, length)
        if topic is Intent.UPDATE:
            self._active = [rank for rank, passive in enumerate(self._meeting.passive) if not passive]
        while gone := set(self._meeting.departed) - self._gone:
            new = self._lose(gone, counted=topic is Intent.PUBLISH)
            if topic is not Intent.PUBLISH:
                break
            for shard in new:
                self._update_again(shard)
            super()._meet(Intent.PUBLISH)
        if topic is Intent.PUBLISH and self._versions is not None:
            self._buffer ^= 1
            self._versions.pull(self._buffer)
        return topic

    def _lose(self, gone: set[int], counted: bool) -> list[int]:
        """Go on without these; returns the shards that are this worker's from now on."""
        before = self.present
        died = sorted(rank for rank in gone if not self._meeting.has_left(rank))
        self._gone |= gone
        if self._weight == 1.0 / before:
            self._weight = 1.0 / self.present
        if self._rank == min(self.ranks):
            now = time.perf_counter()
            for rank in died:
                self._recorder.add(Lost(rank, now))
            self._recorder.add(Roster(self._rank, now, self.ranks, self.version))
            word = "died" if died else "left"
            rest = "the other goes" if self.present == 1 else f"the other {self.present} go"
            self._say(f"{names(sorted(gone))} {word}; {rest} on from version {self.version}")
        self._rate = self._rate.of(self.present)
        new = self._take_shards()
        self.lost(gone, counted, self._active)
        return new

    def _update_again(self, shard: int) -> None:
        """Make a shard of the next version whose owner was lost while it did, or before."""
        assert self._agreed is not None
        own = self._owned[shard]
        if self._begun.values[shard * self._begun.step] == (self.version + 1) & 0xFFFFFFFF:
            for start, size in own.ranges():
                self._state.bytes(start, size)[:] = self._kept.bytes(start, size)
        own.adopt_state()
        self._update_one(shard, self._agreed)

    # -- updating ----------------------------------------------------------------------------------------------------

    def _update_shard(self, agreed: Agreement) -> int:
        self._agreed = agreed
        self._scale = self._whole(agreed) * (1.0 if self._clipped is None else self._clipped)
        groups = self._rate.scaled(agreed.groups, self.version)
        if groups is not self._groups:
            self._groups = groups
            for shard in self._owned.values():
                shard.set_hyperparameters(groups)
        return sum(self._update_one(shard, agreed) for shard in list(self._owned))

    def _update_one(self, shard: int, agreed: Agreement) -> int:
        own = self._owned[shard]
        for start, size in own.ranges():
            self._kept.bytes(start, size)[:] = self._state.bytes(start, size)
        self._begun.write(shard, (self.version + 1) & 0xFFFFFFFF)
        return own.update(agreed.weights, agreed.used, self._scale, (self._buffer, self._buffer ^ 1))

    def _whole(self, agreed: Agreement) -> float:
        """What makes a mean of the gradients, if one is missing whose samples were counted on."""
        return 1.0 if abs(agreed.share - 1.0) < 1e-6 or not self._gone else 1.0 / agreed.share

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """As of the team without elasticity, but the mean is made twice: nothing is overwritten that may be needed."""
        agreed = self._table.read()
        _VALUE.pack_into(self._meeting.note, 0, limit, norm)
        self._meet(Intent.CLIP, _VALUE.size)
        known = [rank for rank, _ in agreed.weights if rank not in self._gone]
        limit, norm = _VALUE.unpack_from(self._meeting.notes[known[0]])
        parts = [0.0]
        before = None
        while before != self._gone:  # whose part is missing is made by another
            before = set(self._gone)
            start = time.perf_counter()
            part = self._norm(agreed, norm)
            self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, 0))
            _VALUE.pack_into(self._meeting.note, 0, part, 0.0)
            self._meet(Intent.CLIP, _VALUE.size)
            parts = [_VALUE.unpack_from(self._meeting.notes[rank])[0] for rank in self.ranks]
        total = together(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        self._clipped = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(total, dtype=self._layout.flats[0].dtype)

    def _norm(self, agreed: Agreement, kind: float) -> float:
        """The norm of the mean gradient of this worker's shards, raised to `kind` so that parts can be added."""
        values, scale = [0.0], self._whole(agreed)
        for number, flat in enumerate(self._layout.flats):
            step = max(1, CHUNK // flat.dtype.itemsize)
            parts: Sequence[torch.Tensor] = [tensors[number] for tensors in self._gradients.flats]
            for shard in self._owned:
                start, stop = flat.shards[shard]
                for slot in flat.slots:
                    first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
                    weights = [(r, w) for r, w in agreed.weights if agreed.used is None or agreed.used[r][slot.index]]
                    for begin in range(first, last, step) if weights else ():
                        end = min(begin + step, last)
                        total = torch.empty(end - begin, dtype=flat.dtype)
                        weighted_sum(total, tuple(part[begin:end] for part in parts), weights, scale)
                        value = float(torch.linalg.vector_norm(total, kind))
                        values.append(value if kind == float("inf") else value**kind)
        return together(values, kind)
