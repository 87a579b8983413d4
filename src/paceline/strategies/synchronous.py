"""Updates that all workers make together, each of its own shard of the parameters.

A step:

1. Each worker writes its gradient into its shared buffer, and the weight of its samples, its hyperparameters and its
   pace into its note; all wait at a barrier. From there on no worker computes on the old version.
2. Each worker sums its shard of all gradients and writes that shard of the next version.
3. All wait at a second barrier; then all workers see the next version.

A worker that has no more samples in an epoch is passive: it takes part in the others' updates without a gradient.
"""

from __future__ import annotations

import struct
import time
from abc import abstractmethod
from typing import Any

import torch
from torch.optim import Optimizer

from paceline import failpoints
from paceline.errors import TeamError, adds_to_clipped, check_whole, summed_without_part
from paceline.events import Reduce, Update
from paceline.parameters.gradient_state import GradientState, add_loss, clear_gradients, gradient_states, part_slots
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.loss_reader import LossReader
from paceline.parameters.reduction import Reduction, combine_norms
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.base import Trainer
from paceline.strategies.context import TrainerContext
from paceline.strategies.optimizer_patch import own_parameters
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.step_notices import StepNotices
from paceline.strategies.step_table import StepAgreement, StepTable, changed_unlike
from paceline.transport import BarrierKind

_VALUES = struct.Struct("=dd")
_DIGEST = struct.Struct("=q")


class SynchronousTrainer(Trainer):
    """A trainer whose workers make every update together."""

    _reduction: Reduction
    """Makes the mean gradient of this worker's shard."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        context: TrainerContext,
        rate: RateScaling,
        gradients: Gradients,
        table: StepTable,
        *,
        counts: bool = True,
        together: bool = False,
    ) -> None:
        """counts: True if this worker counts the samples of its batches; one worker of a replica does.

        together: True if the gradients of several optimizers are exchanged together.
        """
        super().__init__(model, optimizer, context, replicas=rate.workers)
        self._rate, self._gradients, self._table, self._counts = rate, gradients, table, counts
        self._layout: Layout = gradients.layout
        self._slots = part_slots(optimizer, self._layout)
        """The parameters of each optimizer."""
        self._reader = LossReader(context.say, divided=rate.workers > 1)
        self._states = gradient_states(
            optimizer, gradients, 1.0 / rate.workers, self._reader, self._sum_counts, together=together
        )
        self._distinct = list(dict.fromkeys(self._states))
        self._groups: list[dict[str, Any]] = []
        """The hyperparameters of the last update."""
        self._changed: list[Slot] = []
        """Parameters that the script has changed itself since the last update."""
        self._notices = StepNotices(context.say, self._not_finite)
        self._resting: set[int] = set()
        """Workers without samples in the last update."""
        self._initial_version = self.version
        self._trained = False
        """True if an epoch of training is over without an update."""
        self._failure: TeamError | None = None
        """A failed exchange with another machine, to be raised on all workers at the next barrier."""
        self._state: OptimizerState | None = None
        """The optimizer's state, if it is in shared memory."""

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def take_batch(self, samples: int, weight: float) -> None:
        self._reader.samples, self._reader.copied = samples, not weight
        for state in self._distinct:
            state.take_batch(weight)
        super().take_batch(samples if self._counts else 0, weight)

    def enter_backward(self, loss: Any) -> bool:
        super().enter_backward(loss)
        for number in (number for number, state in enumerate(self._states) if state.clip_factor is not None):
            self._select(number)
            self._show_clipped()
        found = self._reader.read(loss, self.weight)
        add_loss(self._distinct, found)
        return self._runs(not found.is_empty)

    def _sum_counts(self, before: float, now: float) -> tuple[float, float]:
        """The sums of all workers' counts of two minibatches."""
        _VALUES.pack_into(self._barrier.note, 0, before, now)
        self._wait(BarrierKind.COUNT, _VALUES.size)
        ranks = [rank for rank, passive in enumerate(self._barrier.passive) if not passive]
        counts = [self._values_of(rank) for rank in ranks[:: self._table.each]]
        return sum(one for one, _ in counts), sum(other for _, other in counts)

    def _show_clipped(self) -> None:
        """Puts the clipped gradient, to which a backward pass is about to add, into `.grad`."""
        if len(self.paces) > 1:
            raise adds_to_clipped(self._strategy)
        self._gradients_shown(0)  # which is the only replica's

    def _clear_gradients(self, set_to_none: bool) -> None:
        self._making.pending, self._making.clip_factor = False, None
        clear_gradients(self._patch.optimizer, self._slots[self._current], set_to_none)

    def _update(self, unscale: float, found_inf: bool) -> None:
        pace = self._pace()
        while self._wait(BarrierKind.UPDATE, self._contribute(unscale, found_inf, pace)) is BarrierKind.REDUCE:
            self._exchange()  # another worker's script has looked at the gradient
        self._run_update()

    def _exchange(self) -> None:
        """Put the team's gradient into every worker's `.grad`."""
        raise NotImplementedError

    def _gradients_shown(self, workers: int) -> None:
        """The gradient of so many workers is in `.grad` now; it is clipped if it was to be at the update."""
        state = self._making
        state.exposed = workers
        if state.clip_factor is not None:
            state.gradients.scale(state.clip_factor)
            state.clip_factor = None

    @property
    def within_step(self) -> bool:
        return any(state.pending for state in self._distinct)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        self._wait(BarrierKind.CLIP, self._contribute(1.0, found_inf=False))
        return self._clip(limit, norm)

    def finish_epoch(self) -> None:
        helped = False
        for state in self._distinct:
            state.exposed = 0  # what is in `.grad` is of an update that is over
        while (kind := self._wait(BarrierKind.PASSIVE, self._pending_note())) is not BarrierKind.PASSIVE:
            if not self._take_part(kind):
                self._barrier.carry(kind)
                break
            helped = True
        else:
            if self.version == self._initial_version:  # scripts may have made updates by hand
                self._trained = True
                self._share_changes(BarrierKind.EPOCH)
        if helped:
            self._zero_grad()

    def _pending_note(self) -> int:
        """The note of a passive worker: with its gradient, if that is a sum of batches that waits for an update."""
        # Of several optimizers nobody knows which one the others will step.
        return self._contribute(1.0, found_inf=False) if len(self._states) == 1 and self._making.pending else 0

    # -- what all workers do together; a passive one takes part without a gradient -----------------------------------

    def _take_part(self, kind: BarrierKind) -> bool:
        """Take part, as a passive worker, in the others' work after a barrier; returns False if they left the epoch."""
        if kind is BarrierKind.UPDATE:
            self._run_update()
        elif kind is BarrierKind.CLIP:
            self._clip()
        return kind in (BarrierKind.UPDATE, BarrierKind.CLIP, BarrierKind.STATISTICS, BarrierKind.COUNT)

    def _contribute(
        self, unscale: float, found_inf: bool, pace: tuple[float, int] = (0.0, 0), *, together: bool = False
    ) -> int:
        """Write this worker's note; returns its length in bytes.

        together: it is about the gradients of all optimizers.
        """
        optimizer = -1 if together else self._current
        # The reduced mean lies in the shared buffer, where this worker's own gradient must not be copied again.
        state = self._making
        # The team's gradient, which the script may have replaced by another tensor, is taken from there, too.
        in_place = not state.exposed
        if state.clip_factor is None:
            used, wrong = self._offer(state, in_place=in_place)
        else:
            used, wrong = state.gradients.used(), False
        changed, position = self._find_changes(), self._notices.position(self.round, self._loss_value)
        if self.board is not None:
            self._table.tail = self.board.news(self._rank, self.version)
        return self._table.write(
            state.weight.weight,
            state.weight.loss,
            unscale,
            found_inf,
            used,
            pace,
            changed,
            position,
            optimizer,
            self._reader.digest.value,
            self._reader.averaged,
            self.round_share,
            state.exposed,
            wrong,
        )

    def _offer(self, state: GradientState, *, in_place: bool) -> tuple[bytes, bool]:
        """Lets others read this gradient; returns a byte per parameter, 1 if it has one, and True to exchange again."""
        return state.gradients.collect(in_place=in_place), False

    def _pace(self) -> tuple[float, int]:
        """Seconds and samples of this worker's step."""
        return self._stopwatch.stop(self.version)

    def _run_update(self) -> None:
        failpoints.hit("reduce.agreed")
        start = time.perf_counter()
        agreed = self._agree()
        self.paces = agreed.paces
        self._notices.check(agreed, averaged=self._reader.averaged)
        if self.present is None and min(agreed.rounds.values()) >= 0:
            check_whole({rank: part for rank, part in agreed.parts.items() if rank % self._table.each == 0})
        if agreed.sums:
            self._reader.settle()
        if self._resting or len(agreed.changes) < self._members.size:
            self._resting = {rank for rank in range(self._members.size) if rank not in agreed.changes}
        if any(agreed.changes.values()):
            self._commit_changes(agreed.changes)
        read = self._pass_over(agreed) if agreed.skip else self._update_parameters(agreed)
        state = self._making
        state.clip_factor, state.exposed, state.pending, state.stepped = None, 0, False, True
        self._reader.digest.value = 0
        self._stopwatch.slow_link(time.perf_counter() - start)
        end = time.perf_counter()
        version = self.version + (not agreed.skip)
        count = len(agreed.weights)
        self._recorder.add(Update(self._rank, start, end - start, version, read, count, agreed.skip))
        failpoints.hit("reduce.written")
        if not agreed.skip:
            self._publish()
            self.version += 1
        failpoints.hit("reduce.published")
        self.on_update()
        self._stopwatch.restart(time.perf_counter())

    def _agree(self) -> StepAgreement:
        """The agreement that follows from all workers' notes."""
        agreed = self._table.read()
        if self.board is not None:
            for rank, news in agreed.tails.items():
                self.board.hear(rank, news, keeps=self._rank == self.lead)
        if agreed.optimizer < 0:
            return agreed
        self._select(agreed.optimizer)
        state, passive = self._making, self._barrier.passive[self._rank]
        if passive and len(self._states) > 1 and state.pending and not state.stepped and state.gradients.any:
            raise summed_without_part()
        if passive:
            state.exposed = agreed.exposed  # the others may have made another gradient since they looked at one
        return agreed

    @property
    def _shared(self) -> Versions | None:
        """The parameters in shared memory, if they are there."""
        return None

    def _refuse_loss(self, loss: float) -> None:
        self._notices.refused = loss  # all workers raise it together

    def _find_changes(self) -> int:
        """The digest of parameters that the script has changed itself since the last update; 0 if there are none."""
        if self._shared is None:
            return 0
        self._changed = self._shared.changed()
        return self._shared.digest(self._changed) if self._changed else 0

    def epoch_drawn(self) -> None:
        # A worker without samples in the last update has not run what the others' scripts did after it.
        self._share_changes(BarrierKind.EPOCH)

    def _share_changes(self, kind: BarrierKind) -> None:
        """Let all workers see what scripts have changed themselves; all workers call it."""
        _DIGEST.pack_into(self._barrier.note, 0, self._find_changes())
        self._wait(kind, _DIGEST.size)
        digests = {rank: _DIGEST.unpack_from(note)[0] for rank, note in enumerate(self._barrier.notes)}
        digests = {rank: digest for rank, digest in digests.items() if rank not in self._barrier.departed}
        if any(digests.values()):
            self._commit_changes({rank: digest for rank, digest in digests.items() if rank not in self._resting})

    def _commit_changes(self, digests: dict[int, int]) -> None:
        """Scripts have changed parameters themselves: what all of them did alike counts once.

        digests: of the workers' changes, by rank, without those that have had no samples.
        """
        assert self._shared is not None
        each, ranks = self._table.each, sorted(digests)
        first = {rank % each: digests[rank] for rank in reversed(ranks)}
        others = [rank for rank in ranks if digests[rank] != first[rank % each]]
        if others and (self._trained or self.version > self._initial_version):
            raise changed_unlike(self._changed, others, ranks[0])
        machines, shared = self._members.machines, self._shared
        here = machines[self._members.machine]
        if self._rank in [rank for rank in ranks if rank in here][:each]:
            shared.commit(self._changed)
        self._wait(BarrierKind.COMMIT)
        shared.discard()
        if len(machines) > 1 and (others or any(not set(ranks) & set(machine) for machine in machines)):
            # Machines have other values than the lead's, or a worker there has had no samples and changed nothing.
            self._members.mirror([slot.parameter for slot in self._layout.slots])
            if self._rank == here[0]:
                shared.commit(shared.changed())
            self._wait(BarrierKind.COMMIT)
            shared.discard()

    @abstractmethod
    def _update_parameters(self, agreed: StepAgreement) -> int:
        """Make the next version of this worker's shards; returns the bytes read from other workers."""

    def _pass_over(self, agreed: StepAgreement) -> int:
        """The update is skipped; returns the bytes read from other workers."""
        return 0

    def _publish(self) -> None:
        """Wait until all shards of the next version are written."""
        self._wait(BarrierKind.PUBLISH)

    def _scaled_groups(self, agreed: StepAgreement) -> list[dict[str, Any]] | None:
        """The hyperparameters of this update; None if they are those of the last one."""
        groups = self._rate.scaled(agreed.groups, self.version)
        if groups is self._groups:
            return None
        self._groups = groups
        return groups

    def _update_reduced(self, shard: ShardedOptimizer, agreed: StepAgreement, source: int, sources: int) -> int:
        """Update a shard with the mean gradient, which one of the gradient buffers holds already."""
        anywhere = agreed.anywhere()
        used = None if anywhere is None else [anywhere] * sources
        state = self._making
        scale = agreed.factor if state.exposed else agreed.scale
        return shard.update([(source, 1.0)], used, scale * (1.0 if state.clip_factor is None else state.clip_factor))

    def _resize(self, before: int, now: int) -> None:
        """The team has another number of workers."""
        for state in self._distinct:
            state.weight.resize(before, now)
        self._reader.divided = now > 1
        self._rate = self._rate.of(now)

    def _reduce(self, agreed: StepAgreement) -> int:
        """Make the mean gradient of this worker's shard; returns the bytes read from other workers."""
        try:
            return self._reduction.shard(agreed.weights, agreed.used, again=agreed.again)
        except TeamError as error:
            if len(self._members.machines) == 1:
                raise
            self._failure = error
            return 0

    def _shard_norm(self, agreed: StepAgreement, norm: float) -> float:
        """The norm of that mean, raised to `norm` so that shards can be added; the norm itself for inf."""
        return self._reduction.norm(norm, agreed.anywhere())

    def _wait(self, kind: BarrierKind, length: int = 0, failure: TeamError | None = None) -> BarrierKind:
        failure, self._failure = failure or self._failure, None
        return super()._wait(kind, length, failure)

    def _first_source(self, agreed: StepAgreement) -> int:
        """The rank of the first worker that contributes a gradient."""
        return agreed.weights[0][0]

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """Make the mean gradient of this worker's shard, and compute the norm of the whole."""
        start = time.perf_counter()
        agreed = self._agree()
        read = self._reduce(agreed)
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
        # Passive workers know neither limit nor norm; the first contributing worker's count.
        self._exchange_values(limit, norm)
        limit, norm = self._values_of(self._first_source(agreed))
        self._exchange_values(self._shard_norm(agreed, norm))
        # Every machine has all shards. Cut elsewhere, they round differently: all take those of the first.
        return self._set_clip_factor([self._values_of(rank)[0] for rank in self._members.machines[0]], limit, norm)

    def _exchange_values(self, first: float, second: float = 0.0) -> None:
        """Give all workers these two values."""
        _VALUES.pack_into(self._barrier.note, 0, first, second)
        self._wait(BarrierKind.CLIP, _VALUES.size)

    def _values_of(self, rank: int) -> tuple[float, float]:
        first, second = _VALUES.unpack_from(self._barrier.notes[rank])
        return first, second

    def _set_clip_factor(self, parts: list[float], limit: float, norm: float) -> torch.Tensor:
        """Clip at the next update; returns the norm of all parts."""
        total = combine_norms(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        self._making.clip_factor = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ computes it
        return torch.tensor(total, dtype=self._layout.flats[0].dtype)

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def load(self, model: Any, optimizer: Any) -> None:
        # No worker may still compute on these values, and none may go on before all of them are loaded.
        self._wait(BarrierKind.BARRIER)
        super().load(model, optimizer)
        if self._shared is not None:
            changed = self._shared.changed()
            # Only then may others write: a page holds parts of several workers.
            self._wait(BarrierKind.BARRIER)
            if self._rank in self._members.machines[self._members.machine][: self._table.each]:
                self._shared.commit(changed)
            self._wait(BarrierKind.BARRIER)
            self._shared.discard()
        self._wait(BarrierKind.BARRIER)

    def _share_state(self, state: OptimizerState) -> None:
        """Move the optimizer's state to shared memory."""
        self._state = state
        state.import_all()

    def _state_dict(self) -> dict[str, Any]:
        return super()._state_dict() if self._state is None else self._state.state_dict(self._patch.optimizer)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        if self._state is None:
            super()._load_state_dict(state)
        else:
            self._state.load_state_dict(self._patch.optimizer, state)

    def close(self) -> None:
        self._gradients.detach()
        self._reader.close()
        super().close()
        if self._state is not None:
            self._state.export(copy=True)
            self._restore_model()
            own_parameters(self._layout)

    def _restore_model(self) -> None:
        """Make a split model whole again."""
