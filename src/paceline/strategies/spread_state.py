"""The state of one worker's stages whose layers are sharded over other workers, which share no memory with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.parameters.absent_tensor import AbsentTensor
from paceline.pipeline.stage_state import StageState, stand_ins
from paceline.strategies.mesh_coord import MeshCoord
from paceline.strategies.partitioned_parameters import joined_state, state_part
from paceline.tensor_parallel.sharded_model import ShardedModel


class ShardedStageState(StageState):
    """As `StageState`, with shards of some tensors: for a state dict the shards of all workers of a stage are fetched.

    Until the model is cut into stages, or if it is not, every worker has its shards of all tensors.
    """

    def __init__(
        self, members: Members, model: nn.Module, optimizer: Optimizer, coord: MeshCoord, sharded: ShardedModel
    ) -> None:
        super().__init__(members, model, optimizer)
        self._coord, self._sharded = coord, sharded
        self._numbers = {
            sharded.names[id(tensor)]: number
            for number, tensor in enumerate(self._tensors)
            if id(tensor) in sharded.names
        }
        """By the name of a sharded tensor."""
        sharded.shards = self._shards

    def _workers(self, number: int) -> list[int]:
        """The workers that have the shards of a tensor, or all of it each."""
        stage, parts = self._coord.stage, self._coord.shape.tensor
        if self._runtime is not None:
            stage = self._runtime.context.ranks[self._owners[number]] // parts
        return [self._coord.lead + stage * parts + part for part in range(parts)]

    def _shards(self, name: str) -> list[torch.Tensor]:
        number = self._numbers[name]
        return [self.value_of(number, worker) for worker in self._workers(number)]

    def all_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for number, parameter in enumerate(self.parameters):
            workers, placement = self._workers(number), self._sharded.placements.get(id(parameter))
            if placement is None:
                state = self.state_of(number, workers[self._coord.part])
            else:
                states = [self.state_of(number, worker) for worker in workers]
                state = joined_state(states, placement) if all(states) else {}
            if state:
                found[parameter] = state
        return found

    def streamed_model(self) -> dict[str, Any]:
        self._sharded.stand_in = self._stand_in
        try:
            return super().streamed_model()
        finally:
            self._sharded.stand_in = None

    def _stand_in(self, tensor: torch.Tensor) -> AbsentTensor:
        """Of a sharded tensor, as long as it is whole."""
        placement = self._sharded.placements[id(tensor)]
        shape = list(tensor.shape)
        shape[placement.dim] = placement.size
        return AbsentTensor(shape, tensor.dtype, lambda: self._sharded.full_tensor(tensor))

    def _streamed_state(self, number: int) -> dict[str, Any]:
        workers, placement = self._workers(number), self._sharded.placements.get(id(self.parameters[number]))
        if placement is None:
            member = workers[self._coord.part]
            if member == self._members.rank:
                return self.state_of(number, member)
            return stand_ins(self.kinds_of(number, member), lambda name: self.state_of(number, member, name))
        kinds = [self.kinds_of(number, worker) for worker in workers]
        if not all(kinds):
            return {}

        def fetch(name: str) -> dict[str, Any]:
            return joined_state([self.state_of(number, worker, name) for worker in workers], placement)

        return stand_ins(joined_state(kinds, placement), fetch)

    def take_parts(self) -> None:
        """The optimizer has the state of whole parameters: keeps this worker's shards of it."""
        for parameter, state in self._optimizer.state.items():
            placement = self._sharded.placements.get(id(parameter))
            if placement is not None:
                part = state_part(state, placement, self._coord.part, self._coord.shape.tensor)
                self._optimizer.state[parameter] = part

    def release(self) -> None:
        whole = {name: self._shards(name) for name in self._numbers}
        self._members.gather(b"")  # until then others may ask for this worker's shards
        self._sharded.shards = whole.__getitem__
        self._sharded.undo()
        self._held |= set(self._numbers.values())
        super().release()
