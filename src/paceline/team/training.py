"""The training of a model by the team: the trainer, with what it hooks into torch and the loaders that feed it."""

from __future__ import annotations

import dataclasses
import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import between_replicas
from paceline.config.example_inputs import ExampleInputs
from paceline.errors import FORK, UsageError, too_few_files
from paceline.parameters.joint import Models, models_of
from paceline.policies import Policy
from paceline.strategies import Make, Options, Trainer, TrainerContext
from paceline.strategies.backward_patch import BackwardPatch
from paceline.strategies.batch_norm import TeamBatchNorm, has_batch_norm, synchronise
from paceline.strategies.wrapping_patch import WrappingPatch
from paceline.team.alike import check_alike
from paceline.team.buffer_watch import BufferWatch
from paceline.team.first_call import FirstCall
from paceline.team.loaders import LoaderTeam
from paceline.team.resuming import Resuming
from paceline.team.schedulers import Schedulers
from paceline.team.setup_checks import check_model, choose_trainer, splits_layers
from paceline.team.snapshots import Snapshots
from paceline.team.worker import Worker
from paceline.transport import BarrierKind


class Training:
    """A worker's part in the training of one model and its optimizer, from `begin` to `close`."""

    model: torch.nn.Module
    optimizer: Optimizer

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.trainer: Trainer | None = None
        """None before `begin`, or before the model's first call."""
        self.accumulations = 0
        """Nested accumulating steps that the script is in."""
        self.detached = False
        """True in a fork of the worker."""
        self.loaders = LoaderTeam(worker.rank, worker.size, worker.members, worker.recorder, worker.stopwatch, self.say)
        self.snapshots = Snapshots(worker, self.loaders)
        self.resuming: Resuming | None = None
        """Of a run that goes on from another one, from `begin` on."""
        self._buffer_watch: BufferWatch | None = None
        """Where workers have parts of a batch."""
        self._weight: float | None = None
        self._make_trainer: Callable[[], None]
        self._backward_patch: BackwardPatch | None = None
        self._wrapping_patch: WrappingPatch | None = None
        self._first_call: FirstCall | None = None
        """Until the model's first call, if that decides how its layers are split."""

    @property
    def begun(self) -> bool:
        return self.trainer is not None or self._first_call is not None

    @property
    def lead(self) -> int:
        return 0 if self.trainer is None else self.trainer.lead

    def say(self, message: str) -> None:
        """Prints a line of Paceline's on stderr, on the lead only."""
        if self._worker.rank == self.lead:
            self._worker.say(message)

    def current(self) -> Trainer:
        """The trainer; refused where there is none."""
        if self.detached:
            raise UsageError(FORK)
        if self.trainer is None and self._first_call is not None:
            raise UsageError(
                f"under '{self._worker.strategy}' the model is split at its first call, which shows its inputs; do "
                "this after it, or give team.setup example_inputs or a loader"
            )
        if self.trainer is None:
            raise UsageError("the team has no model yet; call team.setup(model, optimizer, …) first")
        return self.trainer

    # -- the trainer -------------------------------------------------------------------------------------------------

    def begin(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, on_nan: str) -> None:
        """Puts the team behind the model and its optimizer, now or at the model's first call."""
        worker = self._worker
        if worker.launch.resume is not None and worker.launch.joins is None:
            self.resuming = Resuming(worker, Path(worker.launch.resume), self.say)
            self.loaders.on_share, self.loaders.on_epoch = self.resuming.share, self._begin_epoch
        context = TrainerContext(
            members=worker.members,
            strategy=worker.strategy,
            launch=worker.launch,
            folder=worker.folder,
            recorder=worker.recorder,
            stopwatch=worker.stopwatch,
            device=worker.device,
            say=self.say,
            version=0 if self.resuming is None else self.resuming.version,
            policy={} if self.resuming is None else self.resuming.policy,
        )
        kind = choose_trainer(worker.strategy, worker.launch, worker.members, model, optimizer)
        self.model, self.optimizer = model, optimizer

        def make(inputs: ExampleInputs | None) -> None:
            found = dataclasses.replace(options, example_inputs=inputs)
            self._make_trainer = functools.partial(self._make, kind, found, context, on_nan)
            self._make_trainer()

        if worker.launch.joins is None:
            check_alike(worker.members, model, optimizer, options.loaders, options)
        inputs = options.example_inputs
        if inputs is None and not options.loaders and worker.size > 1 and splits_layers(worker.strategy):
            self._first_call = FirstCall(model, make)  # which shows how the layers can be split
        else:
            make(inputs)

    def _make(self, kind: Make, options: Options, context: TrainerContext, on_nan: str) -> None:
        """Makes the trainer of the model and its optimizer as they are now."""
        before = self.trainer
        try:
            self.trainer = trainer = kind(self.model, self.optimizer, options, context)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise UsageError(too_few_files()) from None
        trainer.on_nan, trainer.on_add_param_group = on_nan, self._add_param_group
        self.loaders.attach(trainer)
        self.snapshots.attach(trainer, self.model, self.optimizer)
        trainer.on_ask = self._ask
        if self.loaders.replicas > 1 and self._buffer_watch is None:
            self._buffer_watch = BufferWatch(models_of(self.model), self.say)
        if trainer.joining is not None:
            trainer.joining.schedulers = Schedulers(self.optimizer)
        if self.resuming is not None and before is None:
            self.resuming.load(trainer)
        if self.resuming is not None:
            trainer.on_update = _both(trainer.on_update, self.resuming.updated)
        self._backward_patch = BackwardPatch(self._worker.stopwatch, trainer)
        self._wrapping_patch = WrappingPatch(self.model)
        trainer.weight = self._weight
        trainer.accumulate(self.accumulations > 0)

    def _begin_epoch(self, over: bool) -> None:
        """The script begins an epoch of training; over: another run has trained it already."""
        if self.resuming is not None:
            self.resuming.begin_epoch(self.current(), self.optimizer, over)

    def _ask(self) -> None:
        """The script asks for its next batch to train on."""
        if self._buffer_watch is not None:
            self._buffer_watch.look()
        if self.resuming is not None:
            self.resuming.ask()
        self.snapshots.ask()

    def _undo_patches(self) -> None:
        for patch in (self._backward_patch, self._wrapping_patch):
            if patch is not None:
                patch.undo()

    def _add_param_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """The script adds parameters to the optimizer, as all workers do: train them from now on, too."""
        strategy = self._worker.strategy
        if isinstance(between_replicas(strategy, 1)[0], Policy) and self._worker.size > 1:
            raise UsageError(
                f"under '{strategy}' the server knows the optimizer's parameters from setup on; add the group "
                "before team.setup, with requires_grad=False until it is to be trained, or use all-reduce"
            )
        trainer = self.current()
        version = trainer.version
        self._undo_patches()
        trainer.close()
        type(optimizer).add_param_group(optimizer, group)
        check_model(self.model, self.optimizer)
        self._make_trainer()
        self.current().version = version

    def set_weight(self, weight: float | None) -> None:
        """The weight of the current step, if the script says it."""
        self._weight = weight
        if self.trainer is not None:
            self.trainer.weight = weight

    # -- the other workers -------------------------------------------------------------------------------------------

    @property
    def workers_per_replica(self) -> int:
        return self._worker.size // self.loaders.replicas

    def gather(self, payload: bytes, kind: BarrierKind = BarrierKind.GATHER) -> list[bytes]:
        """All workers' payloads, by rank; empty for a worker that was lost."""
        payloads = self.trainer.gather(payload, kind) if self.trainer is not None else None
        return self._worker.members.gather(payload, kind) if payloads is None else payloads

    def share_batch_norm(self, model: torch.nn.Module, *, synchronised: bool) -> torch.nn.Module:
        """The model with batch norm over the whole batch, if it shall be; else said to be over each worker's part."""
        if between_replicas(self._worker.strategy, self._worker.size)[1] == 1:
            return model
        if synchronised:
            whole = [synchronise(one, self._exchange_statistics) for one in models_of(model)]
            return Models(whole) if isinstance(model, Models) else whole[0]
        if has_batch_norm(model):
            self.say(
                "batch norm layers use each worker's part of a batch, not the whole one as in one process; "
                "setup(sync_batch_norm=True) lets them use the whole under all-reduce and mesh"
            )
        return model

    def _exchange_statistics(self, value: torch.Tensor) -> list[torch.Tensor]:
        copied = self.trainer is not None and self.trainer.weightless
        own = b"" if copied else value.numpy().tobytes()
        parts = self._worker.members.gather(own, BarrierKind.STATISTICS)
        each = self.workers_per_replica  # those with the same part of a replica exchange
        parts = parts[self._worker.rank % each :: each]
        return [torch.frombuffer(bytearray(part), dtype=value.dtype) for part in parts if part]

    # -- state and end -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Model, optimizer and version, as a checkpoint has them."""
        trainer = self.current()
        with trainer.frozen():
            return {**trainer.whole_state(self.model), "version": trainer.version}

    def streamed_state(self) -> dict[str, Any] | None:
        """The same with stand-ins for tensors that are on other machines; None if there are none."""
        trainer = self.current()
        streamed = trainer.streamed_state()
        return None if streamed is None else {**streamed, "version": trainer.version}

    def close(self) -> None:
        """Gives model and optimizer back as plain torch."""
        self.loaders.watch.close()
        if self.trainer is not None:
            self.trainer.close()
        if self._first_call is not None:
            self._first_call.cancel()
        self._undo_patches()
        for module in self.model.modules() if self.trainer is not None else ():
            if isinstance(module, TeamBatchNorm):
                module.exchange = None

    def detach(self) -> None:
        """Lets this process, a fork of the worker, do nothing in its name."""
        self.detached = True
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            trainer.detach()


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
