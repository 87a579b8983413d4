"""A model that is split over the workers of a replica, as its trainer sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.events.stopwatch import Stopwatch
from paceline.strategies.base import Options, TrainerContext
from paceline.strategies.mesh_coord import MeshCoord, random_state, set_random_state
from paceline.strategies.partitioned_parameters import PartitionedParameters
from paceline.strategies.replica_client import ReplicaBarrier
from paceline.strategies.splitting import cut_model, share_rest
from paceline.strategies.stages import Stages, StageWatch
from paceline.transport import BarrierKind


class SplitModel:
    """Cuts a model, and says what of it is whose."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        options: Options,
        context: TrainerContext,
        coord: MeshCoord,
        version: Callable[[], int],
    ) -> None:
        self._members, self._coord = context.members, coord
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise UsageError(f"'{context.strategy}' needs a model on the CPU: its parts lie in the machine's memory")
        rest = [parameter for parameter in model.parameters() if id(parameter) not in held]
        self._members.mirror([*rest, *model.buffers()])
        inside = cut_model(model, options, context, coord)
        self._cutting = None if inside is None else inside.cutting
        self.parts = PartitionedParameters(model, optimizer, coord, self._cutting)
        self.barrier = ReplicaBarrier(self._members, coord, context.say) if coord.shape.replica > 1 else None
        self._stages = None
        if coord.shape.pipeline > 1 and self.barrier is not None:
            self._stages = Stages(model, context, self.barrier.members, coord, version, inside)
        watch: Any = StageWatch(context.stopwatch) if self._stages is not None else context.stopwatch
        self.stopwatch: Stopwatch = watch
        if self._cutting is not None:
            others = share_rest(self._cutting, self._members, coord, held)
            numbers = {self._cutting.names[key]: of for key, of in self.parts.of.items() if key in self._cutting.names}
            named = self.parts.named
            self._cutting.parts = lambda name: (
                [named[number][1].data for number in numbers[name]] if name in numbers else others[name]
            )

    def ready(self) -> None:
        """All values are in their places: let go of others."""
        if self._cutting is not None:
            self._cutting.wholes.clear()
        self.draw_alike()

    def draw_alike(self) -> None:
        """Let all workers of a replica go on with the same random numbers."""
        states = self._members.gather(random_state(), BarrierKind.ALLOCATE)
        set_random_state(states[self._coord.lead])

    def undo(self) -> None:
        """The model is whole again, in memory of its own."""
        if self._cutting is not None:
            self._cutting.undo()
        if self._stages is not None:
            self._stages.close()
        if self.barrier is not None:
            self.barrier.leave()
