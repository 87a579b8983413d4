"""Updates that all workers make together, each of its own shard of the parameters.

A step:

1. Each worker writes its gradient into its shared buffer, and the weight of its samples, its hyperparameters and its
   pace into its note; all wait at a barrier. From there on no worker computes on the old version.
2. Each worker sums its shard of all gradients and writes that shard of the next version.
3. All wait at a second barrier; then all workers see the next version.

A worker that has no more samples in an epoch is passive: it takes part in the others' updates without a gradient.
"""

from __future__ import annotations

import math
import struct
import time
from abc import abstractmethod
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import one_of
from paceline.errors import left_out_step, unlike_rates
from paceline.events import Reduce, Update
from paceline.parameters.gradient_weight import GradientWeight
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.reduction import combine_norms
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.optimizer_patch import clear_gradients, own_parameters
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.step_table import StepAgreement, StepTable, changed_unlike
from paceline.transport import BarrierKind

_VALUES = struct.Struct("=dd")
_DIGEST = struct.Struct("=q")
_SUSPICIOUS = 3
"""Updates in a row with equal losses that are no chance."""


class SynchronousTrainer(Trainer):
    """A trainer whose workers make every update together."""

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
    ) -> None:
        """counts: True if this worker counts the samples of its batches; one worker of a replica does."""
        super().__init__(model, optimizer, context, replicas=rate.workers)
        self._rate, self._gradients, self._table, self._counts = rate, gradients, table, counts
        self._layout: Layout = gradients.layout
        self._weight = GradientWeight(1.0 / rate.workers, gradients, context.say, self._sum_counts)
        self._groups: list[dict[str, Any]] = []
        """The hyperparameters of the last update."""
        self._pending = False
        """True if there is a gradient that no update has used."""
        self._changed: list[Slot] = []
        """Parameters that the script has changed itself since the last update."""
        self._said: set[str] = set()
        """What was said already."""
        self._refused_loss: float | None = None
        """A loss that is not finite, until all workers know it."""
        self._equal_losses = 0
        """Updates in a row in which workers without a loader had the same loss."""
        self._resting: set[int] = set()
        """Workers without samples in the last update."""
        self._initial_version = self.version
        self._exposed = 0
        """The number of workers whose gradients are in `.grad`, if that is the team's gradient; else 0."""
        self._clip_factor: float | None = None
        """The factor on the mean gradient, once it has been reduced and clipped."""
        self._state: OptimizerState | None = None
        """The optimizer's state, if it is in shared memory."""

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def take_batch(self, samples: int, weight: float) -> None:
        self._weight.take_batch(samples, weight)
        super().take_batch(samples if self._counts else 0, weight)

    def take_whole_batches(self) -> None:
        self._weight.take_whole_batches()

    def enter_backward(self, loss: Any) -> bool:
        super().enter_backward(loss)
        exposed, self._exposed = self._exposed, 0
        self._pending = True
        return self._runs(self._weight.add(loss, self.weight, exposed))

    def _sum_counts(self, before: float, now: float) -> tuple[float, float]:
        """The sums of all workers' counts of two minibatches."""
        _VALUES.pack_into(self._barrier.note, 0, before, now)
        self._wait(BarrierKind.COUNT, _VALUES.size)
        ranks = [rank for rank, passive in enumerate(self._barrier.passive) if not passive]
        counts = [self._values_of(rank) for rank in ranks[:: self._table.each]]
        return sum(one for one, _ in counts), sum(other for _, other in counts)

    def _clear_gradients(self, set_to_none: bool) -> None:
        self._pending = False
        clear_gradients(self._optimizer, self._layout, set_to_none)

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
        self._exposed = workers
        if self._clip_factor is not None:
            self._gradients.scale(self._clip_factor)
            self._clip_factor = None

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        self._wait(BarrierKind.CLIP, self._contribute(1.0, found_inf=False))
        return self._clip(limit, norm)

    def finish_epoch(self) -> None:
        helped = False
        self._exposed = 0  # what is in `.grad` is of an update that is over
        while (kind := self._wait(BarrierKind.PASSIVE, self._pending_note())) is not BarrierKind.PASSIVE:
            if not self._take_part(kind):
                self._barrier.carry(kind)
                break
            helped = True
        if helped:
            self._zero_grad()

    def _pending_note(self) -> int:
        """The note of a passive worker: with its gradient, if that is a sum of batches that waits for an update."""
        return self._contribute(1.0, found_inf=False) if self._pending else 0

    # -- what all workers do together; a passive one takes part without a gradient -----------------------------------

    def _take_part(self, kind: BarrierKind) -> bool:
        """Take part, as a passive worker, in the others' work after a barrier; returns False if they left the epoch."""
        if kind is BarrierKind.UPDATE:
            self._run_update()
        elif kind is BarrierKind.CLIP:
            self._clip()
        return kind in (BarrierKind.UPDATE, BarrierKind.CLIP, BarrierKind.STATISTICS, BarrierKind.COUNT)

    def _contribute(self, unscale: float, found_inf: bool, pace: tuple[float, int] = (0.0, 0)) -> int:
        """Write this worker's note; returns its length in bytes."""
        # The reduced mean lies in the shared buffer, where this worker's own gradient must not be copied again.
        used = self._gradients.collect() if self._clip_factor is None else self._gradients.used()
        refused, self._refused_loss = self._refused_loss, None
        loss = self._loss_value if math.isfinite(self._loss_value) else 0.0
        changed, position = self._find_changes(), (self.round, loss if refused is None else refused)
        return self._table.write(
            self._weight.weight, self._weight.loss, unscale, found_inf, used, pace, changed, position
        )

    def _pace(self) -> tuple[float, int]:
        """Seconds and samples of this worker's step."""
        return self._stopwatch.stop(self.version)

    def _run_update(self) -> None:
        start = time.perf_counter()
        agreed = self._table.read()
        self.paces = agreed.paces
        self._notice(agreed)
        self._resting = {rank for rank in range(self._members.size) if rank not in agreed.changes}
        if any(agreed.changes.values()):
            self._commit_changes(agreed.changes)
        read = 0 if agreed.skip else self._update_parameters(agreed)
        self._clip_factor, self._exposed, self._pending = None, 0, False
        self._stopwatch.slow_link(time.perf_counter() - start)
        end = time.perf_counter()
        version = self.version + (not agreed.skip)
        count = len(agreed.weights)
        self._recorder.add(Update(self._rank, start, end - start, version, read, count, agreed.skip))
        if not agreed.skip:
            self._publish()
            self.version += 1
        self.on_update()
        self._stopwatch.restart(time.perf_counter())

    @property
    def _shared(self) -> Versions | None:
        """The parameters in shared memory, if they are there."""
        return None

    def _refuse_loss(self, loss: float) -> None:
        self._refused_loss = loss  # all workers raise it together

    def _notice(self, agreed: StepAgreement) -> None:
        """Raises Mismatch if a worker is at another batch than the others; says what else is odd, once."""
        for rank, loss in agreed.not_finite.items():
            raise self._not_finite(loss, rank)
        first = min(agreed.rounds)
        others = [rank for rank, number in agreed.rounds.items() if number != agreed.rounds[first]]
        if others:
            raise left_out_step(others, first)
        if agreed.unlike >= 0 and "rates" not in self._said:
            self._said.add("rates")
            self._say(unlike_rates(agreed.unlike, first))
        self._equal_losses = self._equal_losses + 1 if agreed.alike else 0
        if self._equal_losses == _SUSPICIOUS and "alike" not in self._said:
            self._said.add("alike")
            self._say(
                "all workers have the same loss, so they seem to train on the same data: without a loader of the team "
                "each must draw its own, for example after torch.manual_seed(seed + team.rank)"
            )

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
        if others and self.version > self._initial_version:
            raise changed_unlike(self._changed, others, ranks[0])
        here = self._members.machines[self._members.machine]
        if any(not set(ranks) & set(machine) for machine in self._members.machines):
            self._members.mirror([slot.parameter for slot in self._layout.slots])
            self._find_changes()
            ranks = sorted(here)
        if self._rank in [rank for rank in ranks if rank in here][:each]:
            self._shared.commit(self._changed)
        self._wait(BarrierKind.PUBLISH)
        self._shared.discard()

    @abstractmethod
    def _update_parameters(self, agreed: StepAgreement) -> int:
        """Make the next version of this worker's shards; returns the bytes read from other workers."""

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
        scale = agreed.factor if self._exposed else 1.0  # else it is part of the weights of the sum
        return shard.update([(source, 1.0)], used, scale * (1.0 if self._clip_factor is None else self._clip_factor))

    def _resize(self, before: int, now: int) -> None:
        """The team has another number of workers."""
        self._weight.resize(before, now)
        self._rate = self._rate.of(now)

    @abstractmethod
    def _reduce(self, agreed: StepAgreement) -> int:
        """Make the mean gradient of this worker's shard; returns the bytes read from other workers."""

    @abstractmethod
    def _shard_norm(self, agreed: StepAgreement, norm: float) -> float:
        """The norm of that mean, raised to `norm` so that shards can be added; the norm itself for inf."""

    def _first_source(self, agreed: StepAgreement) -> int:
        """The rank of the first worker that contributes a gradient."""
        return agreed.weights[0][0]

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """Make the mean gradient of this worker's shard, and compute the norm of the whole."""
        start = time.perf_counter()
        agreed = self._table.read()
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
        self._clip_factor = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ computes it
        return torch.tensor(total, dtype=self._layout.flats[0].dtype)

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
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
        return super()._state_dict() if self._state is None else self._state.state_dict()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        if self._state is not None:
            self._state.import_all()

    def close(self) -> None:
        self._gradients.detach()
        super().close()
        if self._state is not None:
            self._state.export(copy=True)
            self._restore_model()
            own_parameters(self._layout)

    def _restore_model(self) -> None:
        """Make a split model whole again."""


def check_rate(options: Options, workers: int) -> RateScaling:
    """Checks the options of a synchronous trainer; returns how its learning rate is scaled."""
    one_of("gradients", options.gradients, ("local", "visible"))
    return RateScaling(options.scale_lr, workers, options.warmup, options.batch)
