"""A pipeline: the model is cut between its layers into stages, through which the microbatches of each batch pass.

The script's own loop drives it: `model(x)` returns deferred values, `loss.backward()` runs the schedule, and
`optimizer.step()` updates the parameters of this worker's stages.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.optim import Optimizer

from paceline.collectives.machines_group import MachinesGroup
from paceline.config import Mesh, Pipeline, one_of
from paceline.errors import UsageError
from paceline.events import Update
from paceline.parameters.disk_state import DiskState
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.joint import compact
from paceline.pipeline.context import PipelineContext
from paceline.pipeline.exposed_gradients import ExposedGradients
from paceline.pipeline.pipelined_model import NO_VALUES, PipelinedModel
from paceline.pipeline.runtime import PipelineRuntime
from paceline.pipeline.shared_state import SharedState
from paceline.pipeline.stage_state import StageState
from paceline.strategies.base import Trainer
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.gradient_access import hook_sees
from paceline.strategies.mesh_coord import MeshCoord
from paceline.strategies.model_copies import copy_after, refuse_copies
from paceline.strategies.one_pass import in_one_pass
from paceline.strategies.optimizer_patch import run_closure
from paceline.strategies.replica_exchange import ReplicaExchange, ReplicaMembers
from paceline.strategies.same_inputs import SameInputs
from paceline.strategies.split_checks import log_calls, refuse_parts, refuse_pipeline
from paceline.strategies.split_model import ordered_places, pipeline_of, stage_speeds, tried
from paceline.strategies.step_table import StepAgreement
from paceline.transport import BarrierKind
from paceline.transport.call_log import UPDATES
from paceline.transport.network_mailbox import NetworkMailbox


class PipelineTrainer(Trainer):
    """Trains one worker's stages of a model."""

    _microbatches = 1
    spans = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        refuse_pipeline(model, optimizer)
        members = context.members
        self._coord = coord = MeshCoord.of(context.strategy, members)
        self._rate = RateScaling(options.scale_lr, coord.shape.data, options.warmup, options.batch)
        super().__init__(model, optimizer, context, replicas=coord.shape.data)
        self.replica = (coord.replica, coord.shape.data)
        self.in_every_round = coord.shape.data > 1
        self._spread = len(members.machines) > 1
        """True if the workers are on several machines, and share no memory."""
        self.maps, self._meta = self._spread, options.meta
        here = [rank for rank in members.machines[members.machine] if rank in coord.replica_ranks()]
        self._calls = log_calls(members, here)
        self._same_inputs = SameInputs(model, members, coord.shape.replica, options)
        self._undo: list[Callable[[], None]] = []
        self._machines: MachinesGroup | None = None
        """All workers of the team, if the trainer has connected them."""
        self._pipelined = self._split(options, context)
        self._between = self._exchange_of(context) if coord.shape.data > 1 else None
        """The exchange with other replicas."""
        self._states = () if self._between is None else (self._between.state,)
        if self._pipelined is not None:
            self._pipelined.without_values = self._meta is not None
        self._exposed: ExposedGradients | None = None
        self._patch_optimizer()
        self._watch_gradients()
        # Also of a part of the model alone.
        hooks = [one.register_state_dict_pre_hook(lambda *_: self._share_changes()) for one in model.modules()]
        copies = refuse_copies(model.modules()) if self._spread else copy_after(model.modules(), self._share_changes)
        self._undo += [copies, *(hook.remove for hook in hooks)]
        self._abandoned = False
        """True if the script has ended with an error."""
        self._disk: DiskState | None = None
        """Where the optimizer's state is, if not in memory."""
        if getattr(context.strategy, "offload", "none") == "disk":
            folder = context.folder if context.folder is not None and context.folder.is_dir() else None
            self._disk = DiskState(optimizer, folder)

    def _split(self, options: Options, context: TrainerContext) -> PipelinedModel | None:
        """Splits the model; returns it if it is cut into stages."""
        spec = context.strategy
        assert isinstance(spec, Pipeline | Mesh)
        if self._spread:
            self._connect(context)
        spec = spec if isinstance(spec, Pipeline) else pipeline_of(spec)
        pipeline = self._pipeline_context(context, spec)
        return PipelinedModel(self._model, pipeline, self._share, self._built)

    def _connect(self, context: TrainerContext) -> MachinesGroup:
        """Connects all workers of the team."""
        self._machines = machines = MachinesGroup(context.members, context.say)
        self._calls.watch(machines.control)
        machines.watch_all()
        return machines

    def _pipeline_context(self, context: TrainerContext, spec: Pipeline, **more: Any) -> PipelineContext:
        self._microbatches = spec.microbatches
        coord, machines, members = self._coord, self._machines, context.members
        places, each = list(range(coord.part, coord.shape.replica, coord.shape.tensor)), coord.shape.replica
        if machines is not None:
            places, more["links"] = ordered_places(spec, coord, members, machines, context.say)
        if coord.shape.data > 1:
            members = ReplicaMembers(members, coord)
            more["firsts"] = lambda payload: context.members.gather(payload)[::each]
        return PipelineContext(
            spec=spec,
            members=members,
            ranks=places,
            team_ranks=[coord.lead + place for place in places],
            machines=None if machines is None else machines.part(coord.replica_ranks()),
            speeds=stage_speeds(context, coord, places),
            recorder=context.recorder,
            say=context.say,
            slow_pass=context.stopwatch.slow_pass,
            version=lambda: self.version,
            calls=self._calls,
            before_call=self._before_call,
            enter_backward=self.enter_backward,
            leave_backward=self.leave_backward,
            traceable=self._traceable,
            measurable=self._measurable,
            **more,
        )

    def _exchange_of(self, context: TrainerContext) -> ReplicaExchange:
        assert self._machines is not None
        facts = (self._coord, self._machines, self._calls, lambda: self._own, self._not_finite, self._wait)
        return ReplicaExchange(self._model, self._optimizer, context, *facts)

    def _share(self) -> None:
        if self._spread:
            self._use(StageState(self._members, self._model, self._optimizer, self._meta))
        else:
            self._use(SharedState(self._members, self._model, self._optimizer))

    def _use(self, state: StageState | SharedState) -> None:
        self._state: StageState | SharedState = state

    def _traceable(self) -> contextlib.AbstractContextManager[None]:
        return self._state.traceable()

    def _measurable(self, trace: Any) -> contextlib.AbstractContextManager[None]:
        return self._state.measurable(trace) if isinstance(self._state, StageState) else contextlib.nullcontext()

    def _built(self, runtime: PipelineRuntime) -> None:
        if isinstance(self._state, StageState):
            self._state.attach(runtime)
            self._say(
                "the stages of this pipeline are on several machines: a worker has the parameters of its own stages, "
                "and others read as NaN; model.state_dict() and team.save() give the whole model"
            )
        self._state.keep(runtime.own)

    @property
    def _runtime(self) -> PipelineRuntime | None:
        """The pipeline, once the model is cut."""
        return None if self._pipelined is None else self._pipelined.runtime

    @property
    def _is_split(self) -> bool:
        """True if this worker has a part of the model's state only."""
        return self._runtime is not None

    @property
    def _network(self) -> NetworkMailbox | None:
        """The connections to workers that may ask this one for its part of the state."""
        return None if self._machines is None else self._machines.network

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._same_inputs.check(args, kwargs)
        if self._is_split:
            self._share_changes()

    @property
    def weightless(self) -> bool:
        return self._between is not None and self._between.reader.copied

    def take_batch(self, samples: int, weight: float) -> None:
        super().take_batch(samples, weight)
        if self._between is not None:
            self._between.take_batch(samples, weight)
        if self._pipelined is not None:
            self._stopwatch.drop()  # the passes of the stages are measured instead
            self._pipelined.samples = samples

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise UsageError(
                "a GradScaler has one scale per worker, and the stages of a pipeline would disagree on it; use "
                "autocast with bfloat16, which needs no scaling"
            )
        loss = run_closure(closure)
        self._look_away()
        self._hide_gradients()
        if self._leaves_out():
            return loss
        self._share_changes()
        with self._updating() as rates, rates, self._patch.values(in_one_pass(self._optimizer)):
            if self._disk is None:
                self._patch.plain_step()
            else:
                self._disk.step(self._patch.plain_step, self._own)
        self.on_update()
        return loss

    def _leaves_out(self) -> bool:
        """True if no update shall be made of the current gradient."""
        return False

    @contextlib.contextmanager
    def _updating(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        """While entered, all workers update their stages: a script sees all of them before, or all after.

        Yields a context in which the optimizer has the learning rates of the update.
        """
        split, between = self._is_split, self._between
        rates = self._patch.scaled_rates(self._rate.factor(self.version))
        if split:
            self._calls.begin_turn(UPDATES)
        if between is not None:
            agreed = self._agree(between)
            rates = self._patch.values(self._rate.scaled(agreed.groups, self.version))
        elif split:
            self._meet()
        if split:
            self._calls.check_turn(UPDATES)
        start = time.perf_counter()
        if between is not None:
            between.reduce()
        with self._state.updating() if split else contextlib.nullcontext():
            yield rates
        if between is not None:
            between.updated()
        if split:
            self._state.share_new_state()
        self.version += 1
        self._recorder.add(Update(self._rank, start, time.perf_counter() - start, self.version))
        if split:
            self._wait(BarrierKind.PUBLISH)

    def _agree(self, between: ReplicaExchange) -> StepAgreement:
        """Agrees with all replicas on an update, and exchanges between machines what belongs to a snapshot."""
        agreed = between.agree(BarrierKind.UPDATE, self.round, self.round_share, self._loss_value, self._news())
        self._hear(agreed.tails)
        return agreed

    def _meet(self) -> None:
        """Waits until all workers have their gradients, and exchanges between machines what belongs to a snapshot."""
        barrier, news = self._barrier, self._news()
        barrier.note[: len(news)] = news
        self._wait(BarrierKind.UPDATE, len(news))
        self._hear({rank: bytes(note[: barrier.length(rank)]) for rank, note in enumerate(barrier.notes)})

    def _news(self) -> bytes:
        return b"" if self.board is None else self.board.news(self._rank, self.version)

    def _hear(self, notes: Mapping[int, bytes]) -> None:
        if self.board is None or not self._spread:
            return
        for rank, note in notes.items():
            if note and rank not in self._members.machines[self._members.machine]:
                self.board.hear(rank, note, keeps=self._rank == self.lead)

    def enter_backward(self, loss: Any) -> bool:
        if self._between is None:
            super().enter_backward(loss)
            self._hide_gradients()
            return True
        loss = loss if isinstance(loss, torch.Tensor | Sequence) else tried(loss)
        super().enter_backward(loss)
        return self._runs(self._between.enter_backward(loss, self.weight))

    def _clear_gradients(self, set_to_none: bool) -> None:
        super()._clear_gradients(set_to_none)
        if self._between is not None:
            self._between.clear()

    def _hide_gradients(self) -> None:
        if self._exposed is not None:
            self._exposed.hide(self._own)

    @property
    def _own(self) -> list[torch.nn.Parameter]:
        """The parameters that this worker updates."""
        return [] if self._runtime is None else list(self._runtime.own)

    def _expose_to_hook(self) -> None:
        if self._microbatches > 1:
            self._say(hook_sees("that of each microbatch, not the batch's"))

    def _expose_gradients(self) -> None:
        """Gives every worker the gradients of all stages, if they share memory."""
        if self._spread:
            super()._expose_gradients()
            return
        if self._exposed is None:
            self._exposed = ExposedGradients(self._members, list(self._model.parameters()))
        self._exposed.show(self._own)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        self._look_away()
        if self._between is not None:
            self._between.agree(BarrierKind.CLIP, self.round, self.round_share, self._loss_value)
            self._between.reduce()
        if self._exposed is not None and self._exposed.shown:
            return clip_grad_norm_(self._model.parameters(), limit, norm_type=norm)
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        counted = [parameter.grad for parameter in parameters if self._counts(parameter)]
        own = torch.nn.utils.get_total_norm(counted, norm)  # type: ignore[arg-type]
        payloads = self._members.gather(msgspec.msgpack.encode(float(own)), BarrierKind.CLIP)
        parts = [msgspec.msgpack.decode(part, type=float) for part in payloads[: self._coord.shape.replica]]
        total: torch.Tensor = torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), norm).to(own.dtype)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        super().leave_backward()  # the script may look at them still
        return total

    def _counts(self, _parameter: torch.nn.Parameter) -> bool:
        """True if this worker's gradient of a parameter counts in the norm of the whole."""
        return True

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _share_changes(self) -> None:
        """Let all stages see what the workers' scripts have changed themselves, all alike."""
        if self._meta is not None and self._runtime is None:
            raise UsageError(NO_VALUES)
        if self._is_split and self._state.changed():
            self._state.share_changes()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self._share_changes()
        yield

    def _state_dict(self) -> dict[str, Any]:
        if not self._is_split:
            return super()._state_dict()
        self._share_changes()
        return self._exported(self._state.all_state())

    def _exported(self, state: dict[Any, Any]) -> dict[str, Any]:
        """The optimizer's state dict with the state of all parameters."""
        own = self._optimizer.state
        self._optimizer.state = _like(own, state)
        try:
            return super()._state_dict()
        finally:
            self._optimizer.state = own

    def streamed_state(self) -> dict[str, Any] | None:
        if not self._is_split or not isinstance(self._state, StageState):
            return None
        optimizer = self._exported(self._state.streamed_optimizer())
        return {"model": self._state.streamed_model(), "optimizer": optimizer}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        if self._runtime is not None:
            self._state.keep(self._runtime.own)
        if self.maps:  # what is kept must not depend on the file
            self._optimizer.state = _like(self._optimizer.state, compact(dict(self._optimizer.state)))
        if self._disk is not None:
            self._disk.place(self._own)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self._share_changes()
        if self._is_split:
            self._barrier.wait(BarrierKind.BARRIER)
        super().load(model, optimizer)
        self._share_changes()
        if self._is_split:
            self._barrier.wait(BarrierKind.BARRIER)

    def leave(self) -> None:
        network = self._network
        if network is None or self._abandoned:
            return
        network.bye()
        if self._rank and self._is_split and getattr(sys, "last_value", None) is None:
            network.wait_for_bye(0, self._barrier.timeouts.barrier)  # the lead may still save the model

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        if self._is_split and self._meta is not None and not self._abandoned:
            self._barrier.wait(BarrierKind.BARRIER)  # until then others may ask
        elif self._is_split and not (self._spread and self._abandoned):
            self._share_changes()
            state = self._state.all_state()
            self._state.release()
            if not self._spread:  # else it is in no memory that others have
                state = {
                    parameter: {
                        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in own.items()
                    }
                    for parameter, own in state.items()
                }
            self._optimizer.state = _like(self._optimizer.state, state)
        super().close()
        self._calls.close()
        for undo in self._undo:
            undo()
        if self._pipelined is not None:
            self._pipelined.close()
        if self._between is not None:
            self._between.close()
        if self._machines is not None:
            self._machines.close()
        if self._meta is not None:
            self._model.forward = refuse_parts


def _like(old: Any, values: dict[Any, Any]) -> Any:
    new = type(old)(old.default_factory)
    new.update(values)
    return new
