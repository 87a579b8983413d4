"""`Fabric(strategy=FabricStrategy("async"), devices=4)`: Lightning Fabric whose processes are a team."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from paceline.config import Strategy
from paceline.data.loader import with_batches_from
from paceline.data.loader_attributes import LoaderAttributes
from paceline.data.shares import check_suffices, has_batch_sampler, rounds_of
from paceline.data.split import divided
from paceline.errors import UsageError
from paceline.integrations.framework_team import FrameworkTeam
from paceline.integrations.lightning_processes import TeamProcesses
from paceline.parameters.joint import compact
from paceline.team.step import Step


class FabricStrategy(TeamProcesses, ParallelStrategy):
    """Trains what Fabric sets up with one of Paceline's data-parallel strategies.

    The batch size of a loader is one worker's. Training and evaluation are divided among the workers, without repeated
    samples, so that `fabric.all_reduce` combines their values.
    """

    launchers = (_SubprocessScriptLauncher, _MultiProcessingLauncher)

    def __init__(self, strategy: str | Strategy | None = None, **options: Any) -> None:
        """As of `TeamProcesses`: strategy, name, on_nan, start_method, and Fabric's plugins."""
        super().__init__(strategy, **options)
        self._backward_sync_control = _NothingToBlock()
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._trained: list[torch.nn.Module] = []
        """Models that the team trains."""
        self._first_calls: list[RemovableHandle] = []

    _set_world_ranks = TeamProcesses.set_world_ranks

    @property
    def distributed_sampler_kwargs(self) -> None:
        """The team divides loaders by itself."""
        return

    # -- preparing ---------------------------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        self._first_calls += [one.register_forward_pre_hook(self._on_first_call) for one in module.modules()]
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(optimizer)
        if self._trained:
            raise UsageError("set up all models and optimizers before the first of the models is called")
        return optimizer

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any]:
        return self.setup_module(module), [self.setup_optimizer(one) for one in optimizers], scheduler

    def _on_first_call(self, _module: torch.nn.Module, _inputs: Any) -> None:
        self._set_up()

    def _set_up(self) -> None:
        """Let the team train the models that there are optimizers for.

        Fabric sets up one model after the other, and a team all at once: when the first is called, or an epoch begins.
        """
        if self._trained or not self._optimizers:
            return
        held = {
            id(parameter) for one in self._optimizers for group in one.param_groups for parameter in group["params"]
        }
        models = [one for one in self._modules if any(id(parameter) in held for parameter in one.parameters())]
        if not models:
            raise UsageError("the optimizers hold parameters of no model; fabric.setup takes the model, too")
        self._trained, optimizers = models, self._optimizers
        while self._first_calls:
            self._first_calls.pop().remove()
        one = len(models) == len(optimizers) == 1
        self.workers.team.setup(models[0] if one else models, optimizers[0] if one else optimizers, on_nan=self._on_nan)

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        return FabricLoader(dataloader, self.workers, self._evaluates)

    def _evaluates(self) -> bool:
        """True if the script does not train in the epoch that begins now."""
        self._set_up()
        return not (torch.is_grad_enabled() and any(module.training for module in self._trained))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """`with fabric.strategy.step():` is a block that strategies which cancel stragglers can leave in its middle."""
        return self.workers.team.step()

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        if not self._trained:
            raise UsageError(
                "backward needs a model and its optimizer; hand both to fabric.setup before the model's call"
            )
        if tensor.numel() == 1:
            self.workers.team.report(loss=tensor)
        super().backward(tensor, module, *args, **kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or self.workers.size == 1:
            return tensor
        return self.workers.reduce(tensor, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return self._stacked(tensor, sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = compact(super().get_module_state_dict(module))
        return state

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = compact(super().get_optimizer_state(optimizer))
        return state

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, state_dict, strict)
        if [module] == self._trained and len(self._optimizers) == 1:
            optimizer = compact(self._optimizers[0].state_dict())
            self.workers.access.restore(compact(module.state_dict()), optimizer)


class _NothingToBlock(_BackwardSyncControl):
    """Nothing is exchanged before the optimizer's step."""

    def no_backward_sync(self, module: Any, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class FabricLoader(LoaderAttributes):
    """A loader whose batch is one worker's, divided by the team in training, and evenly in evaluation."""

    def __init__(self, loader: DataLoader[Any], workers: FrameworkTeam, evaluates: Callable[[], bool]) -> None:
        self._loader, self._workers, self._evaluates = loader, workers, evaluates
        self._training = workers.loader(loader)

    def __len__(self) -> int:
        return len(self._training)

    def __iter__(self) -> Iterator[Any]:
        if not self._evaluates():
            yield from self._training
            return
        self._workers.begin_evaluation()
        loader, batches = self._loader, self._batches()
        yield from with_batches_from(loader, _Batches(batches), workers=loader.num_workers)

    def _batches(self) -> list[Any]:
        """This worker's batches of an epoch of evaluation; all have equally many, unless batches are the script's."""
        workers, custom = self._workers, has_batch_sampler(self._loader)
        order = list(self._loader.batch_sampler or ()) if custom else list(self._loader.sampler)
        order = workers.broadcast(order) if workers.size > 1 else order
        rank = workers.team.rank
        if custom:
            return order[rank :: workers.size]
        if self._loader.batch_sampler is None:
            return [[key] for key in order[rank :: workers.size]]
        check_suffices(len(order), workers.size)
        each = int(self._loader.batch_size or 1) * workers.size
        rounds = rounds_of(self._loader, each, workers.size, per_worker=True)
        ends = [*range(each, each * rounds, each), None if not self._loader.drop_last else each * rounds]
        starts = range(0, each * rounds, each)
        return [divided(order[start:end], workers.size)[rank] for start, end in zip(starts, ends[:rounds], strict=True)]


class _Batches:
    """A batch sampler of these batches."""

    def __init__(self, batches: list[Any]) -> None:
        self._list = batches

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list)
