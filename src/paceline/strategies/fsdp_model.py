"""A model and its optimizer whose parameters, gradients and state are sharded over all workers, by FSDP2.

Each worker has some rows of every parameter, and of what the optimizer keeps about it. FSDP2 gathers a block of the
model when it is called and lets go of it afterwards, forward and backward, and scatters the sum of its gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from paceline.collectives.world_group import WorldGroup
from paceline.parameters.layer_outputs import marked
from paceline.strategies.blocks import blocks
from paceline.strategies.model_copies import refuse_copies


class _Memory:
    """Allocates the buffers of exchanges, each time anew."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Memory, AllGather):
    def __init__(self, everybody: WorldGroup) -> None:
        self._everybody = everybody

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._everybody.all_gather(output_tensor, input_tensor)


class _Scatter(_Memory, ReduceScatter):
    """Sums gradients, each by the weight of the samples that it is of."""

    def __init__(self, everybody: WorldGroup, weight: Callable[[], float]) -> None:
        self._everybody, self._weight = everybody, weight

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        weight = self._weight()
        if weight:
            input_tensor.mul_(weight)
        else:
            input_tensor.zero_()  # also if it is not finite
        self._everybody.reduce_scatter(output_tensor, input_tensor)


class FsdpModel:
    """This worker's part of a model and its optimizer; both are changed in place, until `undo`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        everybody: WorldGroup,
        weight: Callable[[], float],
        gathering: Callable[[], object],
    ) -> None:
        """weight: returns this worker's share of the global batch.
        gathering: called before state is gathered, which all workers do at the same time.
        """
        self._model, self._optimizer, self._everybody, self._gathering = model, optimizer, everybody, gathering
        self.keep = True
        """True if gathered values are kept on this worker; it takes part in gathering either way."""
        before = dict(model.named_parameters(remove_duplicate=False))
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
            everybody.mirror(parameter.data)
        self._modules: list[Any] = [*blocks(model), model]
        for module in self._modules:
            fully_shard(module, mesh=everybody.mesh)
            if module._get_fsdp_state()._fsdp_param_groups:
                module.set_custom_all_gather(_Gather(everybody))
                module.set_custom_reduce_scatter(_Scatter(everybody, weight))
                # The weights make a mean of the sum.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        """By name; a shared parameter has several."""
        self._whole_of = {self.parameters[name]: whole for name, whole in before.items()}
        """The script's own parameter of each sharded one."""
        self._plain: dict[nn.Parameter, nn.Parameter] = {}
        """This worker's rows of each, as plain parameters."""
        self._take_over_optimizer()
        for whole in self._whole_of.values():
            whole.data, whole.grad = whole.data.new_empty(0), None
        self._hooks = [
            model.register_state_dict_post_hook(functools.partial(self._give_whole)),  # torch sets an attribute on it
            model.register_load_state_dict_pre_hook(self._take_part),
            model.register_forward_hook(lambda _model, _inputs, result: tree_map_only(torch.Tensor, marked, result)),
        ]
        self._allow_copies = refuse_copies(model.modules())

    def _take_over_optimizer(self) -> None:
        sharded = {id(whole): parameter for parameter, whole in self._whole_of.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [sharded[id(parameter)] for parameter in group["params"]]
        for parameter, whole in self._whole_of.items():
            if whole in self._optimizer.state:
                self._optimizer.state[parameter] = self._optimizer.state.pop(whole)
        self.cut_state()

    # -- updating ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Gives the optimizer this worker's rows as plain tensors until the context exits.

        Distributed tensors would give the same values, but each operation would first compute its result's placement.
        """
        optimizer, state = self._optimizer, self._optimizer.state
        given = [group["params"] for group in optimizer.param_groups]
        pairs: list[tuple[Any, nn.Parameter]] = []
        for group in optimizer.param_groups:
            group["params"] = [self._local(parameter) for parameter in group["params"]]
        for parameters, group in zip(given, optimizer.param_groups, strict=True):
            pairs += zip(parameters, group["params"], strict=True)
        for parameter, local in pairs:
            if parameter in state:
                state[local] = state.pop(parameter)
        try:
            yield
        finally:
            for parameters, group in zip(given, optimizer.param_groups, strict=True):
                group["params"] = parameters
            for parameter, local in pairs:
                local.grad = None
                if local in state:
                    state[parameter] = state.pop(local)

    def _local(self, parameter: Any) -> nn.Parameter:
        rows = parameter._local_tensor.detach()
        if parameter not in self._plain:
            self._plain[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        local = self._plain[parameter]
        local.data = rows
        local.grad = None if parameter.grad is None else parameter.grad._local_tensor
        return local

    def gradients(self) -> list[torch.Tensor]:
        """This worker's rows of all that the optimizer updates."""
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [parameter.grad._local_tensor for parameter in held if parameter.grad is not None]

    def reshard(self) -> None:
        """Free gathered parameters that are still held, as after a forward pass without a backward pass."""
        for module in self._modules:
            module.reshard()

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This worker's rows of a whole tensor: equally many for each worker, fewer for the last."""
        each = -(-tensor.shape[0] // self._everybody.size)
        return tensor[each * self._everybody.rank :][:each]

    def _whole(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The whole tensor of all workers' rows; empty where it is not kept."""
        if not shape.numel():
            return rows.new_empty(shape)
        each = -(-shape[0] // self._everybody.size)
        part = rows.new_zeros((each, *shape[1:]))
        part[: rows.shape[0]] = rows
        whole = rows.new_empty((each * self._everybody.size, *shape[1:]))
        self._everybody.all_gather(whole, part)
        return whole[: shape[0]].clone() if self.keep else rows.new_empty(0)

    def _give_whole(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """At the end of `model.state_dict()`."""
        self._gathering()
        found: dict[nn.Parameter, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if prefix + name in state:
                if parameter not in found:
                    found[parameter] = self._whole(_local_of(parameter), parameter.shape)
                state[prefix + name] = found[parameter]

    def _take_part(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before `model.load_state_dict()`."""
        self.reshard()
        for name, parameter in self.parameters.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                whole = value.contiguous()
                state[prefix + name] = DTensor.from_local(
                    self._rows(whole),
                    self._everybody.mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's `state_dict()`, whole."""
        self._gathering()
        optimizer = self._optimizer
        content: dict[str, Any] = type(optimizer).state_dict(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        content["state"] = {
            number: {name: self._state_whole(value, held[number]) for name, value in entry.items()}
            for number, entry in content["state"].items()
        }
        return content

    def _state_whole(self, value: Any, parameter: nn.Parameter) -> Any:
        rows = _local_of(parameter).shape
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == rows:
            return self._whole(value, parameter.shape)
        return value

    def cut_state(self) -> None:
        """Keep this worker's rows of the optimizer's state, which is whole."""
        for parameter, entry in self._optimizer.state.items():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                    entry[name] = self._rows(value).clone()

    # -- the end -----------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Make the model and the optimizer plain and whole again; all workers call it."""
        self._allow_copies()
        for hook in self._hooks:
            hook.remove()
        self.reshard()
        state = self._optimizer.state
        for parameter, whole in self._whole_of.items():
            whole.data = self._whole(_local_of(parameter), parameter.shape)
            whole.requires_grad_(parameter.requires_grad)
            if parameter in state:
                entry = state.pop(parameter)
                state[whole] = {name: self._state_whole(value, parameter) for name, value in entry.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [self._whole_of[parameter] for parameter in group["params"]]
        for module in self._modules:
            _unshard(module, self._whole_of)


def _local_of(parameter: Any) -> torch.Tensor:
    rows: torch.Tensor = parameter._local_tensor.detach()
    return rows


def _unshard(module: Any, whole_of: dict[nn.Parameter, nn.Parameter]) -> None:
    """Removes everything that `fully_shard` has added to a module; torch has no function for it."""
    state = module._get_fsdp_state()
    hooks = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        hooks += group._module_to_pre_save_state_dict_hook_handle.values()
        hooks += group._module_to_pre_load_state_dict_hook_handle.values()
        for parameter in group.fsdp_params:
            hooks.append(parameter._post_load_hook_handle)
            parameter._setattr_on_modules(whole_of[parameter.sharded_param])
    for hook in hooks:
        hook.remove()
    module.__class__ = type(module).__mro__[type(module)._orig_cls_mro_index]
    _module_state_mapping.pop(module, None)
    for inner in module.modules():
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(inner).pop(name, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
