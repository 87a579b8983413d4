"""A mesh of whole replicas on several machines: parameters, gradients and optimizer state sharded over all workers.

FSDP2 gathers each block of the model when it is needed and scatters its gradients, in the middle of the forward and the
backward pass, so every worker must be in every one of them. The loader therefore gives everybody as many batches; one
for whom there is no sample gets a copy of another's, which counts for nothing. What is left for the step is to agree
on the learning rate and to run the optimizer on this worker's rows.
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
from paceline.events import Update, Wait
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.reduction import together
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.blocks import check_shardable
from paceline.strategies.fsdp_model import FsdpModel
from paceline.strategies.mesh import refuse
from paceline.strategies.optimizer_patch import OptimizerPatch
from paceline.strategies.step_table import StepTable
from paceline.transport import BarrierKind

_NORM = struct.Struct("=d")
_NOTABLE = 5e-6
"""Seconds below which nobody can be said to have waited."""


class FullyShardedTrainer(Trainer):
    """One worker's part in training a model that is sharded over the workers of several machines."""

    lockstep = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        strategy = str(context.strategy)
        refuse(optimizer, options, strategy)
        check_shardable(model, strategy)
        self._members, self._recorder, self._stopwatch = context.members, context.recorder, context.stopwatch
        self._barrier, self._rank = context.members.barrier, context.members.rank
        self._model, self._optimizer = model, optimizer
        self._rate = RateScaling(options.scale_lr, context.members.size, options.warmup)
        self.version = 0
        self.paces = [(0.0, 0)] * context.members.size
        self._weight = 1.0 / context.members.size
        self._accumulating = False
        context.members.mirror(list(model.buffers()))
        device = next(model.parameters()).device
        self._everybody = WorldGroup(context.members, device, self._exchanged)
        try:
            self._shards = FsdpModel(
                model, optimizer, self._everybody, lambda: self._weight, lambda: self._meet(BarrierKind.GATHER)
            )
        except BaseException:
            self._everybody.close()
            raise
        self._table = StepTable(context.members, optimizer, 0)
        self._patch = OptimizerPatch(optimizer)
        for name, method in (
            ("step", self.step),
            ("zero_grad", self._zero_grad),
            ("state_dict", self._shards.optimizer_state),
            ("load_state_dict", self._load_state_dict),
        ):
            self._patch.replace(name, method)
        # GradScaler then comes to `step`, where it is refused, instead of leaving it out on some workers only.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _exchanged(self, seconds: float, read: int) -> None:
        start = time.perf_counter()
        self._stopwatch.slow_link(seconds)
        self._stopwatch.exchanged(seconds + time.perf_counter() - start, read)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    @property
    def weightless(self) -> bool:
        return self._weight == 0.0

    def take_batch(self, samples: int, weight: float) -> None:
        # Gradients are scattered as soon as they are made, with this weight; what was summed before has its own.
        self._weight = weight
        self._stopwatch.start(samples)

    def accumulate(self, on: bool) -> None:
        self._accumulating = on

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._accumulating:
            return None
        if getattr(self._optimizer, "found_inf", None) is not None:  # as GradScaler sets it for the time of this call
            raise UsageError(
                "GradScaler looks at this worker's part of the gradient only, and would scale differently on others; "
                "train in float32 or bfloat16, which need no scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pace = self._stopwatch.stop(self.version)
        self._meet(BarrierKind.UPDATE, self._table.bring(self._weight, 1.0, False, b"", pace))
        self._update()
        return loss

    def _update(self) -> None:
        start = time.perf_counter()
        agreed = self._table.read()
        self.paces = agreed.paces
        self._shards.reshard()
        with self._patch.values(self._rate.scaled(agreed.groups, self.version)), self._shards.plain():
            self._patch.plain_step()
        self.version += 1
        count = sum(weight > 0 for _, weight in agreed.weights)
        end = time.perf_counter()
        self._recorder.add(Update(self._rank, start, end - start, self.version, 0, count))
        self.updated()
        self._stopwatch.restart(time.perf_counter())

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        gradients = self._shards.gradients()
        parts = [float(torch.linalg.vector_norm(gradient, norm)) for gradient in gradients if gradient.numel()] or [0.0]
        parts = parts if norm == float("inf") else [part**norm for part in parts]
        _NORM.pack_into(self._barrier.note, 0, together(parts, norm))
        self._meet(BarrierKind.CLIP, _NORM.size)
        parts = [_NORM.unpack_from(note)[0] for note in self._barrier.notes]
        total = together(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        factor = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        for gradient in gradients:
            gradient.mul_(factor)
        return torch.tensor(total, dtype=next(self._model.parameters()).dtype)

    def finish_epoch(self) -> None:
        """Everybody had as many batches, so nobody needs help."""

    def _meet(self, intent: BarrierKind, length: int = 0) -> None:
        start = time.perf_counter()
        try:
            self._barrier.wait(intent, length)
        except TeamError:
            self._everybody.drop()
            raise
        if self._barrier.last != self._rank:
            waited = time.perf_counter() - start
            if waited > _NOTABLE:
                self._recorder.add(Wait(self._rank, start, waited, self._barrier.last))

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        self._shards.keep = self._rank == self.lead
        try:
            yield
        finally:
            self._shards.keep = True

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        type(self._optimizer).load_state_dict(self._optimizer, state)
        self._shards.cut_state()

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        # Nobody may still compute on these values.
        self._meet(BarrierKind.BARRIER)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)

    # -- the end -----------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        self._everybody.drop()

    def part(self) -> None:
        self._everybody.close()

    def close(self) -> None:
        self._patch.undo()
        vars(self._optimizer).pop("_step_supports_amp_scaling", None)
        try:
            if self._everybody.open:
                # Without the others the model cannot be whole, which must not go unnoticed.
                self._meet(BarrierKind.BARRIER)
                self._shards.undo()
        finally:
            self._everybody.close()
