"""A model with some of its layers cut: what each worker has of it, and the whole again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.errors import UsageError
from paceline.tensor_parallel.comm_functions import ShardSpace
from paceline.tensor_parallel.layers import install, pieces
from paceline.tensor_parallel.partial_tensor import whole
from paceline.tensor_parallel.placement import Placement, cut, join
from paceline.tensor_parallel.roles import Role

Parts = Callable[[str], list[torch.Tensor]]
"""All workers' parts of a parameter or buffer, by its name in the model."""


class ShardedModel:
    """Some layers of a model, cut; `undo` makes them whole again."""

    def __init__(self, model: nn.Module, roles: Mapping[str, Role], space: ShardSpace) -> None:
        self._model, self._space = model, space
        self.placements: dict[int, Placement] = {}
        """Of parameters and buffers that are cut, by their ids."""
        self.names: dict[int, str] = {}
        self.parts: Parts = lambda _name: []
        """Where the other workers' parts are found."""
        self._layers = {name: model.get_submodule(name) for name in roles}
        self._undo: list[Callable[[], None]] = []
        for name, role in roles.items():
            self._note(name, role)
        self.wholes = {key: value.detach() for key, value in self._cut_tensors().items()}
        """The values before they were cut, by name; they are let go of once they are in everybody's hands."""
        for name, role in roles.items():
            self._undo.append(install(self._layers[name], role, space))
        for tensor in self._by_id().values():
            placement = self.placements[id(tensor)]
            tensor.data = cut(tensor.data, placement, space.rank, space.size).clone()
        self._hook()

    def _note(self, name: str, role: Role) -> None:
        layer = self._layers[name]
        for piece in pieces(layer, role):
            tensor: Any = layer._parameters.get(piece.name)
            tensor = layer._buffers[piece.name] if tensor is None else tensor
            self.placements[id(tensor)] = piece.placement
            self.names.setdefault(id(tensor), f"{name}.{piece.name}")

    def _by_id(self) -> dict[int, torch.Tensor]:
        everything = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {id(tensor): tensor for _, tensor in everything if id(tensor) in self.placements}

    def _cut_tensors(self) -> dict[str, torch.Tensor]:
        return {self.names[key]: tensor for key, tensor in self._by_id().items()}

    def __deepcopy__(self, _memo: dict[int, Any]) -> ShardedModel:
        raise UsageError("a model that is split over workers cannot be copied; make a plain one, and load its state")

    def besides(self, held: set[int]) -> list[torch.Tensor]:
        """What is cut besides these: buffers, and parameters that are not trained."""
        return [tensor for key, tensor in self._by_id().items() if key not in held]

    def part(self, value: torch.Tensor, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """One worker's part of a whole value of this parameter or buffer; this worker's own if not said whose."""
        rank = self._space.rank if rank is None else rank
        return cut(value, self.placements[id(tensor)], rank, self._space.size)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All parts of this parameter or buffer together."""
        return join(self.parts(self.names[id(tensor)]), self.placements[id(tensor)])

    # -- as others see the model -------------------------------------------------------------------------------------

    def _hook(self) -> None:
        def show(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            self._show(layer, state, prefix)  # a function, as torch notes things on it

        self._gather = self._model.register_forward_hook(_gathered)
        self._undo.append(_wholes_for_own_gradients())
        for layer in self._layers.values():
            self._undo.append(layer.register_state_dict_post_hook(show).remove)
            self._undo.append(layer.register_load_state_dict_pre_hook(self._take).remove)
        for module in self._model.modules():
            # Their short cuts for evaluation take the parameters without asking the layers.
            if isinstance(module, nn.TransformerEncoderLayer):
                self._undo.append(_set(module, "activation_relu_or_gelu", 0))
            elif isinstance(module, nn.TransformerEncoder):
                self._undo.append(_set(module, "use_nested_tensor", False))

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """While in there, what the model returns is not gathered, so that nothing of ours is hooked on it."""
        self._gather.remove()
        try:
            yield
        finally:
            self._gather = self._model.register_forward_hook(_gathered)

    def _own(self, layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
        named = [*layer._parameters.items(), *layer._buffers.items()]
        return [(name, value) for name, value in named if value is not None and id(value) in self.placements]

    def _show(self, layer: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name, value in self._own(layer):
            if prefix + name in state:
                state[prefix + name] = self.whole(value)

    def _take(self, layer: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        for name, value in self._own(layer):
            given = state.get(prefix + name)
            placement = self.placements[id(value)]
            if not isinstance(given, torch.Tensor) or given.dim() <= placement.dim:
                continue  # torch itself will say what is wrong
            if given.shape[placement.dim] == placement.size:
                state[prefix + name] = self.part(given, value)

    def undo(self) -> None:
        """Let the layers be whole, with the newest values."""
        for tensor in self._by_id().values():
            tensor.data = self.whole(tensor)
        self._gather.remove()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.placements.clear()


def _gathered(_module: nn.Module, _arguments: Any, result: Any) -> Any:
    return tree_map(whole, result)


def _wholes_for_own_gradients() -> Callable[[], None]:
    """Let functions with a gradient of their own get the whole: autograd would not find its way back to the parts."""
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = [whole(one) for one in args]
        if cls.__name__ == "CheckpointFunction":  # which calls what it is given, and returns what that does
            given[0] = _returning_wholes(given[0])
        return before.__get__(None, cls)(*given, **kwargs)

    def undo() -> None:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    return undo


def _returning_wholes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map(whole, function(*args, **kwargs))

    return call


def _set(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Let a module have this for an attribute; returns what undoes it."""
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)
