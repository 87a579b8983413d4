"""The Hugging Face Trainer whose processes are a team: `from paceline.integrations.transformers import Trainer`.

Under `paceline run` scripts need not even that: `paceline.integrations.import_hook` replaces the class.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import trainer as plain
from transformers.trainer import Trainer as PlainTrainer

from paceline.config import Strategy
from paceline.errors import UsageError
from paceline.integrations.accelerate import Accelerator, skip_first_batches
from paceline.parameters.loss_weight import Batch, Kind, loss_weight

plain.skip_first_batches = skip_first_batches


class _TrainerAccelerator(Accelerator):
    framework = "the Hugging Face Trainer"


class TeamTrainer(PlainTrainer):
    """A Trainer with one of Paceline's data-parallel strategies; all else is Hugging Face's."""

    _team_strategy: str | Strategy | None = None
    current_flos: float

    def __init__(self, *args: Any, strategy: str | Strategy | None = None, **kwargs: Any) -> None:
        """strategy: as for `paceline.join`; the one of `paceline run --strategy` wins."""
        self._team_strategy, self._said_own = strategy, False
        self._divides: bool | None = None
        """True if the model's loss is divided by the number of items that it is given; None if that is not known."""
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        accelerator = functools.partial(_TrainerAccelerator, strategy=self._team_strategy)
        with _replaced("Accelerator", accelerator):
            super().create_accelerator_and_postprocess()
        workers = self.accelerator.workers
        if self.args.auto_find_batch_size and workers.size > 1:
            raise UsageError("auto_find_batch_size trains again from the start, which a team cannot; give a batch size")
        if not workers.unequal:
            return
        name = workers.team.strategy
        if workers.policy.cancels:
            raise UsageError(
                f"'{name}' cancels steps, which the loop of the Hugging Face Trainer cannot leave; use async, "
                "k-async, ssp or all-reduce, or Lightning or Accelerate"
            )
        if self.args.eval_strategy == "steps":
            raise UsageError(
                f"under '{name}' workers take different numbers of steps, so that they can evaluate at the end of an "
                "epoch only; write eval_strategy='epoch'"
            )
        if self.args.save_strategy == "steps" and self.args.metric_for_best_model is not None:
            raise UsageError(
                f"under '{name}' workers take different numbers of steps, so that they cannot agree on the best model "
                "inside an epoch; write save_strategy='epoch'"
            )
        # Each worker's loss is a mean over its own tokens then, and so is its update.
        self.args.average_tokens_across_devices = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's, which multiplies the loss by the number of processes if its model takes a number of items.

        That undoes a division by the items of all processes. Many models take the number, and do not divide by it.
        """
        items = kwargs.get("num_items_in_batch")
        scale = self.accelerator.num_processes
        if items is None or scale == 1 or not self.args.average_tokens_across_devices or not self._takes_items:
            return super().compute_loss(model, inputs, *args, **kwargs)
        if self._divides is None and not torch.is_grad_enabled():  # only a graph shows it
            with torch.enable_grad():
                self._look_at(super().compute_loss(model, {**inputs}, *args, **kwargs), float(items))
        if self._ignores_items:
            return self._unscaled_loss(model, inputs, *args, **kwargs)
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled():
            self._look_at(result, float(items))
        if not self._ignores_items:
            return result
        return (result[0] / scale, *result[1:]) if isinstance(result, tuple) else result / scale

    def _unscaled_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.args.average_tokens_across_devices = False
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = True

    @property
    def _ignores_items(self) -> bool:
        return self._divides is False

    @property
    def _takes_items(self) -> bool:
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func)

    def _look_at(self, result: Any, items: float) -> None:
        """Learns from a loss whether it was divided by the items of all processes."""
        found = loss_weight(result[0] if isinstance(result, tuple) else result, Batch(0, set()))
        self._divides = found.kind is not Kind.MEAN or found.items == items

    def _run_epoch(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.train()  # Hugging Face does so after it has taken the first batch, by which a loader knows that it trains
        return super()._run_epoch(model, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        workers = self.accelerator.workers
        if not workers.unequal:
            super()._maybe_log_save_evaluate(*args, **kwargs)
            return
        if not self._said_own and self.control.should_log:
            self._said_own = True
            workers.access.say(
                f"under '{workers.team.strategy}' workers are at different steps, so that the loss that is logged is "
                "the lead's own"
            )
        with _replaced("nested_gather", lambda tensor, *_: tensor):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def store_flos(self) -> None:
        if not self.accelerator.workers.unequal:
            super().store_flos()
            return
        self.state.total_flos += self.current_flos  # this worker's own: the sum of all would wait for them
        self.current_flos = 0

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # there are none, and to look at every gradient would have the team exchange them

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self.args.should_save:
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)


Trainer = TeamTrainer


@contextlib.contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    """Gives a name of Hugging Face's module another value until the context exits."""
    before = getattr(plain, name)
    setattr(plain, name, value)
    try:
        yield
    finally:
        setattr(plain, name, before)
