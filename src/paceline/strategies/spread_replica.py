"""One replica on several machines, with a parameter server between it and others: split as `SplitModel` splits one.

Its workers share no memory: they have barriers, messages and collectives of their own over the network, which concern
no other replica, so that replicas need not wait for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.collectives.machines_group import MachinesGroup
from paceline.config import Mesh
from paceline.errors import UsageError
from paceline.events.stopwatch import Stopwatch
from paceline.pipeline.context import PipelineContext
from paceline.pipeline.pipelined_model import PipelinedModel
from paceline.strategies.base import Trainer
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.mesh_coord import MeshCoord, random_state, set_random_state
from paceline.strategies.model_copies import refuse_copies
from paceline.strategies.partitioned_parameters import PartitionedParameters
from paceline.strategies.replica_client import ReplicaBarrier
from paceline.strategies.same_inputs import SameInputs
from paceline.strategies.served_state import served_state
from paceline.strategies.split_checks import log_calls
from paceline.strategies.split_model import (
    StageWatch,
    ordered_places,
    pipeline_of,
    shard_layers,
    stage_speeds,
    tried,
)
from paceline.transport import BarrierKind


class SpreadReplica:
    """Splits a model over the workers of its replica, with the surface of `SplitModel`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        options: Options,
        context: TrainerContext,
        coord: MeshCoord,
        trainer: Trainer,
    ) -> None:
        """trainer: the one that is being made with it."""
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise UsageError(f"'{context.strategy}' needs a model on the CPU: its parts lie in the machine's memory")
        self._members, self._coord, self._model = context.members, coord, model
        context.members.mirror([*model.parameters(), *model.buffers()])
        here = [rank for rank in context.members.machines[context.members.machine] if rank in coord.replica_ranks()]
        self.calls = log_calls(context.members, here)
        self.barrier = ReplicaBarrier(context.members, coord, context.say)
        self.calls.watch(self.barrier.steps)
        self._machines = machines = MachinesGroup(self.barrier.members, context.say)
        self.calls.watch(machines.control)
        machines.watch_all()
        self._sharded = None
        if coord.shape.tensor > 1:
            self._sharded = shard_layers(
                model, options, context, coord, self.calls, machines, replica=self.barrier.members
            )
        self.parts = PartitionedParameters(model, optimizer, coord, self._sharded)
        self.state = served_state(self.barrier.members, model, optimizer, coord, self.parts, self._sharded)
        self.state.listen(machines.network)
        same_inputs = SameInputs(model, self.barrier.members, coord.shape.replica, options)
        self._pipelined = self._pipeline(context, trainer, same_inputs) if coord.shape.pipeline > 1 else None
        watch: Any = context.stopwatch if self._pipelined is None else StageWatch(context.stopwatch)
        self.stopwatch: Stopwatch = watch
        if self._sharded is not None and self._pipelined is None:
            self._sharded.before_call = same_inputs.check
        self._allow_copies = refuse_copies(model.modules())

    def _pipeline(self, context: TrainerContext, trainer: Trainer, same_inputs: SameInputs) -> PipelinedModel:
        mesh, coord = context.strategy, self._coord
        assert isinstance(mesh, Mesh)
        spec, members = pipeline_of(mesh), self.barrier.members
        places, links = ordered_places(spec, coord, members, self._machines, context.say)
        pipeline = PipelineContext(
            spec=spec,
            members=members,
            ranks=places,
            team_ranks=[coord.lead + place for place in places],
            machines=self._machines,
            links=links,
            recorder=context.recorder,
            say=context.say,
            slow_pass=context.stopwatch.slow_pass,
            speeds=stage_speeds(context, coord, places),
            version=lambda: trainer.version,
            calls=self.calls,
            before_call=same_inputs.check,
            enter_backward=lambda loss: trainer.enter_backward(tried(loss)),
            leave_backward=trainer.leave_backward,
            traceable=self._traceable,
            measurable=self.state.measurable,
            in_step=self._sharded is not None,
            counts_samples=coord.part == 0,
        )
        return PipelinedModel(self._model, pipeline, lambda: None, self.state.attach)

    @contextlib.contextmanager
    def _traceable(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.state.traceable())
            if self._sharded is not None:
                stack.enter_context(self._sharded.traceable())
            yield

    def ready(self) -> None:
        """Drops the tensors' former values, once all workers have theirs in shared memory."""
        if self._sharded is not None:
            self._sharded.full_values.clear()
        if self._pipelined is None:
            self.state.hold_own()  # else once the model is cut
        self.draw_alike()

    def draw_alike(self) -> None:
        """Sets the random state of all workers of a replica to that of its first worker."""
        states = self._members.gather(random_state(), BarrierKind.ALLOCATE)
        set_random_state(states[self._coord.lead])

    def undo(self) -> None:
        """Gives the model its `forward` back, which has all of its values again."""
        self.calls.close()
        self._allow_copies()
        if self._pipelined is not None:  # which was made last, and gives the `forward` that it has found back
            self._pipelined.close()
        if self._sharded is not None:
            self._sharded.undo()
        self.state.release()

    def say_bye(self, waits: bool) -> None:
        """This worker's script has ended. waits: until that of the replica's first one has, which may still save."""
        network = self._machines.network
        network.bye()
        if waits and self._coord.place:
            network.wait_for_bye(0, self.barrier.members.barrier.timeouts.barrier)

    def leave(self) -> None:
        """Leaves the replica's groups."""
        self._machines.close()
        self.barrier.leave()
