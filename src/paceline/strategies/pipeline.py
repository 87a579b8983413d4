"""A pipeline: the model is cut between its layers into stages, through which the microbatches of each batch pass.

The script's own loop drives it: `model(x)` returns deferred values, `loss.backward()` runs the schedule, and
`optimizer.step()` updates the parameters of this worker's stages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.optim import Optimizer

from paceline.config import Pipeline, one_of
from paceline.errors import UsageError
from paceline.events import Update
from paceline.parameters.hyperparameters import RateScaling
from paceline.pipeline.context import PipelineContext
from paceline.pipeline.exposed_gradients import ExposedGradients
from paceline.pipeline.pipelined_model import PipelinedModel
from paceline.pipeline.shared_state import SharedState
from paceline.strategies.base import Options, Trainer, TrainerContext, run_closure
from paceline.strategies.model_copies import copy_after
from paceline.transport import BarrierKind


class PipelineTrainer(Trainer):
    """Trains one worker's stages of a model."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        assert isinstance(context.strategy, Pipeline)
        _refuse(model, optimizer)
        self._rate = RateScaling(options.scale_lr, 1, options.warmup, options.batch)
        super().__init__(model, optimizer, context, replicas=1)
        self.replica = (0, 1)
        self._steps = 0
        """Updates since setup; `version` may begin at a checkpoint's."""
        ranks, slow = range(context.members.size), context.launch.slow
        pipeline = PipelineContext(
            spec=context.strategy,
            members=context.members,
            ranks=ranks,
            team_ranks=ranks,
            recorder=context.recorder,
            say=context.say,
            slow_pass=context.stopwatch.slow_pass,
            speeds=[1.0 / slow[rank].factor if rank in slow else 1.0 for rank in ranks],
            version=lambda: self.version,
            before_call=self._share_changes,
            enter_backward=self.enter_backward,
            leave_backward=self.leave_backward,
        )
        self._pipelined = PipelinedModel(model, pipeline, self._share, lambda built: self._shared_state.keep(built.own))
        self._exposed: ExposedGradients | None = None
        self._patch_optimizer()
        self._watch_gradients()
        # Also of a part of the model alone.
        hooks = [one.register_state_dict_pre_hook(lambda *_: self._wait_for_stages()) for one in model.modules()]
        self._undo = [copy_after(model.modules(), self._wait_for_stages), *(hook.remove for hook in hooks)]

    def _share(self) -> None:
        self._shared_state = SharedState(self._members, self._model, self._optimizer)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def take_batch(self, samples: int, weight: float) -> None:
        super().take_batch(samples, weight)
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
        start = time.perf_counter()
        rates = self._patch.scaled_rates(self._rate.factor(self.version))
        self._share_changes()
        updating = contextlib.nullcontext() if self._pipelined.runtime is None else self._shared_state.updating()
        with rates, updating, self._patch.values(_in_one_pass(self._optimizer)):
            self._patch.plain_step()
        self._steps += 1
        self.version += 1
        if self._pipelined.runtime is not None:
            self._shared_state.share_new_state()
            self._pipelined.runtime.ownership.announce_update()
            self._shared_state.publish(self._steps)
        end = time.perf_counter()
        self._recorder.add(Update(self._rank, start, end - start, self.version))
        self.on_update()
        return loss

    def enter_backward(self, loss: Any) -> bool:
        super().enter_backward(loss)
        self._hide_gradients()
        return True

    def _hide_gradients(self) -> None:
        if self._exposed is not None:
            self._exposed.hide(self._own)

    @property
    def _own(self) -> list[torch.nn.Parameter]:
        """The parameters that this worker updates."""
        return [] if self._pipelined.runtime is None else list(self._pipelined.runtime.own)

    def _expose_gradients(self) -> None:
        """Gives every worker the gradients of all stages."""
        if self._exposed is None:
            self._exposed = ExposedGradients(self._members, list(self._model.parameters()))
        self._exposed.show(self._own)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        self._look_away()
        if self._exposed is not None and self._exposed.shown:
            return clip_grad_norm_(self._model.parameters(), limit, norm_type=norm)
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        own = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm)  # type: ignore[misc]
        payloads = self._members.gather(msgspec.msgpack.encode(float(own)), BarrierKind.CLIP)
        parts = [msgspec.msgpack.decode(part, type=float) for part in payloads]
        total: torch.Tensor = torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), norm).to(own.dtype)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        super().leave_backward()  # the script may look at them still
        return total

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _wait_for_stages(self) -> None:
        """Waits until all stages have had as many updates as this worker's."""
        if self._pipelined.runtime is not None:
            self._shared_state.wait(self._steps)
        self._share_changes()

    def _share_changes(self) -> None:
        """Let all stages see what the workers' scripts have changed themselves, all alike."""
        if self._pipelined.runtime is not None and self._shared_state.changed():
            self._shared_state.wait(self._steps)
            self._shared_state.share_changes()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self._wait_for_stages()
        yield

    def _state_dict(self) -> dict[str, Any]:
        if self._pipelined.runtime is None:
            return super()._state_dict()
        self._wait_for_stages()
        own = self._optimizer.state
        self._optimizer.state = _like(own, self._shared_state.all_state())
        try:
            return super()._state_dict()
        finally:
            self._optimizer.state = own

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        if self._pipelined.runtime is not None:
            self._shared_state.keep(self._pipelined.runtime.own)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        if self._pipelined.runtime is not None:
            self._barrier.wait(BarrierKind.BARRIER)
        super().load(model, optimizer)
        self._share_changes()
        if self._pipelined.runtime is not None:
            self._barrier.wait(BarrierKind.BARRIER)

    def close(self) -> None:
        if self._pipelined.runtime is not None:
            self._wait_for_stages()
            state = self._shared_state.all_state()
            self._shared_state.release()
            copies = {
                parameter: {
                    name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in own.items()
                }
                for parameter, own in state.items()
            }
            self._optimizer.state = _like(self._optimizer.state, copies)
        super().close()
        for undo in self._undo:
            undo()
        self._pipelined.close()


def _in_one_pass(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Per group, the options that let torch run Adam in one pass over memory, unless the script has chosen others."""
    return [{"fused": True} if _fusable(optimizer, group) else {} for group in optimizer.param_groups]


def _fusable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group["differentiable"] or group["capturable"]:
        return False
    return group["fused"] is None and group["foreach"] is None and all(map(_is_flat, group["params"]))


def _is_flat(parameter: torch.nn.Parameter) -> bool:
    """True if its elements and its gradient's have the same order in memory, as one pass needs."""
    plain = parameter.is_floating_point() and parameter.is_contiguous()
    return plain and (parameter.grad is None or parameter.grad.is_contiguous())


def _like(old: Any, values: dict[Any, Any]) -> Any:
    new = type(old)(old.default_factory)
    new.update(values)
    return new


def _refuse(model: torch.nn.Module, optimizer: Optimizer) -> None:
    elsewhere = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        raise UsageError(
            f"the model is on '{elsewhere.pop()}'; the stages of a pipeline share the host's memory, so it must be on "
            "'cpu'"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS looks at all parameters at once, which no stage of a pipeline has; use Adam or SGD")
