"""All-reduce that goes on, without a restart, when a worker dies or leaves.

Every barrier tells all workers that are left which workers are gone, so that no further agreement is needed. An update
in which a worker was lost is made again: on one machine only the lost worker's shards, from the gradients, which are
all in shared memory still.

Over several machines each machine does this in its own shared memory. A worker that is lost in an update breaks an
exchange between machines, so all workers make the update again, from the version before, with the gradients that are
left: those of a machine that is gone are lost with it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.servers import EndWorkers, StartServers, start_servers, tell_launcher
from paceline.errors import JoinError, TeamError, UsageError, names
from paceline.events import Lost, Reduce, Roster
from paceline.parameters.elastic_reduction import ElasticReduction
from paceline.parameters.gradient_state import part_masks
from paceline.parameters.gradients import Gradients
from paceline.parameters.joint import describe, split_parameters
from paceline.parameters.layout import Layout
from paceline.parameters.optimizers import is_elementwise
from paceline.parameters.reduction import Weights
from paceline.parameters.versions import Versions
from paceline.strategies.all_reduce import on_host, topology_of
from paceline.strategies.announcing import AnnouncingTrainer
from paceline.strategies.context import Options, TrainerContext, check_rate
from paceline.strategies.elastic_join import TeamJoining
from paceline.strategies.elastic_shards import ElasticShards
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.step_table import StepAgreement, StepTable
from paceline.transport import BarrierKind

_SHARDS_EACH = 4
"""Shards per worker at the start: those of a lost worker can then be divided among all others. At least half as many
if there are as many workers as there is room for."""
_TRIES = 8
"""Updates that are made again after a broken exchange, though no worker was lost."""


class ElasticAllReduceTrainer(AnnouncingTrainer):
    """Trains a model by all-reduce with the workers that are left."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        members = context.members
        rate = check_rate(options, members.size)
        trained, rest = split_parameters(model, optimizer)
        shareable = on_host(parameter for _, parameter in trained) and is_elementwise(optimizer)
        if not shareable or options.gradients == "visible":
            raise UsageError(
                f"an elastic run by all-reduce needs parameters on the CPU, gradients='local', and an optimizer that "
                f"treats every element by itself, which {describe(optimizer)} with these options is not"
            )
        count = max(members.size * _SHARDS_EACH, members.room * _SHARDS_EACH // 2)
        if members.kept is not None:
            del members.kept[1:]  # of a trainer before
        layout = Layout(trained, count)
        table = StepTable(members, optimizer, len(layout.slots), masks=part_masks(optimizer, layout))
        sources = members.local.room + (len(members.machines) > 1)  # over machines one more, for their sums
        memory = members.share(Gradients.memory_size(layout, sources))
        gradients = Gradients.shared(layout, memory, members.local.rank, sources)
        super().__init__(model, optimizer, context, rate, gradients, table)
        self._launch = context.launch
        self._gone: set[int] = set()
        self._seniority = list(range(members.size))
        """The workers that are left; those that have joined come last."""
        self._grown = False
        """True if one has joined."""
        self._agreed: StepAgreement | None = None
        """The agreement of the current update."""
        self._scale = 1.0
        """The factor on the mean gradient of the current update."""
        self._active: list[int] = []
        """Ranks that contributed to the last update, and so still take part in the epoch."""
        self._summed: set[int] | None = None
        """Ranks that were gone when the gradient was clipped; it was summed over machines without them."""
        self._mended = 0
        """Broken exchanges in the current update."""
        self._machines: ElasticReduction | None = None
        if len(members.machines) > 1:
            self._machines = ElasticReduction(layout, gradients, members, topology_of(context), count)
            self._machines.form(())
            if self._machines.broken:
                raise JoinError(self._machines.trouble)
        members.mirror([*rest, *model.buffers()])
        self._shards = ElasticShards(optimizer, members, gradients, count)
        self._share_state(OptimizerState(optimizer, self._shards.shards))
        gradients.attach()
        self._announce()
        self._patch_optimizer()
        self._watch_gradients()
        self._barrier.spare = True
        if members.kept is not None:
            self.joining = TeamJoining(self, members, context.launch, [*rest, *model.buffers()])
        if self._rank == 0 and members.joining is None:  # the launcher must know that a worker may be lost
            address = "" if self.joining is None else self.joining.address
            start_servers(context.launch, StartServers(0, address, 0.0, [], True, peers=True))

    @property
    def _shared(self) -> Versions | None:
        return self._shards.versions

    # -- the workers that are left -----------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """The workers that are left."""
        return [rank for rank in range(self._members.size) if rank not in self._gone]

    @property
    def present(self) -> int:
        return len(self.ranks)

    @property
    def lead(self) -> int:
        return next(rank for rank in self._seniority if rank not in self._barrier.departed)

    def _wait(self, kind: BarrierKind, length: int = 0, failure: TeamError | None = None) -> BarrierKind:
        kind = super()._wait(kind, self._note_broken() if kind is BarrierKind.PUBLISH else length, failure)
        if kind is BarrierKind.UPDATE:
            self._active = [rank for rank, passive in enumerate(self._barrier.passive) if not passive]
        if kind is BarrierKind.PUBLISH:
            self._complete_update()
            self._shards.publish()
            if self.joining is not None:
                self.joining.wanted = self._active == self.ranks and any(
                    self._barrier.notes[rank][1] for rank in self.ranks
                )
        elif gone := set(self._barrier.departed) - self._gone:
            # The last gradients count in an update that has begun, and between it and the next batch.
            self._lose(gone, counted=kind in (BarrierKind.ADMIT, BarrierKind.COMMIT))
        return kind

    def _note_broken(self) -> int:
        """Write into this worker's note whether its exchange with other machines has failed; returns its length.

        And whether a worker wants to join.
        """
        self._barrier.note[0] = self._machines is not None and self._machines.broken
        self._barrier.note[1] = self.joining is not None and self.joining.look()
        return 2

    @property
    def _broken(self) -> bool:
        """True if a worker's exchange with another machine has failed in this update."""
        return self._machines is not None and any(self._barrier.notes[rank][0] for rank in self.ranks)

    def _lose(self, gone: set[int], counted: bool = False) -> list[int]:
        """Go on without these workers; returns the numbers of the shards that are this worker's from now on.

        counted: True if their gradients are part of the current update, unless they are lost with their machine.
        """
        before = self.present
        self._seniority = [rank for rank in self._seniority if rank not in gone]
        died = sorted(rank for rank in gone if not self._barrier.has_left(rank))
        self._gone |= gone
        self._resize(before, self.present)
        if gone and self._rank == min(self.ranks):
            now = time.perf_counter()
            for rank in died:
                self._recorder.add(Lost(rank, now))
            self._recorder.add(Roster(self._rank, now, self.ranks, self.version))
            rest = "the other goes" if self.present == 1 else f"the other {self.present} go"
            self._say(f"{self._how_lost(gone)}; {rest} on from version {self.version}")
        new = self._shards.assign(self._gone, self._groups)
        if self._machines is not None:
            if self._rank == self.lead and (evicted := self._barrier.evicted & gone):
                tell_launcher(self._launch, EndWorkers(sorted(evicted)))
            self._machines.form(self._gone)
        kept = {rank for rank in gone if counted and (self._machines is None or self._machines.alive(rank))}
        for some, counts in ((kept, True), (gone - kept, False)):
            if some:
                self.on_lost(some, counts, self._active)
        return new

    def gain(self, rank: int, pid: int) -> None:
        """Go on with a worker that has joined."""
        before, self._grown = self.present, True
        absent = set(range(self._members.size, rank))  # which may join later
        self._members.grow(rank + 1)
        self._gone = (self._gone | absent) - {rank}
        self._barrier.departed |= absent
        self._barrier.departed.discard(rank)
        self._seniority.append(rank)
        if rank != self._rank:
            self._members.watch(rank, pid)
            self._table.forget(rank)
            self._resize(before, self.present)
        self._shards.assign(self._gone, self._groups)
        if self._rank == self.lead:
            self._recorder.add(Roster(self._rank, time.perf_counter(), self.ranks, self.version))
            self._say(f"rank {rank} has joined; {self.present} go on from version {self.version}")

    def enter(self, version: int, buffer: int, gone: set[int], seniority: list[int]) -> None:
        """Join the others, which are at this version."""
        self._gone, self._seniority, self._active = set(gone), list(seniority), sorted(seniority)
        self.version = version
        self._resize(self._rate.workers, len(seniority) + 1)
        self._shards.enter(buffer)

    @property
    def buffer(self) -> int:
        """The buffer with the newest version."""
        return self._shards.buffer

    @property
    def description(self) -> list[Any]:
        """Model and optimizer, which those of a worker that joins must equal."""
        kinds = [f"{type(patch.optimizer).__module__}.{type(patch.optimizer).__name__}" for patch in self._patches]
        return [kinds, [[slot.name, list(slot.parameter.shape)] for slot in self._layout.slots]]

    def _how_lost(self, gone: set[int]) -> str:
        """Which workers are gone, and how, as a clause of a message."""
        found: dict[str, list[int]] = {}
        for rank in sorted(gone):
            how = "left" if self._barrier.has_left(rank) else self._barrier.gone(rank) or "died"
            found.setdefault(how, []).append(rank)
        return ", ".join(f"{names(ranks)} {how}" for how, ranks in found.items())

    # -- updating ----------------------------------------------------------------------------------------------------

    def _update(self, unscale: float, found_inf: bool) -> None:
        if self._members.joining is not None:
            raise UsageError(
                f"rank {self._rank} joins a running team, which it does at the first batch of a loader of the team, "
                "and its script steps before"
            )
        super()._update(unscale, found_inf)

    def load(self, model: Any, optimizer: Any) -> None:
        if self._members.joining is None:  # else the run has trained on from this checkpoint
            super().load(model, optimizer)

    def _update_parameters(self, agreed: StepAgreement) -> int:
        self._agreed = agreed = self._left_of(agreed)
        clip_factor = self._making.clip_factor
        self._scale = self._mean_scale(agreed) * agreed.scale * (1.0 if clip_factor is None else clip_factor)
        groups = self._scaled_groups(agreed)
        if groups is not None:
            self._shards.set_hyperparameters(groups)
        read = 0
        if self._machines is not None and (clip_factor is None or self._summed != self._gone):
            read = self._reduce(agreed)
            if self._machines.broken:
                return read
        return read + sum(self._update_shard(number, agreed) for number in self._shards.numbers)

    def _update_shard(self, number: int, agreed: StepAgreement) -> int:
        read = self._shards.update(number, self.version + 1, *self._sources(agreed), self._scale)
        return read if self._machines is None else 0  # bytes from other machines are counted by the reduction

    def _sources(self, agreed: StepAgreement) -> tuple[Weights, list[bytes] | None]:
        """The gradients of an update: all workers', or the sums over machines."""
        if self._machines is None:
            return agreed.weights, agreed.used
        anywhere, place = agreed.anywhere(), self._machines.place
        return [(place, 1.0)], None if anywhere is None else [anywhere] * (place + 1)

    def _mean_scale(self, agreed: StepAgreement) -> float:
        """The factor that makes a mean of the gradients, if a lost worker's share is missing."""
        return 1.0 if abs(agreed.share - 1.0) < 1e-6 or not (self._gone or self._grown) else 1.0 / agreed.share

    # -- making an update again --------------------------------------------------------------------------------------

    def _complete_update(self) -> None:
        """Make an update again until no worker was lost in it."""
        while True:
            gone = set(self._barrier.departed) - self._gone
            if not gone and not self._broken:
                self._mended = 0
                return
            new: list[int] = []
            if gone:
                new = self._lose(gone, counted=True)
            else:
                self._mend()
            if self._machines is None:
                for number in new:
                    self._update_again(number)
            else:
                self._update_all_again(self._machines)
            super()._wait(BarrierKind.PUBLISH, self._note_broken())

    def close(self) -> None:
        super().close()
        if self._machines is not None:
            self._machines.close()

    def _mend(self) -> None:
        """Connect the machines again: a connection between them has broken, and no worker is known to be lost."""
        assert self._machines is not None
        self._mended += 1
        if self._mended > _TRIES:
            raise TeamError(f"an update failed {_TRIES} times though no worker was lost: {self._machines.trouble}")
        self._machines.form(self._gone)

    def _update_again(self, number: int) -> None:
        """Make a shard of the next version again whose owner was lost while it did, or before."""
        assert self._agreed is not None
        self._shards.restore(number, self.version + 1)
        self._update_shard(number, self._agreed)

    def _update_all_again(self, machines: ElasticReduction) -> None:
        """Make this worker's shards of the next version again from the gradients that are left."""
        assert self._agreed is not None
        before, self._agreed = self._agreed.share, self._left_of(self._agreed)
        if not self._agreed.weights:  # all gradients are lost with their machines
            self._shards.repeat_version(self.version + 1)
            return
        self._scale *= before / self._agreed.share
        self._reduce(self._agreed)
        for number in [] if machines.broken else self._shards.numbers:
            self._update_again(number)

    def _left_of(self, agreed: StepAgreement) -> StepAgreement:
        """The agreement without the gradients that were lost with their machines."""
        if self._machines is None or not agreed.weights:
            return agreed
        weights = [(rank, weight) for rank, weight in agreed.weights if self._machines.alive(rank)]
        if agreed.sums:  # each sample adds its gradient, however many others there are
            return agreed._replace(weights=weights)
        part = sum(weight for _, weight in weights) / sum(weight for _, weight in agreed.weights)
        return agreed._replace(weights=weights, share=agreed.share * part)

    # -- clipping ----------------------------------------------------------------------------------------------------

    def _reduce(self, agreed: StepAgreement) -> int:
        """Over machines, sum the gradients beside, not over them: they may be needed again."""
        if self._machines is None:
            return 0
        read = self._machines.sum(agreed.weights, agreed.used, again=agreed.again)
        self._record_sent()
        return read

    def _shard_norm(self, agreed: StepAgreement, norm: float) -> float:
        return self._shards.norm(norm, *self._sources(agreed), self._mean_scale(agreed))

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """Compute the norm of the mean gradient; the update makes the mean once more, as nothing is overwritten."""
        agreed = self._agree()
        self._exchange_values(limit, norm)
        known = [rank for rank, _ in agreed.weights if rank not in self._gone]
        limit, norm = self._values_of(known[0])
        parts = [0.0]
        before = None
        while before != self._gone:  # the norms of a lost worker's shards are computed by others
            before = set(self._gone)
            start = time.perf_counter()
            agreed = self._left_of(agreed)
            read = self._reduce(agreed)
            broken = self._machines is not None and self._machines.broken
            part = 0.0 if broken else self._shard_norm(agreed, norm)
            self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
            self._exchange_values(part, broken)
            values = {rank: self._values_of(rank) for rank in self.ranks}
            if any(failed for _, failed in values.values()) and before == self._gone:
                self._mend()
                before = None
            # Every machine has all parts: those of the first are taken.
            parts = [values[rank][0] for rank in self._members.machines[0] if rank in values]
        self._summed = set(self._gone)
        return self._set_clip_factor(parts, limit, norm)
