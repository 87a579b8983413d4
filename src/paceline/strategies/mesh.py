"""Replicas that are split themselves, with all-reduce between them; one replica is `tensor`.

A step:

1. Each worker of a replica writes the gradient of its part of the model into the replica's buffer, which then holds a
   whole gradient. A parameter that several workers of a replica have whole is written by one of them.
2. All workers wait at a barrier.
3. Each worker sums a shard of all replicas' buffers and writes that shard of the next version, whichever part of the
   model it belongs to.
4. All wait at a second barrier; then all workers see the next version.

Over several machines each replica is inside one of them, and each machine does this in its own memory: it has all parts
of the model once. Between summing a shard and updating it, the owners of the same elements on different machines
exchange their sums (`MachinesReduction`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch.optim import Optimizer

from paceline.errors import TeamError, UsageError
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.layout import Layout
from paceline.parameters.machines_reduction import MachinesReduction
from paceline.parameters.reduction import Reduction, SharedReduction
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.all_reduce import topology_of
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.mesh_coord import MeshCoord
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.split_checks import check_split
from paceline.strategies.split_model import SplitModel
from paceline.strategies.step_table import ReplicaStepTable, StepAgreement
from paceline.strategies.synchronous import SynchronousTrainer
from paceline.transport import BarrierKind
from paceline.transport.call_log import UPDATES


class MeshTrainer(SynchronousTrainer):
    """Trains one worker's part of a split model, by all-reduce between replicas."""

    spans = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        check_split(optimizer, options, str(context.strategy))
        members = context.members
        self._coord = coord = MeshCoord.of(context.strategy, members)
        rate = RateScaling(options.scale_lr, coord.shape.data, options.warmup, options.batch)
        self._split = split = SplitModel(model, optimizer, options, context, coord, self)
        parts = split.parts
        place, neighbours = members.local.rank, members.local.size
        layout = Layout(parts.named, neighbours)
        table = ReplicaStepTable(members, optimizer, len(parts.named), coord.shape.replica)
        memory = members.share(Gradients.memory_size(layout, len(coord.here)))
        gradients = Gradients.shared(layout, memory, coord.local_replica, len(coord.here), parts.own)
        context = dataclasses.replace(context, stopwatch=split.stopwatch)
        super().__init__(model, optimizer, context, rate, gradients, table, counts=not coord.place)
        self.replica = (coord.replica, coord.shape.data)
        self._reduction = self._make_reduction(context)
        memory = members.share(Versions.memory_size(layout), keep=True)
        self._versions = versions = Versions(layout, memory, private=True)
        memory.close_descriptor()
        if place == 0:
            parts.fill(versions.views(0))
        self._barrier.wait(BarrierKind.ALLOCATE)
        versions.pull()
        self._shard = ShardedOptimizer(parts.shadow, layout, versions, gradients, place, neighbours)
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

    def _make_reduction(self, context: TrainerContext) -> Reduction:
        coord, layout, gradients, members = self._coord, self._layout, self._gradients, self._members
        if len(members.machines) == 1:
            return SharedReduction(layout, gradients, self._rank, coord.local_replica)
        topology = topology_of(context)
        return MachinesReduction(layout, gradients, members, topology, coord.here, coord.local_replica)

    def _note_load(self) -> None:
        self._loaded = True

    def _agree(self) -> StepAgreement:
        self._split.calls.check_turn(UPDATES)
        return super()._agree()

    def _wait(self, kind: BarrierKind, length: int = 0, failure: TeamError | None = None) -> BarrierKind:
        self._split.calls.begin_turn(UPDATES)
        return super()._wait(kind, length, failure)

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
        read = 0
        if self._making.clip_factor is None:
            if len(self._members.machines) == 1:
                return self._shard.update(agreed.weights, agreed.used, agreed.scale)
            read = self._reduce(agreed)
            if self._failure is not None:
                return 0
        return read + self._update_reduced(self._shard, agreed, self._coord.local_replica, len(self._coord.here))

    def _first_source(self, agreed: StepAgreement) -> int:
        return agreed.weights[0][0] * self._coord.shape.replica

    def _restore_model(self) -> None:
        self._reduction.close()
        for hook in self._hooks:
            hook.remove()
        self._split.undo()
