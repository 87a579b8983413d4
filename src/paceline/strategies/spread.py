"""A replica whose workers are on several machines: split inside its layers, or between and inside them.

Every worker has its own parts in memory of its own: its stage's parameters, of sharded ones its shards, with their
gradients, optimizer state and buffers. A step:

1. The workers of a stage, which have consecutive ranks, compute its layers in parts, with collectives in memory inside
   a machine and over the run's connections between machines. Activations and their gradients go from stage to stage
   along a line of workers with the same part.
2. All workers wait at a barrier, each updates its own parts with the script's own optimizer, and all wait at another.

A parameter that several workers of a stage have whole gets the same gradient and the same update on all of them.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import Mesh
from paceline.errors import UsageError
from paceline.pipeline.pipelined_model import PipelinedModel
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.mesh_coord import random_state, set_random_state
from paceline.strategies.pipeline import PipelineTrainer
from paceline.strategies.split_checks import bit_sum, check_split
from paceline.strategies.split_model import pipeline_of, shard_layers
from paceline.strategies.spread_state import ShardedStageState
from paceline.tensor_parallel.comm_functions import ShardGroup
from paceline.transport import BarrierKind


class SpreadTrainer(PipelineTrainer):
    """Trains one worker's part of a model that is sharded over workers on several machines."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        check_split(optimizer, options, str(context.strategy))
        super().__init__(model, optimizer, options, context)
        self._draw_alike()
        self._sums = self._checksums()
        """Of this worker's shards after the last update, by the parameter's index; empty if they may have changed."""
        self._undo.append(model.register_load_state_dict_post_hook(lambda *_: self._sums.clear()).remove)

    def _split(self, options: Options, context: TrainerContext) -> PipelinedModel | None:
        members, strategy, model = context.members, context.strategy, self._model
        coord = self._coord
        members.mirror([*model.parameters(), *model.buffers()])
        machines = self._connect(context)
        self._sharded = sharded = shard_layers(model, options, context, coord, self._calls, machines)
        self._sharded.full_values.clear()
        self._stage: ShardGroup = sharded.group
        state = ShardedStageState(members, model, self._optimizer, coord, sharded)
        state.listen(machines.network)
        self._use(state)
        members.gather(b"", BarrierKind.ALLOCATE)  # from here on all workers answer
        self._say_placement(context)
        self._unlike = len(set(members.gather(_processor(), BarrierKind.ALLOCATE))) > 1
        """True if workers may round differently, so that what they all have must be made equal."""
        if coord.shape.pipeline == 1:
            sharded.before_call = self._same_inputs.check
            return None
        assert isinstance(strategy, Mesh)
        pipeline = self._pipeline_context(
            context,
            pipeline_of(strategy),
            in_step=True,
            counts_samples=coord.part == 0,
        )
        return PipelinedModel(model, pipeline, lambda: None, self._built)

    def _say_placement(self, context: TrainerContext) -> None:
        shape, machines = self._coord.shape, context.members.machines
        inside = all(len({rank // shape.tensor for rank in ranks}) * shape.tensor == len(ranks) for ranks in machines)
        if inside:
            where = f"the {shape.tensor} workers of each stage are on one machine, and stages on several"
        else:
            where = "the workers that share each layer are on several machines: every layer waits for the network"
            if shape.pipeline == 1 and all(len(ranks) > 1 for ranks in machines):
                where += f"; mesh:data=1,pipeline={len(machines)},tensor={len(machines[0])} would send less"
        context.say(f"{where}; a worker has its own parts of the model only, and model.state_dict() gives the whole")

    @contextlib.contextmanager
    def _both_traceable(self) -> Iterator[None]:
        with self._state.traceable(), self._sharded.traceable():
            yield

    def _traceable(self) -> contextlib.AbstractContextManager[None]:
        return self._both_traceable()

    @property
    def _is_split(self) -> bool:
        return True

    @property
    def _own(self) -> list[torch.nn.Parameter]:
        return super()._own if self._pipelined is not None else list(self._model.parameters())

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def _draw_alike(self) -> None:
        """Sets the random state of all workers of a replica to that of its first worker."""
        set_random_state(self._members.gather(random_state(), BarrierKind.ALLOCATE)[self._coord.lead])

    def epoch_drawn(self) -> None:
        super().epoch_drawn()
        self._draw_alike()

    def _leaves_out(self) -> bool:
        self._check_shards()
        if self._unlike:
            self._make_whole_gradients_equal()
        if self._pipelined is not None:
            return False
        refused = self._refuses(False)  # a loss that is not finite is so on all workers
        return self.on_nan == "skip" and any(map(any, self._members.gather(bytes([refused]))))

    def _make_whole_gradients_equal(self) -> None:
        """Gives all workers of a stage its first one's gradients of the parameters that each has whole."""
        whole = [one.grad for one in self._model.parameters() if one.grad is not None and not self._is_sharded(one)]
        for dtype in {gradient.dtype for gradient in whole}:
            gradients = [gradient for gradient in whole if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._stage.member.broadcast(flat, 0)
            for gradient, value in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(value.view(gradient.shape))

    def _is_sharded(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) in self._sharded.placements

    def _counts(self, parameter: torch.nn.Parameter) -> bool:
        return self._is_sharded(parameter) or self._coord.part == 0

    @contextlib.contextmanager
    def _updating(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        with super()._updating() as rates:
            yield rates
        self._sums = self._checksums()

    def _checksums(self) -> dict[int, int]:
        sharded = ((number, one) for number, one in enumerate(self._model.parameters()) if self._is_sharded(one))
        return {number: bit_sum(one) for number, one in sharded}

    def _check_shards(self) -> None:
        """Refuses what a script has done to shards by hand: it sees a part, and cannot know of which whole."""
        for number, (name, parameter) in enumerate(self._model.named_parameters()):
            known = self._sums.get(number)
            if known is not None and parameter.grad is not None and known != bit_sum(parameter):
                raise UsageError(
                    f"the script has changed parameters outside of the optimizer ({name}) that are sharded over "
                    "workers, of which it sees a part; do it before team.setup, or by load_state_dict"
                )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        assert isinstance(self._state, ShardedStageState)
        self._state.take_parts()

    def close(self) -> None:
        super().close()
        self._sharded.restore_forward()  # which the pipeline has found


def _processor() -> bytes:
    """What decides how this process rounds."""
    return f"{torch.backends.cpu.get_cpu_capability()} {platform.machine()} {torch.__version__}".encode()
