"""`join()` and `Team`: all that a training script uses, in one file since it is one class."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.event_forwarding import EventForwarding
from paceline.cluster.membership import Members, join_team
from paceline.cluster.process import import_compiler_late, keep_freed_memory
from paceline.config import (
    AllReduce,
    Launch,
    Place,
    Strategy,
    Timeouts,
    between_replicas,
    check_workers,
    parse_strategy,
)
from paceline.data import TeamLoader
from paceline.data.leased_loader import LeasedLoader
from paceline.data.loader import batch_growth, check_loader
from paceline.errors import FORK, UsageError
from paceline.events import Join, Leave, Metric
from paceline.events.recorder import Recorder, folder_of
from paceline.events.stopwatch import Stopwatch
from paceline.events.summary import merge
from paceline.parameters.variables import Mirrored, PerReplica, total
from paceline.policies import Policy
from paceline.strategies import Make, Options, Trainer, TrainerContext
from paceline.strategies.backward_patch import BackwardPatch
from paceline.strategies.base import check
from paceline.strategies.batch_norm import TeamBatchNorm, has_batch_norm, synchronise
from paceline.team.alike import check_alike
from paceline.team.checkpoints import Checkpoints, compact, write
from paceline.team.loaders import LoaderTeam
from paceline.team.setup_checks import check_setup, choose_trainer
from paceline.team.step import Step, item_count
from paceline.transport import BarrierKind

_joined: Team | None = None
_Value = TypeVar("_Value", float, torch.Tensor)


def join(strategy: str | Strategy | None = None, *, name: str | None = None, timeouts: Timeouts | None = None) -> Team:
    """Joins the team that this process was started for; a team of one when started with plain `python`.

    strategy: how to train, unless `paceline run --strategy` says otherwise; all-reduce by default.
    name: the run's folder under `runs/`, where `paceline run` has not named one; without either, none is written.
    timeouts: how long to wait for other processes.
    """
    global _joined
    if _joined is None:
        _joined = Team(Place.from_environment(), Launch.from_environment(), strategy, name, timeouts)
    return _joined


def _forked() -> None:
    """Called in every fork of this process, which is no member of the team."""
    if _joined is not None:
        _joined._detach()


os.register_at_fork(after_in_child=_forked)


class Team:
    """The workers of one run, seen from one of them."""

    def __init__(
        self,
        place: Place,
        launch: Launch,
        strategy: str | Strategy | None,
        name: str | None,
        timeouts: Timeouts | None,
    ) -> None:
        self.rank, self.local_rank, self._started_with = place.rank, place.local_rank, place.world_size
        self.strategy = parse_strategy(launch.strategy or strategy or AllReduce())
        between, replicas = between_replicas(self.strategy, self._started_with)
        if isinstance(between, Policy):
            if launch.joins is None:
                between.for_workers(range(replicas))  # refuses what cannot be
        elif launch.servers or launch.corrections or launch.compress:
            raise UsageError(
                f"--servers, --correct and --compress are for a parameter server, which '{self.strategy}' does not have"
            )
        if self._started_with > 1 or launch.strategy:  # with plain python any script's own strategy is a team of one
            check_workers(self.strategy, self._started_with)
        self._launch = launch
        self.device = _device(place.local_rank)
        self._folder = _folder(launch, name)
        self._writes_summary = launch.folder is None and self._folder is not None
        reforms = launch.elastic and isinstance(self.strategy, AllReduce)
        self._members: Members = join_team(place, launch, timeouts or launch.timeouts, self._say, elastic=reforms)
        self._checkpoints = Checkpoints(self._members, self._folder)
        import_compiler_late()
        if self._started_with > 1:
            keep_freed_memory()
        self._trainer: Trainer | None = None
        self._recorder = Recorder(self._streams_folder() if launch.record else None, self.rank)
        self._stopwatch = Stopwatch(self._recorder, self.rank, launch.slow.get(self.rank), launch.seed)
        self._backward_patch: BackwardPatch | None = None
        self._accumulations = 0
        """Nested accumulating steps that the script is in."""
        self._step, self._accumulating_step = Step(self, False), Step(self, True)
        self._loaders = LoaderTeam(self.rank, self._started_with, self._members, self._recorder, self._stopwatch)
        self._closed = self._detached = False
        where = (socket.gethostname(), str(self.device), str(self.strategy))
        self._recorder.add(Join(self.rank, time.perf_counter(), os.getpid(), *where, time.time()))
        atexit.register(self._leave)

    def _streams_folder(self) -> Path | None:
        """The folder of this worker's events; on other machines than rank 0's, a relay or the lead forwards them."""
        if self._folder is None:
            return None
        if self._members.connections is not None and self._launch.record and not isinstance(self.strategy, Policy):
            EventForwarding(self._members, self._folder)
        return folder_of(self._folder, self._members.machine if self._launch.joins is None else self._launch.machine)

    @property
    def world_size(self) -> int:
        """The number of workers; with a parameter server it may change."""
        now = self._trainer.present if self._trainer is not None else None
        return self._started_with if now is None else now

    @property
    def is_lead(self) -> bool:
        """True if this worker prints and saves: rank 0, or in an elastic all-reduce the lowest that is left."""
        return self.rank == self.lead

    @property
    def lead(self) -> int:
        return 0 if self._trainer is None else self._trainer.lead

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *loaders: DataLoader[Any],
        global_batch: int | None = None,
        balance: bool = False,
        gradients: str = "local",
        sync_batch_norm: bool = False,
        scale_lr: str | None = None,
        warmup: int = 0,
        loss: Callable[..., Any] | None = None,
        on_nan: str = "raise",
    ) -> tuple[Any, ...]:
        """Put the team behind a model, its optimizer and its loaders; returns them, to be used as before.

        global_batch: samples of one step of all workers together; by default the loader's batch_size, so that a team
            trains as one process does.
        balance: split every global batch by the workers' measured paces instead of evenly.
        gradients: "local" leaves this worker's own gradient in `.grad` until the step; "visible" puts the team's
            mean there at the end of the backward pass, as DistributedDataParallel does.
        sync_batch_norm: let batch norm layers use the whole global batch instead of each worker's part.
        scale_lr: multiply the learning rate by the growth of an update's batch over the loader's batch_size
            ("linear"), or its root ("sqrt"), reached over `warmup` updates.
        on_nan: what to do when a loss is not finite: "raise" an error that names the worker, "skip" the update (also if
            only a gradient is not finite), or "ignore" it as plain torch does.
        loss: the loss function, from which a split of the model is planned; the loop calls it as before.
        """
        if self._detached:
            raise UsageError(FORK)
        if self._trainer is not None:
            raise UsageError("setup was called before; a team trains one model with one optimizer")
        check_setup(self.strategy, model, optimizer, loaders, loss, on_nan, sync_batch_norm)
        if sync_batch_norm and between_replicas(self.strategy, self.world_size)[1] > 1:
            model = synchronise(model, self._exchange_statistics)
        elif between_replicas(self.strategy, self.world_size)[1] > 1 and has_batch_norm(model):
            self._say_once(
                "batch norm layers use each worker's part of a batch, not the whole one as in one process; "
                "setup(sync_batch_norm=True) lets them use the whole under all-reduce and mesh"
            )
        options = Options(gradients, scale_lr, warmup, batch_growth(loaders, global_batch), loss, loaders)
        context = TrainerContext(
            members=self._members,
            strategy=self.strategy,
            launch=self._launch,
            folder=self._folder,
            recorder=self._recorder,
            stopwatch=self._stopwatch,
            device=self.device,
            say=self._say_once,
        )
        kind = choose_trainer(self.strategy, self._launch, self._members)
        self._model, self._optimizer = model, optimizer
        self._make_trainer = functools.partial(self._make, kind, options, context, on_nan)
        if self._launch.joins is None:
            check_alike(self._members, model, optimizer, loaders, options)
        self._make_trainer()
        shared = [self._loaders.share(loader, global_batch, balance) for loader in loaders]
        return (model, optimizer, *shared)

    def _make(self, kind: Make, options: Options, context: TrainerContext, on_nan: str) -> None:
        """Make the trainer of the model and its optimizer as they are now."""
        self._trainer = trainer = kind(self._model, self._optimizer, options, context)
        trainer.on_nan, trainer.on_add_param_group = on_nan, self._add_param_group
        self._loaders.attach(trainer)
        self._backward_patch = BackwardPatch(self._stopwatch, trainer)

    def _add_param_group(self, group: dict[str, Any]) -> None:
        """The script adds parameters to the optimizer, as all workers do: train them from now on, too."""
        if isinstance(between_replicas(self.strategy, 1)[0], Policy) and self._started_with > 1:
            raise UsageError(
                f"under '{self.strategy}' the server knows the optimizer's parameters from setup on; add the group "
                "before team.setup, with requires_grad=False until it is to be trained, or use all-reduce"
            )
        trainer = self._training()
        version = trainer.version
        if self._backward_patch is not None:
            self._backward_patch.undo()
        trainer.close()
        type(self._optimizer).add_param_group(self._optimizer, group)
        check(self._model, self._optimizer)
        self._make_trainer()
        trainer = self._training()
        trainer.version = version

    def loader(self, loader: DataLoader[Any], *, global_batch: int | None = None) -> TeamLoader | LeasedLoader:
        """This worker's share of one more loader."""
        check_loader(loader)
        return self._loaders.share(loader, global_batch, balance=False)

    def step(self, accumulate: bool = False, weight: float | torch.Tensor | str | None = None) -> Step:
        """One step of training, as a `with` block.

        A step may be cancelled, if the strategy cancels stragglers: then the rest of the block does not run. So the
        block holds the whole body of the loop, also the lines that log the loss; or the code after it asks
        `with team.step() as step: …` whether `step.cancelled`.

        accumulate: only sum gradients; `optimizer.step()` and `zero_grad()` inside the block do nothing.
        weight: how much this worker's gradient counts, relative to the others': the number of items that its loss is a
            mean over, or "sum" for a loss that is a sum. By default it is read from the loss.
        """
        if self._trainer is not None:
            self._trainer.weight = None if weight is None else item_count(weight)
        return self._accumulating_step if accumulate else self._step

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm of the team's gradient, between backward and step; returns the norm before."""
        if not max_norm > 0:
            raise UsageError(f"max_norm is {max_norm}; it must be above 0")
        return self._training().clip(float(max_norm), float(norm_type))

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Tell the progress line and the run's folder: `team.report(loss=loss, accuracy=…)`."""
        values = {}
        for name, value in metrics.items():
            try:
                values[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"report takes numbers or tensors of one element; {name} is a {type(value).__name__}"
                ) from None
        if self._trainer is not None and "loss" in values:
            self._trainer.report_loss(values["loss"])
        version = self._trainer.version if self._trainer else 0
        self._recorder.add(Metric(self.rank, time.perf_counter(), version, {**values}))

    # -- together ----------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._gather(b"", BarrierKind.BARRIER)

    def mirrored(self, tensor: torch.Tensor, aggregation: str = "mean") -> Mirrored:
        """A value kept equal on all workers, at first the lead's; `assign` combines the workers' values."""
        return Mirrored(tensor, self._gather, aggregation)

    def per_replica(self, value: Any) -> PerReplica:
        """Each worker's own value, with those of all others."""
        return PerReplica(value, self.rank, self._gather)

    def sum(self, value: _Value) -> _Value:
        """The sum of all workers' values, on every worker; all must call it.

        For metrics of training, where each worker has its part of the samples: `team.sum(correct) / team.sum(count)`.
        Workers that share one model have the same samples, and count once. A loader that is evaluated is whole on every
        worker, and needs no sum.
        """
        return self._total(value)[0]

    def mean(self, value: _Value) -> _Value:
        """The mean of all workers' values, on every worker; all must call it. As `sum`, divided by their number."""
        found, count = self._total(value)
        return found / count

    def _total(self, value: _Value) -> tuple[_Value, int]:
        return total(value, self._gather, self._started_with // self._loaders.replicas)

    def _gather(self, payload: bytes, kind: BarrierKind = BarrierKind.GATHER) -> list[bytes]:
        payloads = self._trainer.gather(payload, kind) if self._trainer is not None else None
        return self._members.gather(payload, kind) if payloads is None else payloads

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, for `load`: not None if the team was started again.

        None for a worker that joins a run that has begun.
        """
        return self._checkpoints.newest() if self._launch.joins is None else None

    def save(self, path: str | Path | None = None, **extra: Any) -> Path:
        """Write a checkpoint that plain `torch.load` reads: `model`, `optimizer`, `version` and `extra`.

        The lead writes it. The others need not call it, unless the model is sharded over machines: then each has a part
        of it. Without a path it goes to the run's `checkpoints/`.
        """
        trainer = self._training()
        own, path = path is None, self._checkpoints.path(path, trainer.version)
        content: dict[str, Any] = {}
        if self.is_lead or trainer.lockstep:
            with trainer.frozen():
                content = {
                    **extra,
                    "model": compact(self._model.state_dict()),
                    "optimizer": compact(self._optimizer.state_dict()),
                    "version": trainer.version,
                }
        if self.is_lead:
            write(path, content, private=own)
        return path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load model and optimizer from a checkpoint; all workers call it. Returns the rest of its content.

        Machines that do not have the file get its content from rank 0.
        """
        trainer = self._training()
        content = self._checkpoints.read(Path(path), lead=self.is_lead)
        trainer.load(content.pop("model"), content.pop("optimizer"))
        trainer.version = int(content.pop("version", trainer.version))
        return content

    # -- leaving -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the team; model and optimizer are plain torch again, with the newest values."""
        if self._closed:
            return
        if self._trainer is not None:
            self._trainer.close()
        if self._backward_patch is not None:
            self._backward_patch.undo()
        for module in self._model.modules() if self._trainer is not None else ():
            if isinstance(module, TeamBatchNorm):
                module.exchange = None
        self._leave()

    def _leave(self) -> None:
        """Leave the team; also called when the script ends without `close`."""
        global _joined
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        if self._trainer is not None:
            self._trainer.leave()
        self._recorder.add(Leave(self.rank, time.perf_counter()))
        self._recorder.close()
        self._members.leave()
        if self._trainer is not None:
            self._trainer.wait_until_forwarded()
        if self.is_lead and self._folder is not None and (self._writes_summary or len(self._members.machines) > 1):
            self._members.wait_until_left()
        if self._writes_summary and self.is_lead and self._folder is not None:
            merge(self._folder, self._started_with)
        if _joined is self:
            _joined = None

    def _detach(self) -> None:
        """Lets this process, a fork of a worker, do nothing in the worker's name."""
        self._closed = self._detached = True
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.detach()
        self._members.detach()
        self._recorder.detach()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._trainer is not None:
            self._trainer.abandon()
        self.close()

    def __repr__(self) -> str:
        return f"Team(rank={self.rank}, world_size={self.world_size}, strategy='{self.strategy}')"

    def _exchange_statistics(self, value: torch.Tensor) -> list[torch.Tensor]:
        copied = self._trainer is not None and self._trainer.weightless
        own = b"" if copied else value.numpy().tobytes()
        parts = self._members.gather(own, BarrierKind.STATISTICS)
        each = self.world_size // self._loaders.replicas  # workers of a replica; those with the same part exchange
        parts = parts[self.rank % each :: each]
        return [torch.frombuffer(bytearray(part), dtype=value.dtype) for part in parts if part]

    def _training(self) -> Trainer:
        if self._detached:
            raise UsageError(FORK)
        if self._trainer is None:
            raise UsageError("the team has no model yet; call team.setup(model, optimizer, …) first")
        return self._trainer

    def _say(self, message: str) -> None:
        print(f"paceline: {message}", file=sys.stderr, flush=True)

    def _say_once(self, message: str) -> None:
        if self.is_lead:
            self._say(message)


def _device(local_rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, local_rank % torch.accelerator.device_count())


def _folder(launch: Launch, name: str | None) -> Path | None:
    if launch.folder is not None:
        return Path(launch.folder)
    name = launch.name or name
    return None if name is None else Path("runs") / name
