"""The base of all trainers: the team's interface to a strategy, and all that strategies share."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.preemption import leave_if_told
from paceline.errors import TeamError, WorkerLost, not_finite
from paceline.events import Wait
from paceline.parameters.gradient_state import GradientState
from paceline.parameters.gradients import GRAD
from paceline.parameters.joint import compact, load_model_state, model_state, models_of, parts_of
from paceline.strategies.context import TrainerContext
from paceline.strategies.gradient_access import GradientAccess, hook_sees
from paceline.strategies.optimizer_patch import OptimizerPatch, load_optimizers, refuse_fork, run_closure
from paceline.strategies.snapshot_board import Kept, SnapshotBoard
from paceline.transport import BarrierKind, MachinesBarrier

_NOTABLE = 5e-6
"""Seconds of waiting that are worth an event."""


class Trainer(ABC):
    """One model and its optimizer, trained by the team under one strategy.

    It replaces the optimizer's `step` and `zero_grad`, and where state is shared `state_dict` and `load_state_dict`,
    until `close`. A subclass builds its parts, calls `super().__init__`, and last `_patch_optimizer`.
    """

    version: int = 0
    """Updates that the parameters have had."""
    on_update: Callable[[], None] = staticmethod(lambda: None)
    """Called after each update."""
    on_ask: Callable[[], None] = staticmethod(lambda: None)
    """Called before the script gets its next batch to train on."""
    on_batch: Callable[[], None] = staticmethod(lambda: None)
    """Called when it has got it."""
    on_lost: Callable[[set[int], bool, list[int]], None] = staticmethod(lambda _ranks, _counted, _takers: None)
    """Called with lost ranks, True if their last gradients count, and the ranks that take their samples."""
    on_nan = "raise"
    """What to do with a loss or gradient that is not finite: "raise", "skip" the update, or "ignore" it."""
    _loss_value = 0.0
    """The loss of the last backward pass."""
    on_add_param_group: Callable[[Optimizer, dict[str, Any]], None] = staticmethod(lambda _optimizer, _group: None)
    """Called instead of `optimizer.add_param_group`."""
    replica: tuple[int, int] | None = None
    """The number of this worker's replica, and the number of replicas; None if every worker is a replica."""
    cancels = False
    """True if a step may be cancelled."""
    round: int = -1
    """The round of the team's loader that the script is in, counted over all epochs; -1 without one."""
    round_share: float = 1.0
    """This worker's share of that batch; 1 if the workers' shares need not make a whole."""
    weight: float | None = None
    """How much the gradient of the current step counts, if the script says it."""
    backward_passes = 0
    lockstep = False
    """True if every worker must compute in every step, and contribute to everything that is saved."""
    maps = False
    """True if a checkpoint need not be read into memory to be loaded, since a worker needs a part of it only."""
    in_every_round = False
    """True if every worker must compute in every step."""
    together = True
    """True if all workers compute every update together, so that one is at the same version as the others."""
    board: SnapshotBoard | None = None
    """Where workers mark versions for snapshots; None if there are none."""
    joining: Any = None
    """Lets workers join a running team that has no server (`TeamJoining`); None if none can."""
    holds_server = False
    """True if a server is a thread of this worker."""
    _states: Sequence[GradientState] = ()
    """The gradient that is being made, for each optimizer, if the trainer weights gradients itself."""
    keeps = False
    """True if an update copies what it overwrites of a marked version; else the lead copies that before the update."""
    spans = False
    """True if snapshots can be taken of a team on several machines."""

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
        self._patches = [OptimizerPatch(part) for part in parts_of(optimizer)]
        self._current = 0
        """The number of the optimizer, if there are several, whose gradient or step it is about."""
        self._bad_loss: float | None = None
        """The loss of the current gradient, if it is not finite."""
        self._access: GradientAccess | None = None
        self._said_local = self._said_others = False
        """True if it was said that `.grad` is this worker's own."""
        self._say, self._strategy = context.say, str(context.strategy)

    def _patch_optimizer(self, *, state: bool = True, amp: bool = True) -> None:
        """state: the optimizer's state is shared or split; amp: `step` itself unscales and skips for a GradScaler."""
        methods: dict[str, Callable[..., Any]] = {"step": self.step, "zero_grad": self._zero_grad}
        methods["add_param_group"] = self._add_param_group
        if state:
            methods |= {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        for number, patch in enumerate(self._patches):
            for name, method in methods.items():
                patch.replace(name, method if len(self._patches) == 1 else self._of(number, method))
            if amp:
                patch.support_amp_scaling()

    def _of(self, number: int, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method, called for one of several optimizers."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._select(number)
            return method(*args, **kwargs)

        return call

    def _select(self, number: int) -> None:
        """Makes one of several optimizers the one that it is about."""
        self._current = number

    @property
    def _making(self) -> GradientState:
        """The gradient of the optimizer that it is about."""
        return self._states[self._current]

    @property
    def _patch(self) -> OptimizerPatch:
        """Of the optimizer that it is about."""
        return self._patches[self._current]

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Replaces `optimizer.step()`."""
        self._look_away()
        result = None if self._accumulating else self._step(closure)
        Trainer.leave_backward(self)  # the script may look at the gradient after the step, too
        if not self._accumulating:
            leave_if_told()
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
        self.on_add_param_group(self._patch.optimizer, group)

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
        optimizer = self._patch.optimizer
        type(optimizer).zero_grad(optimizer, set_to_none)

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
        for state in self._states:
            state.weight.take_whole_batches()

    def enter_backward(self, loss: Any) -> bool:
        """A backward pass begins, from this tensor or these tensors; returns False if it shall not be run."""
        self.backward_passes += 1
        self._look_away()
        if self._access is not None:
            self._access.enter_backward()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss_value = float(loss.item())
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
        if found_inf or self.on_nan == "ignore" or getattr(self._patch.optimizer, "grad_scale", None) is not None:
            return found_inf  # a GradScaler looks at gradients itself
        if bad is not None and self.on_nan == "raise":
            self._refuse_loss(bad)
            return False
        return bad is not None or (self.on_nan == "skip" and not self._gradient_is_finite())

    def _refuse_loss(self, loss: float) -> None:
        raise self._not_finite(loss, self._rank)

    def _not_finite(self, loss: float, rank: int) -> TeamError:
        return not_finite(loss, rank, self.version + 1)

    def _gradient_is_finite(self) -> bool:
        """True if this worker's gradient is finite."""
        held = (parameter for group in self._patch.optimizer.param_groups for parameter in group["params"])
        gradients = [GRAD.__get__(parameter) for parameter in held]
        return all(bool(torch.isfinite(one).all()) for one in gradients if one is not None)

    def leave_backward(self) -> None:
        """The backward pass is done."""
        if self._access is not None:
            self._access.arm()

    def _watch_gradients(self) -> None:
        """Call `_expose_gradients` when the script looks at gradients."""
        held = [
            [parameter for group in patch.optimizer.param_groups for parameter in group["params"]]
            for patch in self._patches
        ]
        known = {id(parameter) for part in held for parameter in part}
        others = [parameter for parameter in self._model.parameters() if id(parameter) not in known]
        told = (self._expose_of, self._say_others, self._expose_to_hook, self._clip_of)
        self._access = GradientAccess(held, others, *told)

    def _expose_of(self, number: int) -> None:
        self._select(number)
        self._expose_gradients()

    def _clip_of(self, number: int, limit: float, norm: float) -> torch.Tensor:
        self._select(number)
        return self.clip(limit, norm)

    def _say_others(self) -> None:
        if not self._said_others:
            self._said_others = True
            self._say(
                "the script reads gradients of parameters that the optimizer given to setup does not hold; they are "
                "each worker's own, and so is what another optimizer makes of them; give setup all optimizers, "
                "team.setup(model, [one, other], loader)"
            )

    def _expose_to_hook(self) -> None:
        self._say(hook_sees("this worker's own gradient, not the team's"))

    def _look_away(self) -> None:
        """From here on it is the trainer that looks at gradients."""
        if self._access is not None:
            self._access.disarm()

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

    def share_loader(self, loader: DataLoader[Any], **options: Any) -> Any:
        """The loader to give to the script, if this strategy hands out samples itself; else None.

        options: `global_batch`, `per_worker` and `steps`, as of `team.loader`, and `say`, which prints on the lead.
        """
        return None

    def epoch_drawn(self) -> None:
        """All workers call it after the lead has drawn the order of an epoch, possibly with random numbers."""

    def report_loss(self, loss: float) -> None:
        """The script has reported a loss."""

    # -- the other workers -------------------------------------------------------------------------------------------

    @property
    def within_step(self) -> bool:
        """True if this worker has a gradient that waits for an update."""
        return False

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
        return not (torch.is_grad_enabled() and any(model.training for model in self.models))

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that the script trains."""
        return models_of(self._model)

    @property
    def weightless(self) -> bool:
        """True if the current minibatch is a copy whose gradient has weight 0."""
        return False

    @property
    def part(self) -> float | None:
        """This worker's share of the samples of the current step, if the strategy hands out samples itself."""
        return None

    def gather(self, payload: bytes, kind: BarrierKind) -> list[bytes] | None:
        """All workers' payloads, by rank, if the strategy has its own barrier; else None."""
        return None

    def _wait(self, kind: BarrierKind, length: int = 0, failure: TeamError | None = None) -> BarrierKind:
        """Wait at the team's barrier, and record for whom.

        length: bytes of this worker's note; failure: an error to raise on all workers instead.
        """
        start = time.perf_counter()
        if failure is None:
            try:
                kind = self._barrier.wait(kind, length)
            except WorkerLost:
                leave_if_told()  # as the others were
                raise
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
        optimizer = self._patch.optimizer
        return type(optimizer).state_dict(optimizer)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces `optimizer.load_state_dict()`."""
        optimizer = self._patch.optimizer
        type(optimizer).load_state_dict(optimizer, state)

    def load(self, model: Any, optimizer: Any) -> None:
        """Take the values of a checkpoint; all workers call it. Of several models and optimizers, lists."""
        load_model_state(self._model, model)
        load_optimizers(self._patches, optimizer)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def no_snapshots(self) -> str:
        """Why no snapshots can be taken of what this trainer trains, after "a run"; empty if they can."""
        return ""

    def mark_next(self) -> None:
        """Marks the next version for a snapshot; the lead calls it."""
        if self.board is not None:
            self.board.mark_next(self.version)

    @property
    def marked(self) -> int:
        """The number of the last snapshot whose version this worker has; 0 before the first."""
        number = 0 if self.board is None else self.board.mark
        return number if number <= self.version + 1 else 0

    def version_of(self, number: int) -> int:
        """The version of a snapshot."""
        return number - 1

    def whole_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Model and optimizer as plain torch knows them, as copies; if `lockstep`, all workers call it."""
        with self.frozen():
            states = [patch.optimizer.state_dict() for patch in self._patches]
            return {
                "model": compact(model_state(model)),
                "optimizer": compact(states[0] if len(states) == 1 else states),
            }

    def streamed_state(self) -> dict[str, Any] | None:
        """Model and optimizer with stand-ins for tensors that are on other machines; None if there are none."""
        return None

    def kept(self, number: int) -> Kept | None:
        """The marked version, once updates have copied it; the lead calls it."""
        return None

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The script has ended; tell the processes that depend on this worker."""

    def wait_until_forwarded(self) -> None:
        """This worker has written its last event; wait until it has arrived in the run's folder."""

    def detach(self) -> None:
        """This process is a fork of a worker: it must not act as one."""
        for patch in self._patches:
            patch.replace("step", refuse_fork)

    def abandon(self) -> None:
        """The script ends with an error; the other workers are elsewhere in theirs, so wait for none."""

    def close(self) -> None:
        """Give model and optimizer back as plain torch knows them."""
        for patch in self._patches:
            patch.undo()
        if self._access is not None:
            self._access.undo()
