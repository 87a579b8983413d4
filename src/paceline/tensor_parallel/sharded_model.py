"""A model with sharded layers, whose state dicts are those of the whole model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.cluster.compiler import IgnoredCompiler, keep_out_of_graphs
from paceline.cluster.membership import Members
from paceline.graph.opaque_layers import OpaqueLayers
from paceline.tensor_parallel.comm_functions import ShardGroup
from paceline.tensor_parallel.layers import Role, install, layer_shards
from paceline.tensor_parallel.partial_tensor import full_tensor
from paceline.tensor_parallel.placement import Placement, shard_of, unshard

Shards = Callable[[str], list[torch.Tensor]]
"""All workers' shards of a parameter or buffer, by its name in the model."""


class ShardedModel:
    """Shards some layers of a model; `undo` makes them whole again."""

    def __init__(
        self, model: nn.Module, roles: Mapping[str, Role], group: ShardGroup, compiler: IgnoredCompiler
    ) -> None:
        self._model, self.group = model, group
        self.placements: dict[int, Placement] = {}
        """Placements of sharded parameters and buffers, by id."""
        self.names: dict[int, str] = {}
        """Names of these, by id."""
        self.shards: Shards = lambda _name: []
        """Finds all workers' shards; assigned once they are in shared memory."""
        self.stand_in: Callable[[torch.Tensor], Any] | None = None
        """Makes what a state dict gets for a sharded tensor, if not its whole value."""
        self.before_call: Callable[[tuple[Any, ...], dict[str, Any]], object] = lambda _args, _kwargs: None
        """Called with the arguments of each call of the model."""
        self._compiler = compiler
        self._plain_forward: Any = vars(model).get("forward")
        self._layers = {name: model.get_submodule(name) for name in roles}
        self._opaque = OpaqueLayers(self._layers)
        self._undo: list[Callable[[], None]] = []
        for name, role in roles.items():
            layer = self._layers[name]
            for own, placement in layer_shards(layer, role).items():
                tensor: Any = layer._parameters.get(own)
                tensor = layer._buffers[own] if tensor is None else tensor
                self.placements[id(tensor)] = placement
                self.names.setdefault(id(tensor), f"{name}.{own}")
        self.full_values = {self.names[key]: tensor.detach() for key, tensor in self._by_id().items()}
        """The whole values, by name, until they are in shared memory."""
        for name, role in roles.items():
            self._undo.append(install(self._layers[name], role, group))
        for tensor in self._by_id().values():
            placement = self.placements[id(tensor)]
            tensor.data = shard_of(tensor.data, placement, group.rank, group.size).clone()
        self._hook()

    def _by_id(self) -> dict[int, torch.Tensor]:
        everything = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {id(tensor): tensor for _, tensor in everything if id(tensor) in self.placements}

    def share_untrained(
        self, members: Members, trained: set[int], replica: int, replicas: int
    ) -> dict[str, list[torch.Tensor]]:
        """Moves the shards of buffers and frozen parameters into memory that all members map; all shards, by name.

        A replica has each shard once for all of its stages, since only one of them changes it.
        """
        group = self.group
        tensors = [tensor for key, tensor in self._by_id().items() if key not in trained]
        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
        memory = members.share(max(1, replicas * group.size * sum(sizes)))
        found: dict[str, list[torch.Tensor]] = {}
        for rank in range(group.size):
            offset = (replica * group.size + rank) * sum(sizes)
            for tensor, size in zip(tensors, sizes, strict=True):
                view = memory.tensor(offset, tensor.numel(), tensor.dtype).view(tensor.shape)
                offset += size
                if rank == group.rank:
                    view.copy_(tensor.data)  # equal on all stages
                    tensor.data = view
                found.setdefault(self.names[id(tensor)], []).append(view)
        return found

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value of a sharded parameter or buffer."""
        return unshard(self.shards(self.names[id(tensor)]), self.placements[id(tensor)])

    # -- the whole model ---------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        # A function, since torch sets attributes on it.
        def export(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for name, value in self._own(layer):
                if prefix + name in state:
                    state[prefix + name] = (self.stand_in or self.full_tensor)(value)

        self._gather_outputs()
        self._undo.append(_gather_for_custom_gradients())
        for module in self.modules():
            self._undo.append(module.register_state_dict_post_hook(export).remove)
            self._undo.append(module.register_load_state_dict_pre_hook(self._import).remove)
        for module in self._model.modules():
            # Their fast paths for evaluation read the parameters without calling the layers.
            if isinstance(module, nn.TransformerEncoderLayer):
                self._undo.append(_set(module, "activation_relu_or_gelu", 0))
            elif isinstance(module, nn.TransformerEncoder):
                self._undo.append(_set(module, "use_nested_tensor", False))

    def modules(self) -> list[nn.Module]:
        """All modules with a sharded tensor: sharded layers, and others that have it under another name."""
        return [module for module in self._model.modules() if self._own(module)]

    def _gather_outputs(self) -> None:
        """Makes the model's `forward` return whole tensors, and run uncompiled."""
        plain = self._model.forward

        @keep_out_of_graphs
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._compiler.renew()
            training = torch.is_grad_enabled() and self._model.training
            self.group.calls.begin(tree_leaves((args, kwargs)), evaluates=not training)
            self.before_call(args, kwargs)
            return tree_map(full_tensor, plain(*args, **kwargs))

        # Frameworks look there for the names of its arguments.
        forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        self._model.forward = forward

    def restore_forward(self) -> None:
        vars(self._model).pop("forward", None)
        if self._plain_forward is not None:
            self._model.forward = self._plain_forward

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """Makes the sharded layers opaque to a trace, and gathers no outputs, until it exits."""
        forward = self._model.forward
        self.restore_forward()
        try:
            with self._opaque.hidden():
                yield
        finally:
            self._model.forward = forward

    def _own(self, layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
        named = [*layer._parameters.items(), *layer._buffers.items()]
        return [(name, value) for name, value in named if value is not None and id(value) in self.placements]

    def _import(self, layer: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        for name, value in self._own(layer):
            loaded = state.get(prefix + name)
            placement = self.placements[id(value)]
            if not isinstance(loaded, torch.Tensor) or loaded.dim() <= placement.dim:
                continue  # torch reports the error
            if loaded.shape[placement.dim] == placement.size:
                state[prefix + name] = shard_of(loaded, placement, self.group.rank, self.group.size)

    def undo(self) -> None:
        """Makes the layers whole, with their newest values."""
        for tensor in self._by_id().values():
            tensor.data = self.full_tensor(tensor)
        self.restore_forward()
        self._compiler.undo()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.placements.clear()


def _gather_for_custom_gradients() -> Callable[[], None]:
    """Gives custom autograd functions whole tensors: autograd would find no path from their outputs to shards."""
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        arguments = [full_tensor(one) for one in args]
        if cls.__name__ == "CheckpointFunction":  # it calls its first argument and returns the result
            arguments[0] = _returning_full_tensors(arguments[0])
        return before.__get__(None, cls)(*arguments, **kwargs)

    def undo() -> None:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    return undo


def _returning_full_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map(full_tensor, function(*args, **kwargs))

    return call


def _set(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of a module; the returned function restores it."""
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)
