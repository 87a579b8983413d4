"""An `Accelerator` whose processes are a team: `Accelerator(strategy="async")` instead of Accelerate's own.

Importing this module also lets Accelerate's own `Accelerator` use process groups of Paceline:
`Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="paceline")])`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import data_loader
from accelerate.accelerator import Accelerator as PlainAccelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

from paceline.config import Strategy
from paceline.errors import UsageError
from paceline.integrations.accelerate_backend import register_backend
from paceline.integrations.accelerate_loader import TeamDataLoader
from paceline.integrations.framework_team import FrameworkTeam
from paceline.parameters.joint import compact

register_backend()

_OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
"""Arguments that divide the model in ways of their own."""


class Accelerator(PlainAccelerator):
    """Trains what it prepares with one of Paceline's data-parallel strategies.

    Batches are one process's, and evaluation is divided by Accelerate itself, as in any `Accelerator`.
    """

    framework = "Accelerate"
    step: int
    """Batches of the current epoch, as Accelerate counts them."""

    def __init__(
        self,
        *args: Any,
        strategy: str | Strategy | None = None,
        name: str | None = None,
        on_nan: str = "raise",
        **kwargs: Any,
    ) -> None:
        """strategy, name, on_nan: as for `paceline.join` and `team.setup`; the rest as for Accelerate's own."""
        given = [one for one in _OTHERS if kwargs.get(one) is not None]
        if given:
            raise UsageError(
                f"{given[0]} divides the model by itself; leave it out, or use Accelerate's own Accelerator"
            )
        self.workers = FrameworkTeam(self.framework, strategy, name)
        super().__init__(*args, **kwargs)
        if self.num_processes != self.workers.size:
            raise UsageError(
                f"the team has {self.workers.size} workers and Accelerate {self.num_processes} processes; make this "
                "Accelerator before anything else of Accelerate"
            )
        if self.split_batches or self.dispatch_batches:
            raise UsageError("split_batches and dispatch_batches are not supported: the team divides the batches")
        self._on_nan = on_nan
        self._modules: list[torch.nn.Module] = []
        """Models that were prepared for training."""
        self._trained: list[torch.nn.Module] = []
        """Models that the team trains."""
        self._group_start = 0
        """The value of `step` before the first batch of the current gradient."""

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        result = super().prepare(*args, device_placement=device_placement)
        self._set_up()
        return result

    def _set_up(self) -> None:
        """Let the team train the models that optimizers were prepared for, once there are any."""
        optimizers = [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in self._optimizers]
        held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        models = [one for one in self._modules if any(id(p) in held for p in one.parameters())]
        if not held or not models or [*map(id, models)] == [*map(id, self._trained)]:
            return
        self._trained = models
        one = len(models) == len(optimizers) == 1
        self.workers.team.setup(models[0] if one else models, optimizers[0] if one else optimizers, on_nan=self._on_nan)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        # In evaluation mode Accelerate does the same but for the wrapping, which the team replaces.
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if not evaluation_mode and not any(one is model for one in self._modules):
            self._modules.append(model)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if getattr(data_loader, "_is_accelerate_prepared", False) or not isinstance(data_loader, DataLoader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

        def native() -> Any:
            made = PlainAccelerator.prepare_data_loader(self, data_loader, device_placement, slice_fn_for_dispatch)
            self._dataloaders.remove(made)
            return made

        placed = self.device_placement if device_placement is None else device_placement
        prepared = TeamDataLoader(
            data_loader,
            self.workers,
            lambda: self._evaluates,
            native,
            device=self.device if placed else None,
            seedable=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
        )
        self._dataloaders.append(prepared)
        return prepared

    @property
    def _evaluates(self) -> bool:
        """True if the script does not train now."""
        trains = any(model.training for model in self._trained)
        return not (trains and torch.is_grad_enabled())

    # -- the loop ----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.workers.team.report(loss=loss)
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As Accelerate's own; a step that the strategy cancels ends the block, and has not happened."""
        if self.step % self.gradient_state.num_steps == 0:
            self._group_start = self.step
        with self.workers.team.step() as step, super().accumulate(*models):
            yield
        if step.cancelled:
            self.step = self._group_start

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the team's gradient; Accelerate's own looks at each one first, for tensors that are distributed."""
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    # -- collectives -------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        self.workers.check_outside("a gather")
        return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        self.workers.check_outside("a reduction")
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self.workers.check_outside("padding")
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        self.workers.check_outside("a barrier")
        super().wait_for_everyone()

    # -- state -------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        # Of tensors that share memory, as the team's parameters do, safetensors would write one.
        return unshared(super().get_state_dict(model, unwrap))

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        if len(self._trained) > 1 and self.workers.unequal:
            raise UsageError(f"under '{self.workers.team.strategy}' the states of several models cannot be loaded")
        with _unshared(self._trained):
            super().load_state(*args, **kwargs)
        if len(self._trained) == 1:
            optimizer = compact(self._optimizers[0].optimizer.state_dict())
            self.workers.access.restore(compact(self._trained[0].state_dict()), optimizer)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        return skip_first_batches(dataloader, num_batches)


def unshared(state: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors that own just their own memory; tensors that are one, as tied weights are, stay one."""
    copies: dict[Any, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        return copies.setdefault(place, value.detach().clone()) if value.numel() else value.clone()

    return {name: copy(value) for name, value in state.items()}


@contextlib.contextmanager
def _unshared(models: list[torch.nn.Module]) -> Iterator[None]:
    """While entered, state dicts of these models have tensors with memory of their own, as safetensors wants them."""

    def copy(_module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state.update(unshared({name: value for name, value in state.items() if name.startswith(prefix)}))

    hooks = [model.register_state_dict_post_hook(copy) for model in models]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_plain_skip = data_loader.skip_first_batches


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """As Accelerate's own, which would divide a loader of the team a second time, or not at all."""
    if isinstance(dataloader, TeamDataLoader):
        return dataloader.skipping(num_batches)
    return _plain_skip(dataloader, num_batches)


for _module in ("accelerate", "accelerate.data_loader", "accelerate.accelerator", "transformers.trainer"):
    if getattr(sys.modules.get(_module), "skip_first_batches", None) is _plain_skip:
        sys.modules[_module].skip_first_batches = skip_first_batches  # type: ignore[attr-defined]
