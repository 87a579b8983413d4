"""Replicas that are split themselves, with all-reduce between them; one replica is `tensor`.

The way of a step: each worker of a replica has the gradient of its part of the model, and writes it into the replica's
buffer, which so has a whole gradient; all workers meet; each sums a shard from all replicas' buffers and writes that
shard of the next version, whoever's part it is; they meet again, and all see it. What is equal on several workers of a
replica is there once, and is written by one of them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.config import one_of
from paceline.errors import UsageError
from paceline.events import Reduce, Update, Wait
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.layout import Layout
from paceline.parameters.reduction import together
from paceline.parameters.sharding import ELEMENTWISE, ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.mesh_coord import MeshCoord, MeshShape
from paceline.strategies.optimizer_patch import OptimizerPatch, own_parameters, own_state, zero_grad
from paceline.strategies.partitioned_parameters import PartGradients, PartReduction
from paceline.strategies.split_model import SplitModel
from paceline.strategies.step_table import StepAgreement, StepTable
from paceline.transport import BarrierKind

_VALUE = struct.Struct("=dd")
_NOTABLE = 5e-6
"""Seconds below which nobody can be said to have waited."""


class ReplicaStepTable(StepTable):
    """Where workers write what they bring, and read what that is by replica."""

    def __init__(self, members: Members, optimizer: Optimizer, parts: int, shape: MeshShape) -> None:
        super().__init__(members, optimizer, parts)
        self._shape = shape

    def read(self) -> StepAgreement:
        agreed = super().read()
        each = self._shape.replica
        weights = [(rank // each, weight) for rank, weight in agreed.weights if rank % each == 0]
        paces = [
            (max(seconds for seconds, _ in part), sum(samples for _, samples in part))
            for start in range(0, len(agreed.paces), each)
            if (part := agreed.paces[start : start + each])
        ]
        used = None
        if agreed.used is not None:
            used = [either(agreed.used[first : first + each]) for first in range(0, len(agreed.used), each)]
            if all(0 not in used[replica] for replica, _ in weights):
                used = None
        return StepAgreement(weights, used, agreed.skip, agreed.groups, paces)


def either(flags: list[bytes]) -> bytes:
    """Of which parts some worker of a replica has a gradient."""
    found = 0
    for one in flags:
        found |= int.from_bytes(one, "little")
    return found.to_bytes(len(flags[0]), "little")


class MeshTrainer(Trainer):
    """One worker's part in training a model that is split over several, by all-reduce between replicas."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        refuse(optimizer, options, str(context.strategy))
        self._members, self._recorder, self._stopwatch = context.members, context.recorder, context.stopwatch
        self._barrier, self._rank = context.members.barrier, context.members.rank
        self._model, self._optimizer = model, optimizer
        self._coord = coord = MeshCoord(MeshShape.of(context.strategy), self._rank)
        self._replicas = coord.shape.data
        self.replica = (coord.replica, coord.shape.data)
        self._rate = RateScaling(options.scale_lr, self._replicas, options.warmup)
        self.version = 0
        self.paces = [(0.0, 0)] * self._replicas
        self._weight = 1.0 / self._replicas
        self._groups: list[dict[str, Any]] = []
        self._accumulating = False
        self._clipped: float | None = None
        """What to multiply the mean gradient with, once it has been made and clipped."""

        self._split = SplitModel(model, optimizer, options, context, coord, lambda: self.version)
        self._stopwatch = self._split.stopwatch
        parts = self._split.parts
        self._layout = layout = Layout(parts.named, context.members.size)
        self._table = ReplicaStepTable(self._members, optimizer, len(parts.named), coord.shape)
        memory = self._members.share(Gradients.memory_size(layout, self._replicas))
        self._gradients = PartGradients.of(layout, memory, coord.replica, self._replicas, parts.own)
        self._reduction = PartReduction(layout, self._gradients, self._rank, coord.replica)
        self._versions = Versions(layout, self._members.share(Versions.memory_size(layout)))
        if self._rank == 0:
            parts.fill(self._versions.views(0))
        self._barrier.wait(BarrierKind.ALLOCATE)
        self._versions.pull()
        self._shard = ShardedOptimizer(
            parts.shadow, layout, self._versions, self._gradients, self._rank, context.members.size
        )
        self._shard.place(self._members.share(self._shard.memory_size()))
        parts.import_state(self._shard.import_state)
        self._gradients.attach()
        self._patch = OptimizerPatch(optimizer)
        for name, method in (
            ("step", self.step),
            ("zero_grad", self._zero_grad),
            ("state_dict", self._state_dict),
            ("load_state_dict", self._load_state_dict),
        ):
            self._patch.replace(name, method)
        # GradScaler then leaves unscaling and skipping to `step`, where the workers agree on it.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._split.ready()

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def drawn(self) -> None:
        self._split.draw_alike()

    def take_batch(self, samples: int, weight: float) -> None:
        if weight != self._weight:
            if self._gradients.any:
                # Summed over minibatches of unlike weight: bring what is there to the scale of what will come.
                self._gradients.scale(self._weight / weight)
            self._weight = weight
        # They are one replica's samples, so one worker of it counts them.
        self._stopwatch.start(0 if self._coord.place else samples)

    def accumulate(self, on: bool) -> None:
        self._accumulating = on

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            zero_grad(self._optimizer, self._layout, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._accumulating:
            return None
        self._patch.run_hooks("pre")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Set by GradScaler for the time of this call.
        scale = getattr(self._optimizer, "grad_scale", None)
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        self._bring(unscale, bool(getattr(self._optimizer, "found_inf", False)))
        self._meet(BarrierKind.UPDATE)
        self._update()
        self._patch.run_hooks("post")
        return loss

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        self._bring(1.0, skip=False, final=False)
        self._meet(BarrierKind.CLIP)
        return self._clip(limit, norm)

    def finish_epoch(self) -> None:
        helped = False
        while (topic := self._meet(BarrierKind.PASSIVE)) is not BarrierKind.PASSIVE:
            if topic is BarrierKind.UPDATE:
                self._update()
            elif topic is BarrierKind.CLIP:
                self._clip()
            elif topic is not BarrierKind.STATISTICS:
                self._barrier.carry(topic)
                break
            helped = True
        if helped:
            self._zero_grad()

    # -- what the workers do together; a passive one joins in here ---------------------------------------------------

    def _meet(self, intent: BarrierKind, length: int = 0) -> BarrierKind:
        start = time.perf_counter()
        topic = self._barrier.wait(intent, length)
        if self._barrier.last != self._rank:
            waited = time.perf_counter() - start
            if waited > _NOTABLE:
                self._recorder.add(Wait(self._rank, start, waited, self._barrier.last))
        return topic

    def _bring(self, unscale: float, skip: bool, final: bool = True) -> None:
        pace = self._stopwatch.stop(self.version) if final else (0.0, 0)
        # Once the mean is made it lies in the shared buffer, where this worker's own gradient must not go again.
        used = self._gradients.settle() if self._clipped is None else self._gradients.used()
        self._table.bring(self._weight, unscale, skip, used, pace)

    def _update(self) -> None:
        start = time.perf_counter()
        agreed = self._table.read()
        self.paces = agreed.paces
        read = 0 if agreed.skip else self._update_shard(agreed)
        self._clipped = None
        self._stopwatch.slow_link(time.perf_counter() - start)
        end = time.perf_counter()
        version = self.version + (not agreed.skip)
        count = len(agreed.weights)
        self._recorder.add(Update(self._rank, start, end - start, version, read, count, agreed.skip))
        if not agreed.skip:
            self._meet(BarrierKind.PUBLISH)
            self.version += 1
        self.updated()
        self._stopwatch.restart(time.perf_counter())

    def _update_shard(self, agreed: StepAgreement) -> int:
        groups = self._rate.scaled(agreed.groups, self.version)
        if groups is not self._groups:
            self._groups = groups
            self._shard.set_hyperparameters(groups)
        if self._clipped is None:
            return self._shard.update(agreed.weights, agreed.used)
        # The mean is made already and lies in this replica's own buffer.
        anywhere = agreed.anywhere()
        used = None if anywhere is None else [anywhere] * self._replicas
        return self._shard.update([(self._coord.replica, 1.0)], used, self._clipped)

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """Make the mean gradient of this worker's shard and find the norm of the whole."""
        start = time.perf_counter()
        agreed = self._table.read()
        read = self._reduction.shard(agreed.weights, agreed.used)
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
        # Only those who called it know which norm, and what limit; the lowest of them says it.
        _VALUE.pack_into(self._barrier.note, 0, limit, norm)
        self._meet(BarrierKind.CLIP, _VALUE.size)
        first = agreed.weights[0][0] * self._coord.shape.replica
        limit, norm = _VALUE.unpack_from(self._barrier.notes[first])
        part = self._reduction.norm(norm, agreed.anywhere())
        _VALUE.pack_into(self._barrier.note, 0, part, 0.0)
        self._meet(BarrierKind.CLIP, _VALUE.size)
        parts = [_VALUE.unpack_from(note)[0] for note in self._barrier.notes]
        total = together(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        self._clipped = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(total, dtype=self._layout.flats[0].dtype)

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def _state_dict(self) -> dict[str, Any]:
        self._split.parts.export_state(self._shard)
        try:
            return type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._optimizer.state.clear()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        type(self._optimizer).load_state_dict(self._optimizer, state)
        self._split.parts.import_state(self._shard.import_state)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        # Nobody may still compute on these values, and nobody may go on before all of them are there.
        self._meet(BarrierKind.BARRIER)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        self._meet(BarrierKind.BARRIER)

    def close(self) -> None:
        self._gradients.detach()
        self._patch.undo()
        vars(self._optimizer).pop("_step_supports_amp_scaling", None)
        self._split.parts.export_state(self._shard)
        own_state(self._optimizer)
        self._split.undo()
        own_parameters(self._layout)


def refuse(optimizer: Optimizer, options: Options, strategy: str) -> None:
    """What can not be done with a split model, in one sentence."""
    one_of("gradients", options.gradients, ("local", "visible"))
    if options.gradients == "visible":
        raise UsageError(
            f"gradients is 'visible'; under '{strategy}' the mean gradient is made in parts during the update, so it "
            "must be 'local'"
        )
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise UsageError(
            f"{type(optimizer).__name__} is not known to treat every element by itself, as it must where no worker has "
            f"whole parameters; under '{strategy}' use one of {known}"
        )
