"""`Trainer(strategy=PacelineStrategy("k-sync:k=3"), devices=4)`: a Lightning Trainer whose workers are a team."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from paceline.config import Strategy
from paceline.errors import UsageError
from paceline.integrations.lightning_loop import check_leases, follow_leases, follow_length
from paceline.integrations.lightning_processes import TeamProcesses
from paceline.parameters.joint import compact


class PacelineStrategy(TeamProcesses, ParallelStrategy):
    """Trains with one of Paceline's data-parallel strategies: all-reduce, or a policy of the parameter server.

    The batch size of a train loader is one worker's, as under DDP. Other loaders are evaluated whole by every worker.
    """

    strategy_name = "paceline"
    launchers = (_SubprocessScriptLauncher, _MultiProcessingLauncher)

    def __init__(self, strategy: str | Strategy | None = None, **options: Any) -> None:
        """As of `TeamProcesses`: strategy, name, on_nan, start_method, and Lightning's plugins."""
        super().__init__(strategy, **options)
        self._in_step = self._said_own = self._said_unsynced = False
        self._metrics: list[tuple[Metric, Any, Any]] = []
        """Metrics that combine the workers' states, and how they did so before."""

    @property
    def is_distributed(self) -> bool:
        """True if values that are logged with sync_dist are combined."""
        return bool(self.world_size > 1)

    # -- model and optimizer -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # the team divides loaders
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            _optimizers_to_device(self.optimizers, self.root_device)
            self._set_up_team(trainer)
        elif self.workers.size > 1:
            self.workers.mirror(self.lightning_module)
        self.setup_precision_plugin()

    def _set_up_team(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if not self.optimizers:
            return
        if self.workers.unequal:
            check_leases(trainer, self.workers)
        options = {"on_nan": self._on_nan, "sync_batch_norm": self._layer_sync is not None}
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.workers.team.setup(module, optimizers, **options)  # type: ignore[arg-type]
        self._divide_metrics(module)
        if self.workers.unequal:
            follow_leases(trainer, self.workers)

    def _divide_metrics(self, module: LightningModule) -> None:
        """Let torchmetrics combine the workers' states in training, where each has its part of the samples."""
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._metrics.append((metric, metric.distributed_available_fn, metric.dist_sync_fn))
                metric.distributed_available_fn = lambda: self._trains
                metric.dist_sync_fn = lambda tensor, group=None: self.workers.gather(tensor, same=False)

    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            follow_length(module._trainer)
        for metric, available, synchronise in self._metrics:
            metric.distributed_available_fn, metric.dist_sync_fn = available, synchronise
        self._metrics.clear()
        super().teardown()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Nothing is exchanged before the optimizer's step."""
        yield

    # -- the loop ----------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            if self.workers.size == 1:
                return dataloader
            raise UsageError(
                f"the training data is a {type(dataloader).__name__}, which cannot be divided among workers; give the "
                "Trainer a torch.utils.data.DataLoader"
            )
        return self.workers.loader(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_step = True
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._in_step = False
        self._say_unsynced()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, torch.Tensor):
            self.workers.team.report(loss=loss)
        return output

    def _say_unsynced(self) -> None:
        """Say once that a value of an epoch is one of this worker's part, as Lightning does in its own strategies."""
        if self._said_unsynced or self.workers.size == 1:
            return
        assert self.lightning_module is not None
        results = self.lightning_module.trainer.fit_loop.epoch_loop._results
        for one in results.values():
            if one.is_tensor and one.meta.on_epoch and not one.meta.sync.should:
                self._said_unsynced = True
                self.workers.access.say(
                    f"self.log({one.meta.name!r}) tells the epoch's value of each worker's own samples; "
                    "self.log(..., sync_dist=True) tells that of all"
                )
                return

    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        found = {} if trainer.sanity_checking else trainer.callback_metrics
        if found and self.is_global_zero:
            self.workers.team.report(**found)

    @property
    def _trains(self) -> bool:
        """True if the workers have different samples now; each evaluates all samples of a loader."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return self.workers.size > 1 and trainer is not None and trainer.training

    # -- collectives -------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or not self._trains:
            return tensor
        if self.workers.inside:
            if not self._said_own:
                self._said_own = True
                self.workers.access.say(
                    f"under '{self.workers.team.strategy}' workers are at different steps, so that values which are "
                    "logged with sync_dist at every step are each worker's own; those of an epoch are the team's"
                )
            return tensor
        return self.workers.reduce(tensor, reduce_op, by_samples=self._in_step)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if not self._trains:
            return tensor.unsqueeze(0)
        return self._stacked(tensor, sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().lightning_module_state_dict()
        return compact(state) if self.is_global_zero else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return compact(state) if self.is_global_zero else state

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.barrier("load_optimizer_state_dict")
