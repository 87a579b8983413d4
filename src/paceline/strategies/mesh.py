"""Replicas that are split themselves, with all-reduce between them; one replica is `tensor`.

A step:

1. Each worker of a replica writes the gradient of its part of the model into the replica's buffer, which then holds a
   whole gradient. A parameter that several workers of a replica have whole is written by one of them.
2. All workers wait at a barrier.
3. Each worker sums a shard of all replicas' buffers and writes that shard of the next version, whichever part of the
   model it belongs to.
4. All wait at a second barrier; then all workers see the next version.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.layout import Layout
from paceline.parameters.reduction import SharedReduction
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.base import Options, TrainerContext
from paceline.strategies.mesh_coord import MeshCoord, MeshShape
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.split_checks import check_split
from paceline.strategies.split_model import SplitModel
from paceline.strategies.step_table import ReplicaStepTable, StepAgreement
from paceline.strategies.synchronous import SynchronousTrainer
from paceline.transport import BarrierKind


class MeshTrainer(SynchronousTrainer):
    """Trains one worker's part of a split model, by all-reduce between replicas."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        check_split(optimizer, options, str(context.strategy))
        members = context.members
        self._coord = coord = MeshCoord(MeshShape.of(context.strategy), members.rank)
        rate = RateScaling(options.scale_lr, coord.shape.data, options.warmup, options.batch)
        self._split = split = SplitModel(model, optimizer, options, context, coord, self)
        parts = split.parts
        layout = Layout(parts.named, members.size)
        table = ReplicaStepTable(members, optimizer, len(parts.named), coord.shape.replica)
        memory = members.share(Gradients.memory_size(layout, coord.shape.data))
        gradients = Gradients.shared(layout, memory, coord.replica, coord.shape.data, parts.own)
        context = dataclasses.replace(context, stopwatch=split.stopwatch)
        super().__init__(model, optimizer, context, rate, gradients, table, counts=not coord.place)
        self.replica = (coord.replica, coord.shape.data)
        self._reduction = SharedReduction(layout, gradients, self._rank, coord.replica)
        memory = members.share(Versions.memory_size(layout), keep=True)
        self._versions = versions = Versions(layout, memory, private=True)
        memory.close_descriptor()
        if self._rank == 0:
            parts.fill(versions.views(0))
        self._barrier.wait(BarrierKind.ALLOCATE)
        versions.pull()
        self._shard = ShardedOptimizer(parts.shadow, layout, versions, gradients, self._rank, members.size)
        self._shard.place(members.share(self._shard.memory_size()))
        self._share_state(OptimizerState(optimizer, lambda: [self._shard], parts))
        gradients.attach()
        self._patch_optimizer()
        self._watch_gradients()
        self._loaded = False
        """True if the script has loaded values since the last update."""
        self._hooks = [
            model.register_state_dict_pre_hook(lambda *_: self._show_changes()),
            model.register_load_state_dict_post_hook(lambda *_: self._note_load()),
        ]
        split.ready()

    def _note_load(self) -> None:
        self._loaded = True

    def _find_changes(self) -> int:
        found = super()._find_changes()
        sharded = [slot.name.split("@")[0] for slot in self._changed if "@" in slot.name]
        if sharded and not self._loaded:
            raise UsageError(
                f"the script has changed parameters outside of the optimizer ({', '.join(sharded[:3])}) that are "
                "sharded over workers, of which it sees a part; do it before team.setup, or by load_state_dict"
            )
        return found

    def _commit_changes(self, digests: dict[int, int]) -> None:
        super()._commit_changes(digests)
        self._loaded = False

    def _show_changes(self) -> None:
        """Others have changed their parts of the model as this worker's script has: they must be seen in the whole."""
        if self._find_changes():
            self._share_changes(BarrierKind.GATHER)

    def epoch_drawn(self) -> None:
        super().epoch_drawn()
        self._split.draw_alike()

    @property
    def _shared(self) -> Versions | None:
        return self._versions

    def _update_parameters(self, agreed: StepAgreement) -> int:
        groups = self._scaled_groups(agreed)
        if groups is not None:
            self._shard.set_hyperparameters(groups)
        if self._clip_factor is None:
            return self._shard.update(agreed.weights, agreed.used)
        return self._update_reduced(self._shard, agreed, self._coord.replica, self._coord.shape.data)

    def _reduce(self, agreed: StepAgreement) -> int:
        return self._reduction.shard(agreed.weights, agreed.used)

    def _shard_norm(self, agreed: StepAgreement, norm: float) -> float:
        return self._reduction.norm(norm, agreed.anywhere())

    def _first_source(self, agreed: StepAgreement) -> int:
        return agreed.weights[0][0] * self._coord.shape.replica

    def _restore_model(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._split.undo()
