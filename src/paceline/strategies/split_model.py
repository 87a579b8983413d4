"""The model of one replica of a mesh: sharded inside its layers, cut into stages, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.compiler import IgnoredCompiler
from paceline.cluster.membership import Members
from paceline.collectives.links import LinkMatrix
from paceline.collectives.machines_group import MachinesGroup
from paceline.config import Mesh, Pipeline, Tensor
from paceline.errors import UsageError
from paceline.events.stopwatch import Stopwatch
from paceline.pipeline.context import PipelineContext
from paceline.pipeline.pipelined_model import PipelinedModel
from paceline.pipeline.shared_state import share_buffers
from paceline.strategies.base import Trainer
from paceline.strategies.batch_norm import TeamBatchNorm
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.explained_errors import explain_errors
from paceline.strategies.mesh_coord import MeshCoord, join_replica, random_state, set_random_state
from paceline.strategies.model_copies import copy_after, refuse_copies
from paceline.strategies.partitioned_parameters import PartitionedParameters
from paceline.strategies.replica_client import ReplicaBarrier
from paceline.strategies.same_inputs import SameInputs
from paceline.strategies.split_checks import log_calls
from paceline.strategies.stage_order import stage_order
from paceline.tensor_parallel.comm_functions import ShardGroup
from paceline.tensor_parallel.plans import agree_on_plan
from paceline.tensor_parallel.sharded_model import ShardedModel
from paceline.transport import BarrierKind
from paceline.transport.call_log import CallLog


class SplitModel:
    """Splits a model over the workers of its replica, and undoes that."""

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
        self._members, self._coord, self._model = context.members, coord, model
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise UsageError(f"'{context.strategy}' needs a model on the CPU: its parts lie in the machine's memory")
        # Of trained parameters the first worker of each machine writes its own values to the machine's memory.
        rest = [one for one in model.parameters() if id(one) not in trained or len(self._members.machines) > 1]
        self._members.mirror([*rest, *model.buffers()])
        self.calls = log_calls(self._members, coord.replica_ranks())
        self._sharded = shard_layers(model, options, context, coord, self.calls) if coord.shape.tensor > 1 else None
        self.parts = PartitionedParameters(model, optimizer, coord, self._sharded)
        self.barrier = ReplicaBarrier(self._members, coord, context.say) if coord.shape.replica > 1 else None
        if self.barrier is not None:
            self.calls.watch(self.barrier.steps)
        self._allow_copies: Callable[[], None] = lambda: None
        same_inputs = SameInputs(model, self._members, coord.shape.replica, options)
        self._pipelined = None
        if coord.shape.pipeline > 1 and self.barrier is not None:
            self._pipelined = self._pipeline(context, self.barrier, trainer, same_inputs)
        watch: Any = StageWatch(context.stopwatch) if self._pipelined is not None else context.stopwatch
        self.stopwatch: Stopwatch = watch
        if self._sharded is not None:
            sharded, parts = self._sharded, self.parts
            if self._pipelined is None:
                sharded.before_call = same_inputs.check
            untrained = sharded.share_untrained(self._members, trained, coord.local_replica, len(coord.here))
            numbers = {sharded.names[key]: of for key, of in parts.of.items() if key in sharded.names}
            sharded.shards = lambda name: (
                [parts.named[number][1].data for number in numbers[name]] if name in numbers else untrained[name]
            )
            self._allow_copies = refuse_copies([model, *sharded.modules()])
            explain_errors(
                lambda error: isinstance(error, RuntimeError) and "must match the size of tensor" in str(error),
                f"under '{context.strategy}' a parameter of the model is this worker's shard of it; for an average of "
                "parameters, or anything else that needs them whole, read model.state_dict()",
            )
        elif self._pipelined is not None:
            self._allow_copies = copy_after(model.modules(), lambda: None)

    def _pipeline(
        self, context: TrainerContext, barrier: ReplicaBarrier, trainer: Trainer, same_inputs: SameInputs
    ) -> PipelinedModel:
        mesh, coord, sharded = context.strategy, self._coord, self._sharded
        assert isinstance(mesh, Mesh)
        each = coord.shape.tensor
        ranks = range(coord.part, coord.shape.replica, each)

        def share() -> None:
            # Parameters are in the mesh's memory. The workers of a stage each update equal buffers of their own.
            known = () if sharded is None else sharded.placements
            buffers = [buffer for buffer in self._model.buffers() if id(buffer) not in known]
            share_buffers(barrier.members, buffers, coord.part, each, write=coord.stage == 0)

        pipeline = PipelineContext(
            spec=pipeline_of(mesh),
            members=barrier.members,
            ranks=ranks,
            team_ranks=[coord.lead + rank for rank in ranks],
            recorder=context.recorder,
            say=context.say,
            slow_pass=context.stopwatch.slow_pass,
            speeds=stage_speeds(context, coord, ranks),
            version=lambda: trainer.version,
            calls=self.calls,
            before_call=same_inputs.check,
            enter_backward=lambda loss: trainer.enter_backward(tried(loss)),
            leave_backward=trainer.leave_backward,
            traceable=contextlib.nullcontext if sharded is None else sharded.traceable,
            in_step=sharded is not None,
            counts_samples=coord.part == 0,
        )
        return PipelinedModel(self._model, pipeline, share)

    def ready(self) -> None:
        """Drops the tensors' former values, once all workers have theirs in shared memory."""
        if self._sharded is not None:
            self._sharded.full_values.clear()
        self.draw_alike()

    def draw_alike(self) -> None:
        """Sets the random state of all workers of a replica to that of its first worker."""
        states = self._members.gather(random_state(), BarrierKind.ALLOCATE)
        set_random_state(states[self._coord.lead])

    def undo(self) -> None:
        """Makes the model whole again, in memory of its own."""
        self.calls.close()
        self._allow_copies()
        if self._pipelined is not None:  # which was made last, and gives the `forward` that it has found back
            self._pipelined.close()
            for buffer in self._model.buffers():
                buffer.data = buffer.data.clone()
        if self._sharded is not None:
            self._sharded.undo()
        if self.barrier is not None:
            self.barrier.leave()


def pipeline_of(mesh: Mesh) -> Pipeline:
    """The pipeline of one line of a replica's workers."""
    return Pipeline(
        stages=mesh.pipeline,
        microbatches=mesh.microbatches,
        schedule=mesh.schedule,
        chunks=mesh.chunks,
        norm=mesh.norm,
        recompute=mesh.recompute,
        offload=mesh.offload,
        order=mesh.order,
    )


def ordered_places(
    spec: Pipeline, coord: MeshCoord, members: Members, machines: MachinesGroup, say: Callable[[str], None]
) -> tuple[list[int], LinkMatrix]:
    """The places in a replica of the workers of this worker's line, by stage; and the links between the machines.

    members: of one replica or of several, all of which call it.
    """
    each, stages = coord.shape.tensor, coord.shape.pipeline
    machine_of = {rank: number for number, ranks in enumerate(members.machines) for rank in ranks}
    found = [
        [machine_of[first + each * stage] for stage in range(stages)]
        for first in range(0, members.size, coord.shape.replica)
    ]
    links = machines.measure_links()
    order = list(map(int, spec.order.split("+"))) if spec.order else list(range(stages))
    if not (spec.order or spec.shared):
        order = stage_order(found, links, say)
    return [each * stage + coord.part for stage in order], links


def stage_speeds(context: TrainerContext, coord: MeshCoord, places: Sequence[int]) -> list[float]:
    """The relative speed of each stage of a replica, the workers of whose lines have these places: its slowest's."""
    each, slow = coord.shape.tensor, context.launch.slow
    firsts = [coord.lead + place // each * each for place in places]
    return [
        min(1.0 / slow[rank].factor if rank in slow else 1.0 for rank in range(first, first + each)) for first in firsts
    ]


def shard_layers(
    model: torch.nn.Module,
    options: Options,
    context: TrainerContext,
    coord: MeshCoord,
    calls: CallLog,
    machines: MachinesGroup | None = None,
    replica: Members | None = None,
) -> ShardedModel:
    """Shards a model's layers over the workers of a stage, by the lead's plan.

    machines: the whole team, if the workers of a stage may be on several machines; or the replica, if that is given.
    """
    members, strategy = context.members, context.strategy
    assert isinstance(strategy, Tensor | Mesh)
    compiler = IgnoredCompiler(model, context.say)
    with _local_batch_norm(model):
        roles = agree_on_plan(
            model,
            members,
            options.loaders,
            options.example_inputs,
            coord.shape.tensor,
            strategy.roles,
            strategy.sequence_parallel,
            context.say,
        )
    if replica is None:
        member = join_replica(members, coord.stage_ranks(), context.say, calls, machines)
    else:
        places = [rank - coord.lead for rank in coord.stage_ranks()]
        member = join_replica(replica, places, context.say, calls, machines)
    seeds = members.gather(str(torch.initial_seed()).encode(), BarrierKind.ALLOCATE)
    group = ShardGroup(member, int(seeds[coord.lead]) % (1 << 31) + coord.stage * 1000, calls, coord.stage_ranks())
    return ShardedModel(model, roles, group, compiler)


def tried(loss: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """A loss of random outputs; None if it cannot be computed on them."""
    try:
        return loss()
    except (RuntimeError, IndexError, ValueError):
        return None


@contextlib.contextmanager
def _local_batch_norm(model: torch.nn.Module) -> Iterator[None]:
    """Keeps batch norm layers from exchanging statistics: only the lead runs the model."""
    exchanges = {module: module.exchange for module in model.modules() if isinstance(module, TeamBatchNorm)}
    for module in exchanges:
        module.exchange = None
    try:
        yield
    finally:
        for module, exchange in exchanges.items():
            module.exchange = exchange


class StageWatch:
    """A stopwatch for workers whose computing time is recorded by the passes of a pipeline."""

    turned = True
    """A gradient in `.grad` belongs to the minibatch at hand."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._samples = 0
        for name in ("ask", "away", "restart", "free", "slow_link", "slow_pass", "turn", "turn_back"):
            setattr(self, name, getattr(stopwatch, name))

    def start(self, samples: int) -> None:
        self._stopwatch.start(samples)
        self._stopwatch.drop()
        self._samples += samples

    def pass_over(self, samples: int, _minibatches: int) -> None:
        self._samples -= samples

    def stop(self, version: int, *, again: bool = False) -> tuple[float, int]:
        samples, self._samples = self._samples, 0
        return 0.0, samples
