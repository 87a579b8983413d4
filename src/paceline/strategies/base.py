"""The base of all trainers: the team's interface to a strategy, and all that strategies share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.config import Launch, Strategy
from paceline.errors import FORK, TeamError, UsageError
from paceline.events import Wait
from paceline.events.recorder import Recorder
from paceline.events.stopwatch import Stopwatch
from paceline.parameters.gradients import GRAD
from paceline.strategies.gradient_access import GradientAccess
from paceline.strategies.optimizer_patch import OptimizerPatch
from paceline.transport import BarrierKind, MachinesBarrier

_NOTABLE = 5e-6
"""Seconds of waiting that are worth an event."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of `team.setup`."""

    gradients: str = "local"
    """The content of `.grad` after the backward pass: "local", this worker's gradient; "visible", the team's mean."""
    scale_lr: str | None = None
    warmup: int = 0
    """In updates."""
    batch: float | None = None
    """Samples of the global batch, relative to the loader's own; None without a loader that has a batch size."""
    loss: Callable[..., Any] | None = None
    """The script's loss function."""
    loaders: Sequence[DataLoader[Any]] = ()
    """The loaders that the model is trained with, before they are shared out."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerContext:
    """The run that a trainer belongs to."""

    members: Members
    strategy: Strategy
    launch: Launch
    folder: Path | None
    """The run's folder."""
    recorder: Recorder
    stopwatch: Stopwatch
    device: torch.device
    say: Callable[[str], None]
    """Prints a line, on the lead only."""


class Trainer(ABC):
    """One model and its optimizer, trained by the team under one strategy.

    It replaces the optimizer's `step` and `zero_grad`, and where state is shared `state_dict` and `load_state_dict`,
    until `close`. A subclass builds its parts, calls `super().__init__`, and last `_patch_optimizer`.
    """

    version: int = 0
    """Updates that the parameters have had."""
    on_update: Callable[[], None] = staticmethod(lambda: None)
    """Called after each update."""
    on_lost: Callable[[set[int], bool, list[int]], None] = staticmethod(lambda _ranks, _counted, _takers: None)
    """Called with lost ranks, True if their last gradients count, and the ranks that take their samples."""
    on_nan = "raise"
    """What to do with a loss or gradient that is not finite: "raise", "skip" the update, or "ignore" it."""
    _loss_value = 0.0
    """The loss of the last backward pass."""
    on_add_param_group: Callable[[dict[str, Any]], None] = staticmethod(lambda _group: None)
    """Called instead of `optimizer.add_param_group`."""
    replica: tuple[int, int] | None = None
    """The number of this worker's replica, and the number of replicas; None if every worker is a replica."""
    cancels = False
    """True if a step may be cancelled."""
    round: int = -1
    """The round of the team's loader that the script is in, counted over all epochs; -1 without one."""
    weight: float | None = None
    """How much the gradient of the current step counts, if the script says it."""
    lockstep = False
    """True if every worker must compute in every step, and contribute to everything that is saved."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizer, context: TrainerContext, *, replicas: int | None = None
    ) -> None:
        """replicas: how many there are, if not as many as workers."""
        self._model, self._optimizer, self._members = model, optimizer, context.members
        self._barrier, self._rank = context.members.barrier, context.members.rank
        self._recorder, self._stopwatch = context.recorder, context.stopwatch
        self.paces = [(0.0, 0)] * (context.members.size if replicas is None else replicas)
        """Per replica, seconds and samples of its last minibatch; equal on all workers after an update."""
        self._accumulating = False
        self._patch = OptimizerPatch(optimizer)
        self._bad_loss: float | None = None
        """The loss of the current gradient, if it is not finite."""
        self._access: GradientAccess | None = None
        self._said_local = self._said_others = False
        """True if it was said that `.grad` is this worker's own."""
        self._say, self._strategy = context.say, str(context.strategy)

    def _patch_optimizer(self, *, state: bool = True, amp: bool = True) -> None:
        """state: the optimizer's state is shared or split; amp: `step` itself unscales and skips for a GradScaler."""
        self._patch.replace("step", self.step)
        self._patch.replace("zero_grad", self._zero_grad)
        self._patch.replace("add_param_group", self._add_param_group)
        if state:
            self._patch.replace("state_dict", self._state_dict)
            self._patch.replace("load_state_dict", self._load_state_dict)
        if amp:
            self._patch.support_amp_scaling()

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Replaces `optimizer.step()`."""
        self._look_away()
        result = None if self._accumulating else self._step(closure)
        Trainer.leave_backward(self)  # the script may look at the gradient after the step, too
        return result

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """A step of a trainer that updates parameters itself, with the user's hooks before and after."""
        self._patch.run_hooks("pre")
        loss = run_closure(closure)
        unscale, found_inf = self._patch.amp_scaling()
        self._update(unscale, self._refuses(found_inf))
        self._patch.run_hooks("post")
        return loss

    def _add_param_group(self, group: dict[str, Any]) -> None:
        """Replaces `optimizer.add_param_group()`."""
        self.on_add_param_group(group)

    def _update(self, unscale: float, found_inf: bool) -> None:
        """Update the parameters.

        unscale: factor that undoes the GradScaler's scale; found_inf: True if this worker's gradient is not finite.
        """
        raise NotImplementedError

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            self._look_away()
            self._clear_gradients(set_to_none)

    def _clear_gradients(self, set_to_none: bool) -> None:
        type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def accumulate(self, on: bool) -> None:
        """While on, gradients are summed over minibatches, and `step` and `zero_grad` do nothing."""
        self._accumulating = on

    @abstractmethod
    def clip(self, limit: float, norm: float) -> torch.Tensor:
        """Clip the norm of the team's gradient; returns the norm before."""

    def take_batch(self, samples: int, weight: float) -> None:
        """The script has been given a minibatch with this share of the global batch."""
        self._stopwatch.start(samples)

    def take_whole_batches(self) -> None:
        """The script iterates over a loader whose batches are not divided."""

    def enter_backward(self, loss: Any) -> bool:
        """A backward pass begins, from this tensor or these tensors; returns False if it shall not be run."""
        self._look_away()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss_value = float(loss.detach())
            self._bad_loss = None if math.isfinite(self._loss_value) else self._loss_value
        return True

    def _runs(self, runs: bool) -> bool:
        """Returns the argument; a loss that is a mean over nothing, whose backward pass is not run, is no bad one."""
        if not runs:
            self._bad_loss, self._loss_value = None, 0.0
        return runs

    def _refuses(self, found_inf: bool) -> bool:
        """True if the current gradient must not be used, because it or its loss is not finite."""
        bad, self._bad_loss = self._bad_loss, None
        if found_inf or self.on_nan == "ignore" or getattr(self._optimizer, "grad_scale", None) is not None:
            return found_inf  # a GradScaler looks at gradients itself
        if bad is not None and self.on_nan == "raise":
            self._refuse_loss(bad)
            return False
        return bad is not None or (self.on_nan == "skip" and not self._gradient_is_finite())

    def _refuse_loss(self, loss: float) -> None:
        raise self._not_finite(loss, self._rank)

    def _not_finite(self, loss: float, rank: int) -> TeamError:
        return TeamError(
            f"the loss of rank {rank} is {loss} at update {self.version + 1}; setup(on_nan='skip') leaves out updates "
            "whose loss or gradient is not finite, on_nan='ignore' makes them as plain torch does",
            [rank],
        )

    def _gradient_is_finite(self) -> bool:
        """True if this worker's gradient is finite."""
        gradients = [GRAD.__get__(parameter) for parameter in self._model.parameters()]
        return all(bool(torch.isfinite(one).all()) for one in gradients if one is not None)

    def leave_backward(self) -> None:
        """The backward pass is done."""
        if self._access is not None:
            self._access.armed = True

    def _watch_gradients(self) -> None:
        """Call `_expose_gradients` when the script looks at gradients."""
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        known = set(map(id, held))
        others = [parameter for parameter in self._model.parameters() if id(parameter) not in known]
        self._access = GradientAccess(held, others, self._expose_gradients, self._say_others, self.clip)

    def _say_others(self) -> None:
        if not self._said_others:
            self._said_others = True
            self._say(
                "the script reads gradients of parameters that the optimizer given to setup does not hold; they are "
                "each worker's own, and so is what another optimizer makes of them"
            )

    def _look_away(self) -> None:
        """From here on it is the trainer that looks at gradients."""
        if self._access is not None:
            self._access.armed = False

    def _expose_gradients(self) -> None:
        """The script looks at `.grad` after a backward pass: make it the team's gradient, or say that it is not."""
        Trainer.leave_backward(self)  # torch's own clipping is still the team's
        if not self._said_local:
            self._said_local = True
            self._say(
                f"the script reads .grad between backward and step; under '{self._strategy}' that is this worker's own "
                "gradient, not the team's; team.clip_grad_norm_ clips the team's"
            )

    def finish_epoch(self) -> None:
        """This worker has no more batches; take part in the others' updates until they have none either."""

    def enter_step(self) -> None:
        """`with team.step():` begins."""

    def leave_step(self, error: BaseException | None) -> bool:
        """`with team.step():` ends, with this error; returns True if the error is handled."""
        return False

    def share_loader(self, loader: DataLoader[Any], global_batch: int | None) -> Any:
        """The loader to give to the script, if this strategy hands out samples itself; else None."""
        return None

    def epoch_drawn(self) -> None:
        """All workers call it after the lead has drawn the order of an epoch, possibly with random numbers."""

    def report_loss(self, loss: float) -> None:
        """The script has reported a loss."""

    # -- the other workers -------------------------------------------------------------------------------------------

    @property
    def present(self) -> int | None:
        """The number of workers now, if it may change."""
        return None

    @property
    def lead(self) -> int:
        """The rank that prints and saves."""
        return 0

    @property
    def evaluates(self) -> bool:
        """True if the script evaluates the model now, instead of training it."""
        return not (self._model.training and torch.is_grad_enabled())

    @property
    def weightless(self) -> bool:
        """True if the current minibatch is a copy whose gradient has weight 0."""
        return False

    def gather(self, payload: bytes, kind: BarrierKind) -> list[bytes] | None:
        """All workers' payloads, by rank, if the strategy has its own barrier; else None."""
        return None

    def _wait(self, kind: BarrierKind, length: int = 0, failure: TeamError | None = None) -> BarrierKind:
        """Wait at the team's barrier, and record for whom.

        length: bytes of this worker's note; failure: an error to raise on all workers instead.
        """
        start = time.perf_counter()
        if failure is None:
            kind = self._barrier.wait(kind, length)
        else:
            assert isinstance(self._barrier, MachinesBarrier)
            kind = self._barrier.wait(kind, 0, failure)
        if self._barrier.last != self._rank:
            waited = time.perf_counter() - start
            if waited > _NOTABLE:
                self._recorder.add(Wait(self._rank, start, waited, self._barrier.last))
        return kind

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """While entered, nothing changes the parameters and the optimizer's state."""
        return contextlib.nullcontext()

    def _state_dict(self) -> dict[str, Any]:
        """Replaces `optimizer.state_dict()`."""
        return type(self._optimizer).state_dict(self._optimizer)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces `optimizer.load_state_dict()`."""
        type(self._optimizer).load_state_dict(self._optimizer, state)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Take the values of a checkpoint; all workers call it."""
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The script has ended; tell the processes that depend on this worker."""

    def wait_until_forwarded(self) -> None:
        """This worker has written its last event; wait until it has arrived in the run's folder."""

    def detach(self) -> None:
        """This process is a fork of a worker: it must not act as one."""
        self._patch.replace("step", _refuse_fork)

    def abandon(self) -> None:
        """The script ends with an error; the other workers are elsewhere in theirs, so wait for none."""

    def close(self) -> None:
        """Give model and optimizer back as plain torch knows them."""
        self._patch.undo()
        if self._access is not None:
            self._access.undo()


def _refuse_fork(*_args: Any, **_kwargs: Any) -> Any:
    raise UsageError(FORK)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure as torch's optimizers evaluate it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuses a model or optimizer that cannot be trained, before anything is changed."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"setup takes a torch.nn.Module first; it got a {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"setup takes a torch.optim.Optimizer second; it got a {type(optimizer).__name__}")
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        raise UsageError("the model has no parameters; there is nothing to train")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise UsageError("the model has lazy parameters, whose shape is not known yet; call it once before setup")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise UsageError(
            f"the optimizer holds {foreign} parameter{'s' * (foreign > 1)} that the model does not have; "
            "make the optimizer from this model's parameters, after the model is final"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("SparseAdam needs sparse gradients, which a team does not exchange; use Adam")


def split_parameters(
    model: torch.nn.Module, optimizer: Optimizer
) -> tuple[list[tuple[str, torch.nn.Parameter]], list[torch.nn.Parameter]]:
    """The parameters that the optimizer updates, with their names, and the rest."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held]
    return trained, [parameter for parameter in model.parameters() if id(parameter) not in held]
