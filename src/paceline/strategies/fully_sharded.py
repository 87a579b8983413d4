"""A mesh of whole replicas on several machines: parameters, gradients and optimizer state sharded over all workers.

FSDP2 gathers each block of the model when it is needed and scatters its gradients, in the middle of the forward and the
backward pass, so every worker must take part in every one of them. The loader therefore gives all workers equally many
batches; a worker without samples of its own gets a copy of another's batch, with weight 0. A step agrees on the
learning rate and runs the optimizer on this worker's rows.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.collectives.world_group import WorldGroup
from paceline.errors import TeamError, UsageError
from paceline.events import Update
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.loss_reader import LossReader
from paceline.parameters.loss_weight import LossWeight
from paceline.parameters.reduction import combine_norms
from paceline.strategies.base import Trainer
from paceline.strategies.blocks import check_shardable
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.fsdp_model import FsdpModel
from paceline.strategies.optimizer_patch import run_closure
from paceline.strategies.split_checks import check_split
from paceline.strategies.step_notices import StepNotices
from paceline.strategies.step_table import StepTable, weigh
from paceline.transport import BarrierKind

_NORM = struct.Struct("=d")
_LOSS = struct.Struct("=dqd")  # share of the samples, kind and items of a loss


class FullyShardedTrainer(Trainer):
    """Trains one worker's rows of a model that is sharded over the workers of several machines."""

    lockstep = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        strategy = str(context.strategy)
        check_split(optimizer, options, strategy)
        check_shardable(model, strategy)
        super().__init__(model, optimizer, context)
        self._rate = RateScaling(options.scale_lr, context.members.size, options.warmup, options.batch)
        self._share = 1.0 / context.members.size
        """This worker's share of the samples."""
        self._loss = LossWeight()
        self._agreed: float | None = None
        """The weight of this worker's gradients in the current backward pass; None until the workers agree on it."""
        self._reader = LossReader(context.say, divided=True)
        self._notices = StepNotices(context.say, self._not_finite)
        context.members.mirror(list(model.buffers()))
        device = next(model.parameters()).device
        self._world = WorldGroup(context.members, device, self._exchanged)
        try:
            self._shards = FsdpModel(
                model, optimizer, self._world, self._agree_on_weight, lambda: self._wait(BarrierKind.GATHER)
            )
        except BaseException:
            self._world.close()
            raise
        self._table = StepTable(context.members, optimizer, 0)
        # GradScaler then calls `step` on all workers, where it is refused, instead of skipping it on some.
        self._patch_optimizer()

    def _exchanged(self, seconds: float, read: int) -> None:
        start = time.perf_counter()
        self._stopwatch.slow_link(seconds)
        self._stopwatch.exchanged(seconds + time.perf_counter() - start, read)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    @property
    def weightless(self) -> bool:
        return self._share == 0.0

    def take_batch(self, samples: int, weight: float) -> None:
        self._share, self._reader.samples = weight, samples
        super().take_batch(samples, weight)

    def enter_backward(self, loss: Any) -> bool:
        super().enter_backward(loss)
        # Gradients are scattered as soon as they are made, with this weight; what was summed before has its own.
        self._loss, self._agreed = self._reader.read(loss, self.weight), None
        return True

    def _agree_on_weight(self) -> float:
        """The weight of this worker's gradients, which depends on the losses of all.

        Asked for by the first gradients of a backward pass: all workers scatter those, but one may have a backward pass
        of another model.
        """
        if self._agreed is None:
            start = time.perf_counter()
            _LOSS.pack_into(self._barrier.note, 0, self._share, self._loss.kind, self._loss.items)
            self._wait(BarrierKind.COUNT, _LOSS.size)
            losses = [(rank, *_LOSS.unpack_from(note), 1.0) for rank, note in enumerate(self._barrier.notes)]
            self._agreed = dict(weigh(losses)[0]).get(self._rank, 0.0)
            self._stopwatch.exchanged(time.perf_counter() - start, 0)
        return self._agreed

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if getattr(self._optimizer, "found_inf", None) is not None:  # as GradScaler sets it for the time of a step
            raise UsageError(
                "GradScaler looks at this worker's part of the gradient only, and would scale differently on others; "
                "train in float32 or bfloat16, which need no scaler"
            )
        loss = run_closure(closure)
        skips, pace = self._refuses(found_inf=False), self._stopwatch.stop(self.version)
        position, reader = self._notices.position(self.round, self._loss_value), self._reader
        way = reader.digest.value
        note = self._table.write(self._share, LossWeight(), 1.0, skips, b"", pace, 0, position, 0, way, reader.averaged)
        self._wait(BarrierKind.UPDATE, note)
        self._run_update()
        return loss

    def _refuse_loss(self, loss: float) -> None:
        self._notices.refused = loss  # all workers raise it together

    def _run_update(self) -> None:
        start = time.perf_counter()
        agreed = self._table.read()
        self.paces = agreed.paces
        self._notices.check(agreed, averaged=self._reader.averaged)
        self._reader.digest.value = 0
        self._shards.reshard()
        if not agreed.skip:
            with self._patch.values(self._rate.scaled(agreed.groups, self.version)), self._shards.plain():
                self._patch.plain_step()
            self.version += 1
        count = sum(weight > 0 for _, weight in agreed.weights)
        end = time.perf_counter()
        self._recorder.add(Update(self._rank, start, end - start, self.version, 0, count, agreed.skip))
        self.on_update()
        self._stopwatch.restart(time.perf_counter())

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        gradients = self._shards.gradients()
        parts = [float(torch.linalg.vector_norm(gradient, norm)) for gradient in gradients if gradient.numel()] or [0.0]
        parts = parts if norm == float("inf") else [part**norm for part in parts]
        _NORM.pack_into(self._barrier.note, 0, combine_norms(parts, norm))
        self._wait(BarrierKind.CLIP, _NORM.size)
        parts = [_NORM.unpack_from(note)[0] for note in self._barrier.notes]
        total = combine_norms(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        factor = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ computes it
        for gradient in gradients:
            gradient.mul_(factor)
        return torch.tensor(total, dtype=next(self._model.parameters()).dtype)

    def _wait(self, kind: BarrierKind, length: int = 0, failure: TeamError | None = None) -> BarrierKind:
        try:
            return super()._wait(kind, length, failure)
        except TeamError:
            self._world.drop()
            raise

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self._shards.keep = self._rank == self.lead
        try:
            yield
        finally:
            self._shards.keep = True

    def _state_dict(self) -> dict[str, Any]:
        return self._shards.optimizer_state()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        self._shards.cut_state()

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        # No worker may still compute on these values.
        self._wait(BarrierKind.BARRIER)
        super().load(model, optimizer)

    # -- the end -----------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        self._world.drop()

    def leave(self) -> None:
        self._world.close()

    def close(self) -> None:
        super().close()
        self._reader.close()
        try:
            if self._world.open:
                # Without the others the model cannot be whole, which must raise an error.
                self._wait(BarrierKind.BARRIER)
                self._shards.undo()
        finally:
            self._world.close()
