"""Lightning's training epoch where each worker takes samples as it needs them.

Lightning knows in advance how many batches an epoch has, and that all workers have equally many. Under a policy of the
parameter server a fast worker takes more than a slow one, and a step may be cancelled. So here an epoch ends when there
are no samples left, a cancelled step has not happened, and validation follows once all workers have ended the epoch.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from paceline.errors import UsageError
from paceline.integrations.framework_team import FrameworkTeam
from paceline.integrations.lightning_logged import LoggedValues, share_names
from paceline.policies import Async


def check_leases(trainer: Trainer, workers: FrameworkTeam) -> None:
    """Refuse options of the Trainer that need all workers to be at the same step."""
    if trainer.val_check_interval != 1.0 or trainer._val_check_time_interval is not None:
        raise UsageError(
            f"under '{workers.team.strategy}' workers take different numbers of steps, so that they can validate at "
            "the end of an epoch only; leave val_check_interval out"
        )
    if trainer.accumulate_grad_batches > 1 and not isinstance(workers.policy, Async):
        raise UsageError(
            f"under '{workers.team.strategy}' batches that are accumulated could not be used at the end of an epoch; "
            "give the loader a larger batch_size instead of accumulate_grad_batches, or use all-reduce, sync or async"
        )


def follow_leases(trainer: Trainer, workers: FrameworkTeam) -> None:
    """Let the Trainer's epochs end when the team has no samples left, until `follow_length`."""
    loop = trainer.fit_loop.epoch_loop
    loop.__class__ = _LeasedEpochLoop  # its state, which callbacks and checkpoints refer to, stays where it is
    assert isinstance(loop, _LeasedEpochLoop)
    loop.workers = workers


def follow_length(trainer: Trainer) -> None:
    """Undo `follow_leases`."""
    trainer.fit_loop.epoch_loop.__class__ = _TrainingEpochLoop


class _LeasedEpochLoop(_TrainingEpochLoop):
    """An epoch of one worker, which ends when the team has no samples left."""

    workers: FrameworkTeam
    _ending = False
    """True while the epoch is brought to its end: all batches are trained on."""
    _before: _Counters | None = None
    """The counters before the first batch of the current gradient."""

    def run(self, data_fetcher: _DataFetcher) -> None:
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher) or len(data_fetcher.combined_loader.flattened) > 1:
            raise UsageError(
                f"under '{self.workers.team.strategy}' a worker takes one batch of one loader at a time; use "
                "all-reduce for several train loaders, or for a training_step that takes dataloader_iter"
            )
        super().run(data_fetcher)
        self.workers.leave_epoch()
        share_names(self._results, self.workers, self.trainer.lightning_module)
        self._ending = self.workers.decide(data_fetcher.done or self.trainer.should_stop, by_all=False)
        try:
            self._flush(data_fetcher)
            self._agree()
            if self._ending:
                self._end(data_fetcher)
        finally:
            self._ending, self._before = False, None

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        if self.trainer.limit_train_batches == 1.0:
            data_fetcher.length = None  # how many batches this worker will have is not known

    def advance(self, data_fetcher: _DataFetcher) -> None:
        while True:
            if self._before is None:
                self._before = _Counters(self)
            with self.workers.team.step() as step:
                super().advance(data_fetcher)
            if not step.cancelled:
                break
            self._before.restore(self)
        if not self._should_accumulate():
            self._before = None

    def _flush(self, data_fetcher: _DataFetcher) -> None:
        """Make the update of a gradient that is summed over fewer batches than accumulate_grad_batches."""
        pending = data_fetcher.done and self.batch_progress.current.ready and self._should_accumulate()
        self.batch_progress.is_last_batch = self._ending
        if pending:
            self.automatic_optimization._optimizer_step(self.batch_idx, lambda: None)
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self.trainer.accumulate_grad_batches > 1:
            self.workers.catch_up()

    def _agree(self) -> None:
        """Let all workers have the number of steps of the fastest: callbacks decide by it, and must decide alike."""
        stops, steps = zip(*self.workers.all_of((self.trainer.should_stop, self.global_step)), strict=True)
        self.trainer.should_stop = any(stops)
        more = max(steps) - self.global_step
        if self.trainer.lightning_module.automatic_optimization:
            self.automatic_optimization.optim_progress.optimizer.step.total.increment_by(more)
        else:
            self.manual_optimization.optim_step_progress.total.increment_by(more)

    def _end(self, data_fetcher: _DataFetcher) -> None:
        """What Lightning does around the last batch of an epoch, which it would know beforehand."""
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._batches_that_stepped -= 1
        self.on_advance_end(data_fetcher)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if self._ending and interval == "step" and update_plateau_schedulers:
            return  # the last batch has had its step
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _num_ready_batches_reached(self) -> bool:
        return bool(self.batch_progress.is_last_batch)

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        return bool((self._ending or self.restarting) and self._should_check_val_epoch())


class _Counters:
    """What a training step changes in the Trainer: its counters, and values that were logged."""

    def __init__(self, loop: _TrainingEpochLoop) -> None:
        self._states = [(one, one.state_dict()) for one in _progress_of(loop)]
        module = loop.trainer.lightning_module
        self._hook, self._dataloader = module._current_fx_name, loop.trainer.fit_loop._data_fetcher
        self._fetched = 0 if self._dataloader is None else self._dataloader.fetched
        self._logged = LoggedValues(loop._results)

    def restore(self, loop: _TrainingEpochLoop) -> None:
        for one, state in self._states:
            one.load_state_dict(state)
        loop.trainer.lightning_module._current_fx_name = self._hook
        if self._dataloader is not None:
            self._dataloader.fetched = self._fetched
        self._logged.restore(loop._results)


def _progress_of(loop: _TrainingEpochLoop) -> list[Any]:
    manual = loop.manual_optimization.optim_step_progress
    return [loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress, manual]
