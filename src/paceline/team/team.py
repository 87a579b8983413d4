"""`Team`: all that a training script uses, in one file since it is one class."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.preemption import was_told
from paceline.config import AllReduce, Launch, Place, Strategy, Timeouts, parse_strategy
from paceline.config.example_inputs import example_inputs as parse_inputs
from paceline.data.loader import batch_growth, check_loader, users_own
from paceline.data.user_loader import UserLoader
from paceline.errors import FORK, UsageError
from paceline.events import Metric
from paceline.parameters.joint import as_one_model, as_one_optimizer, compact, models_of, parts_of
from paceline.parameters.variables import Mirrored, PerReplica, total
from paceline.strategies import Options, Trainer
from paceline.team import current
from paceline.team.checkpoints import Checkpoints, write
from paceline.team.setup_checks import check_setup, check_steps, give_values
from paceline.team.step import Step, item_count
from paceline.team.team_logging import setup_event
from paceline.team.training import Training
from paceline.team.worker import Worker
from paceline.transport import BarrierKind

_Value = TypeVar("_Value", float, torch.Tensor)
ANOTHER_RUN = "a run for each with paceline run or paceline.launch"


class Team:
    """The workers of one run, seen from one of them."""

    def __init__(
        self,
        place: Place,
        launch: Launch,
        strategy: str | Strategy | None,
        name: str | None,
        timeouts: Timeouts | None,
        loggers: str | Sequence[str] = (),
    ) -> None:
        self.rank, self.local_rank = place.rank, place.local_rank
        self.strategy = parse_strategy(launch.strategy or strategy or AllReduce())
        self._worker = Worker(place, launch, self.strategy, name, timeouts, loggers)
        self.device, self._members, self._recorder = self._worker.device, self._worker.members, self._worker.recorder
        self._checkpoints = Checkpoints(self._members, self._worker.folder)
        self._training = Training(self._worker)
        self._step, self._accumulating_step = Step(self._training, False), Step(self._training, True)
        self._closed = False
        self._alone = place.world_size == 1 and launch == Launch()
        """True if no launcher has started this process."""
        self._options = (name, timeouts, loggers)
        self._joined_again: tuple[str | Strategy | None, str | None, Timeouts | None, str | Sequence[str]] | None = None
        """Arguments of a `join` since the last `setup`."""
        atexit.register(self._leave)

    @property
    def world_size(self) -> int:
        """The number of workers; with a parameter server it may change."""
        now = self._trainer.present if self._trainer is not None else None
        return self._worker.size if now is None else now

    @property
    def is_lead(self) -> bool:
        """True if this worker prints and saves: rank 0, or in an elastic all-reduce the lowest that is left."""
        return self.rank == self.lead

    @property
    def lead(self) -> int:
        """The rank of the worker that prints and saves."""
        return self._training.lead

    @property
    def _trainer(self) -> Trainer | None:
        return self._training.trainer

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *loaders: DataLoader[Any],
        global_batch: int | None = None,
        balance: bool = False,
        gradients: str = "local",
        sync_batch_norm: bool = False,
        scale_lr: str | None = None,
        warmup: int = 0,
        loss: Callable[..., Any] | None = None,
        on_nan: str = "raise",
        steps_per_epoch: int | None = None,
        example_inputs: Any = None,
        init: Callable[[torch.nn.Module], object] | str | Path | None = None,
    ) -> tuple[Any, ...]:
        """Put the team behind a model, its optimizer and its loaders; returns them, to be used as before.

        A GAN's two models, an actor and a critic, an encoder with an optimizer of its own:
        `(G, D), (og, od), loader = team.setup([G, D], [og, od], loader)`. Each optimizer steps when the script says so.

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
        steps_per_epoch: steps of all workers together after which an epoch of a loader without a length ends; the next
            epoch goes on from there.
        example_inputs: a tensor, a tuple or a dict of the model's arguments, by which layers are split over workers; by
            default the loader's first batch, and without a loader the model's first call.
        loss: the loss function, from which a split of the model is planned; the loop calls it as before.
        init: for a model made under `torch.device("meta")`: a function that initialises what a module has itself, or a
            checkpoint; by default the modules' own `reset_parameters`.
        """
        if self._training.detached:
            raise UsageError(FORK)
        if self._training.begun and self._alone and self._joined_again is not None:
            self._begin_anew(*self._joined_again)
        if self._training.begun:
            raise UsageError(
                "setup was called before; several models go into one call, as setup([a, b], [of_a, of_b], …). "
                + ("Call paceline.join() again to begin anew" if self._alone else f"Start {ANOTHER_RUN}")
            )
        loaders = tuple(map(users_own, loaders))
        one_model, one_optimizer = not isinstance(model, Sequence), not isinstance(optimizer, Sequence)
        model, optimizer = as_one_model(model), as_one_optimizer(optimizer)
        check_setup(self.strategy, model, optimizer, loaders, loss, on_nan, sync_batch_norm, steps_per_epoch)
        model = self._training.share_batch_norm(model, synchronised=sync_batch_norm)
        growth, inputs = batch_growth(loaders, global_batch), parse_inputs(example_inputs)
        meta = give_values(model, init, self.strategy, self._members)
        options = Options(gradients, scale_lr, warmup, growth, loss, loaders, inputs, meta)
        self._training.begin(model, optimizer, options, on_nan)
        if self.rank == 0:
            self._recorder.add(setup_event(model, optimizer, loaders, global_batch, self.world_size))
        self._joined_again = None
        sharing: dict[str, Any] = {"global_batch": global_batch, "balance": balance, "steps": steps_per_epoch}
        shared = [self._training.loaders.share(loader, **sharing) for loader in loaders]
        models = model if one_model else tuple(models_of(model))
        return (models, optimizer if one_optimizer else parts_of(optimizer), *shared)

    def _begin_anew(
        self, strategy: str | Strategy | None, name: str | None, timeouts: Timeouts | None, loggers: str | Sequence[str]
    ) -> None:
        """Leave this team of one, whose model is plain torch again, and join a new one."""
        before = self._options
        self.close()
        more = (name or before[0], timeouts or before[1], loggers or before[2])
        Team.__init__(self, Place.from_environment(), Launch(), strategy or self.strategy, *more)
        current.enter(self)

    def loader(
        self,
        loader: DataLoader[Any],
        *,
        global_batch: int | None = None,
        per_worker: bool = False,
        steps_per_epoch: int | None = None,
    ) -> UserLoader:
        """This worker's share of one more loader.

        per_worker: the loader's batch is one worker's, as under DistributedDataParallel. Where batches are divided, all
            workers then take equally many of an epoch; a last rest of fewer samples than workers joins the one before.
        steps_per_epoch: as of `setup`.
        """
        loader = users_own(loader)
        check_loader(loader)
        check_steps(steps_per_epoch, [loader])
        return self._training.loaders.share(
            loader, global_batch=global_batch, per_worker=per_worker, steps=steps_per_epoch
        )

    def step(self, accumulate: bool = False, weight: float | torch.Tensor | str | None = None) -> Step:
        """One step of training, as a `with` block.

        A step may be cancelled, if the strategy cancels stragglers: then the rest of the block does not run. So the
        block holds the whole body of the loop, also the lines that log the loss; or the code after it asks
        `with team.step() as step: …` whether `step.cancelled`.

        accumulate: only sum gradients; `optimizer.step()` and `zero_grad()` inside the block do nothing.
        weight: how much this worker's gradient counts, relative to the others': the number of items that its loss is a
            mean over, or "sum" for a loss that is a sum. By default it is read from the loss.
        """
        self._training.set_weight(None if weight is None else item_count(weight))
        return self._accumulating_step if accumulate else self._step

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm of the team's gradient, between backward and step; returns the norm before."""
        if not max_norm > 0:
            raise UsageError(f"max_norm is {max_norm}; it must be above 0")
        trainer = self._training.current()
        if len(parts_of(self._training.optimizer)) > 1:
            raise UsageError(
                "the team has several optimizers; clip the gradient of each with "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), …), which is the team's gradient, too"
            )
        return trainer.clip(float(max_norm), float(norm_type))

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
        self._training.gather(b"", BarrierKind.BARRIER)

    def mirrored(self, tensor: torch.Tensor, aggregation: str = "mean") -> Mirrored:
        """A value kept equal on all workers, at first the lead's; `assign` combines the workers' values."""
        return Mirrored(tensor, self._training.gather, aggregation)

    def per_replica(self, value: Any) -> PerReplica:
        """Each worker's own value, with those of all others."""
        return PerReplica(value, self.rank, self._training.gather)

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
        return total(value, self._training.gather, self._training.workers_per_replica)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, for `load`: not None if the team was started again.

        None for a worker that joins a run that has begun, and in a run that goes on from a snapshot.
        """
        goes_on = self._worker.launch.joins is not None or self._worker.launch.resume is not None
        return None if goes_on else self._checkpoints.newest()

    def save(self, path: str | Path | None = None, *, block: bool = True, **extra: Any) -> Path:
        """Write a checkpoint that plain `torch.load` reads: `model`, `optimizer`, `version` and `extra`.

        The lead writes it. The others need not call it, unless the model is sharded over machines: then each has a part
        of it. Without a path it goes to the run's `checkpoints/`.

        block: with False the training goes on at once; the checkpoint is of the next version, and is written in the
            background.
        """
        trainer = self._training.current()
        own, path = path is None, self._checkpoints.path(path, trainer.version)
        if not block and self._training.snapshots.possible:
            self._training.snapshots.request(path, extra)
            return path
        streamed = self._training.streamed_state() if self.is_lead else None
        if streamed is not None:
            write(path, {**extra, **streamed}, private=own, streamed=True)
            return path
        content = {**extra, **self._training.state()} if self.is_lead or trainer.lockstep else {}
        if self.is_lead:
            write(path, content, private=own)
        return path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load model and optimizer from a checkpoint; all workers call it. Returns the rest of its content.

        Machines that do not have the file get its content from rank 0.
        """
        trainer = self._training.current()
        if self._training.resuming is not None:
            self._training.resuming.call_off()
            self._training.resuming = None
        content = self._checkpoints.read(Path(path), lead=self.is_lead, mapped=trainer.maps)
        trainer.load(content.pop("model"), content.pop("optimizer"))
        trainer.version = int(content.pop("version", trainer.version))
        return compact(content) if trainer.maps else content

    # -- leaving -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the team; model and optimizer are plain torch again, with the newest values."""
        if self._closed:
            return
        self._finish_snapshots()
        self._training.close()
        self._leave()

    def _finish_snapshots(self) -> None:
        for path, extra in self._training.snapshots.finish():
            if self.is_lead and not self._training.current().lockstep:
                self.save(path, **extra)  # no update has come after it was asked for

    def _leave(self) -> None:
        """Leave the team; also called when the script ends without `close`."""
        if self._closed:
            return
        if getattr(sys, "last_value", None) is not None:
            self._training.snapshots.abandon()
        self._finish_snapshots()
        self._closed = True
        atexit.unregister(self._leave)
        if was_told():
            self._worker.say_preempted(holds=self._trainer is not None and self._trainer.holds_server)
        if self._trainer is not None:
            self._trainer.leave()
        self._worker.leave()
        if self._trainer is not None:
            self._trainer.wait_until_forwarded()
        self._worker.finish(lead=self.is_lead)
        current.leave(self, several=self._worker.size > 1)

    def _detach(self) -> None:
        """Lets this process, a fork of a worker, do nothing in the worker's name."""
        self._closed = True
        self._training.detach()
        self._worker.detach()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._trainer is not None:
            self._trainer.abandon()
            self._training.snapshots.abandon()
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("a team cannot be copied to another process; call paceline.join() there")

    def __repr__(self) -> str:
        return f"Team(rank={self.rank}, world_size={self.world_size}, strategy='{self.strategy}')"
