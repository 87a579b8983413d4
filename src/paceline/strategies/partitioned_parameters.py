"""The parts of a split model as one list of parameters, equal on all workers, each part there once.

A parameter that is cut is as many parts as it was cut in; this worker's own is the model's parameter itself, and for
each of the others there is one that stands for it. All lie in shared memory, so that anybody can read the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.parameters.optimizers import same_kind_as
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.whole import WholeOptimizer
from paceline.strategies.mesh_coord import MeshCoord
from paceline.tensor_parallel.placement import Placement, shard_of, unshard
from paceline.tensor_parallel.sharded_model import ShardedModel


class PartitionedParameters:
    """The trained parameters, each part of a cut one by itself."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        coord: MeshCoord,
        sharded: ShardedModel | None,
    ) -> None:
        self._optimizer, self._coord, self._sharded = optimizer, coord, sharded
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.named: list[tuple[str, torch.nn.Parameter]] = []
        self.own: list[bool] = []
        """For each part, True if this worker writes its gradient."""
        self.of: dict[int, list[int]] = {}
        """Numbers of a parameter's parts, by its id."""
        pieces = coord.shape.tensor
        for name, parameter in model.named_parameters():
            if id(parameter) not in held:
                continue
            self.of[id(parameter)] = numbers = []
            is_cut = sharded is not None and id(parameter) in sharded.placements
            for part in range(pieces if is_cut else 1):
                numbers.append(len(self.named))
                own = not is_cut or part == coord.part
                self.named.append((f"{name}@{part}" if is_cut else name, parameter if own else _stand_in(parameter)))
                # Of what all have whole, the first one's; of a pipeline's stages only one has a gradient at all.
                self.own.append(part == coord.part)
        self.shadow = self._shadow()
        """An optimizer of the user's kind on the parts."""

    def _shadow(self) -> Optimizer:
        groups = []
        for group in self._optimizer.param_groups:
            parts = [self.named[number][1] for p in group["params"] for number in self.of[id(p)]]
            rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**rest, "params": parts})
        return same_kind_as(self._optimizer, groups)

    def fill(self, views: list[torch.Tensor]) -> None:
        """Write this process's values, which it had before they were cut, to where all will find them."""
        by_part = {number: (key, place) for key, numbers in self.of.items() for place, number in enumerate(numbers)}
        for number, view in enumerate(views):
            key, place = by_part[number]
            if self._sharded is not None and key in self._sharded.placements:
                value = self._sharded.full_values[self._sharded.names[key]]
                view.copy_(shard_of(value, self._sharded.placements[key], place, self._coord.shape.tensor))
            else:
                view.copy_(self.named[number][1].data)

    def values(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """All parts of a parameter."""
        return [self.named[number][1].data for number in self.of[id(parameter)]]

    # -- the optimizer's state as plain torch knows it ---------------------------------------------------------------

    def export_state(self, shard: ShardedOptimizer | WholeOptimizer) -> None:
        """Fill the user's optimizer with the state of whole parameters."""
        shard.export_state(self.shadow)
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                states = [self.shadow.state.get(self.named[number][1]) for number in self.of[id(parameter)]]
                known = [state for state in states if state]
                if len(known) == len(states):
                    self._optimizer.state[parameter] = self._joined(parameter, known)
        self.shadow.state.clear()

    def _joined(self, parameter: torch.Tensor, states: list[dict[str, Any]]) -> dict[str, Any]:
        if len(states) == 1:
            return states[0]
        assert self._sharded is not None
        return joined_state(states, self._sharded.placements[id(parameter)])

    def import_state(self, take: Callable[[Optimizer], None]) -> None:
        """Pass the state of the user's optimizer, cut into parts, to `take`, and empty it."""
        self.shadow.state.clear()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if not state:
                    continue
                numbers = self.of[id(parameter)]
                for place, number in enumerate(numbers):
                    part = self.named[number][1]
                    self.shadow.state[part] = state if len(numbers) == 1 else self._part(parameter, state, place)
        self._optimizer.state.clear()
        take(self.shadow)

    def _part(self, parameter: torch.Tensor, state: dict[str, Any], place: int) -> dict[str, Any]:
        assert self._sharded is not None
        return state_part(state, self._sharded.placements[id(parameter)], place, self._coord.shape.tensor)


def joined_state(states: list[dict[str, Any]], placement: Placement) -> dict[str, Any]:
    """The optimizer's state of a whole parameter, from those of its parts."""
    return {
        name: unshard([state[name] for state in states], placement)
        if isinstance(value, torch.Tensor) and value.dim() > placement.dim
        else value
        for name, value in states[0].items()
    }


def state_part(state: dict[str, Any], placement: Placement, place: int, parts: int) -> dict[str, Any]:
    """The optimizer's state of one part of a parameter."""
    return {
        name: shard_of(value, placement, place, parts).clone()
        if isinstance(value, torch.Tensor) and value.dim() > placement.dim
        else value
        for name, value in state.items()
    }


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Of the same shape, without memory of its own."""
    nothing = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    return torch.nn.Parameter(nothing, requires_grad=parameter.requires_grad)
