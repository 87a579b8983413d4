"""A pipeline: the model is cut between its layers, and microbatches of every batch follow each other through the parts.

The script's own loop drives it. `model(x)` gives a value that is not there yet, `loss.backward()` runs the schedule,
and `optimizer.step()` updates this worker's part. The model is traced and cut when it is first called to be trained:
that is when it is known what it is called with.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from paceline.config import Pipeline, one_of
from paceline.errors import UsageError
from paceline.events import Update
from paceline.parameters.hyperparameters import RateScaling
from paceline.pipeline.pipelined_model import PipelinedModel, PipelineWorkers
from paceline.pipeline.shared_state import SharedState
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.optimizer_patch import OptimizerPatch
from paceline.transport import BarrierKind


class PipelineTrainer(Trainer):
    """One worker's stages of a model."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        assert isinstance(context.strategy, Pipeline)
        self._members, self._rank = context.members, context.members.rank
        self._recorder, self._stopwatch = context.recorder, context.stopwatch
        self._model, self._optimizer = model, optimizer
        _refuse(model, optimizer)
        # Only to refuse what a larger team would: a pipeline is one replica, and scales its rate by 1.
        RateScaling(options.scale_lr, 1, options.warmup)
        self.version = 0
        self.paces = [(0.0, 0)]
        self.replica = (0, 1)
        self._steps = 0
        self._accumulating = False
        slow = context.launch.slow
        self._pipelined = PipelinedModel(
            model,
            context.strategy,
            PipelineWorkers(
                members=self._members,
                rank=self._rank,
                ranks=range(context.members.size),
                speeds=[1.0 / slow[rank].factor if rank in slow else 1.0 for rank in range(context.members.size)],
                recorder=context.recorder,
                slow_pass=context.stopwatch.slow_pass,
                say=context.say,
                version=lambda: self.version,
                shared_state=lambda: SharedState(self._members, model, optimizer),
            ),
        )
        self._patch = OptimizerPatch(optimizer)
        self._patch.replace("step", self.step)
        self._patch.replace("zero_grad", self._zero_grad)
        self._patch.replace("state_dict", self._state_dict)
        self._patch.replace("load_state_dict", self._load_state_dict)
        # So that a GradScaler leaves it to `step` to say that it cannot be used.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._hook = model.register_state_dict_pre_hook(lambda *_: self._settle())

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def take_batch(self, samples: int, weight: float) -> None:
        self._stopwatch.start(samples)
        self._stopwatch.drop()  # what a stage computes is told by its passes
        self._pipelined.samples = samples

    def finish_epoch(self) -> None:
        pass

    def accumulate(self, on: bool) -> None:
        self._accumulating = on

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._accumulating:
            return None
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "a GradScaler has one scale per worker, and the stages of a pipeline would not agree on it; use "
                "autocast with bfloat16, which needs no scaling"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        with self._patch.values(_in_one_pass(self._optimizer)):
            self._patch.plain_step()
        if self._pipelined.runtime is not None:
            self._pipelined.runtime.home.settle()
            self._pipelined.runtime.updated()
        self._steps += 1
        self.version += 1
        if self._pipelined.runtime is not None:
            self._pipelined.runtime.home.done(self._steps)
        end = time.perf_counter()
        self._recorder.add(Update(self._rank, start, end - start, self.version))
        self.updated()
        return loss

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        own = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm)  # type: ignore[misc]
        # JSON has no word for what is infinite or not a number.
        told = self._members.gather(msgspec.msgpack.encode(float(own)), BarrierKind.CLIP)
        parts = [msgspec.msgpack.decode(part, type=float) for part in told]
        total: torch.Tensor = torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), norm).to(own.dtype)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        return total

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Until every part of the model is at this worker's version."""
        if self._pipelined.runtime is not None:
            self._pipelined.runtime.home.wait(self._steps)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        self._settle()
        yield

    def _state_dict(self) -> dict[str, Any]:
        plain = type(self._optimizer).state_dict
        if self._pipelined.runtime is None:
            return plain(self._optimizer)
        self._settle()
        own = self._optimizer.state
        self._optimizer.state = _like(own, self._pipelined.runtime.home.all_state())
        try:
            return plain(self._optimizer)
        finally:
            self._optimizer.state = own

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        type(self._optimizer).load_state_dict(self._optimizer, state)
        if self._pipelined.runtime is not None:
            self._pipelined.runtime.home.keep(self._pipelined.runtime.own)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        if self._pipelined.runtime is not None:
            self._members.barrier.wait(BarrierKind.BARRIER)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        if self._pipelined.runtime is not None:
            self._members.barrier.wait(BarrierKind.BARRIER)

    def close(self) -> None:
        if self._pipelined.runtime is not None:
            self._settle()
            state = self._pipelined.runtime.home.all_state()
            self._pipelined.runtime.home.release()
            copies = {
                parameter: {
                    name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in own.items()
                }
                for parameter, own in state.items()
            }
            self._optimizer.state = _like(self._optimizer.state, copies)
        self._patch.undo()
        self._hook.remove()
        self._pipelined.close()


def _in_one_pass(optimizer: Optimizer) -> list[dict[str, Any]]:
    """For each group, what lets torch do all of Adam in one pass over memory, if the script has not chosen a way."""
    return [{"fused": True} if _fusable(optimizer, group) else {} for group in optimizer.param_groups]


def _fusable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group["differentiable"] or group["capturable"]:
        return False
    return group["fused"] is None and group["foreach"] is None and all(map(_is_flat, group["params"]))


def _is_flat(parameter: torch.nn.Parameter) -> bool:
    """Whether its elements and its gradient's lie in memory in the same order: one pass looks at nothing else."""
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
            f"the model is on '{elsewhere.pop()}'; the parts of a pipeline share the host's memory, so it must be on "
            "'cpu'"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS looks at all parameters at once, which no stage of a pipeline has; use Adam or SGD")
