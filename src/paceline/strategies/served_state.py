"""The tensors of one worker of a replica that is on several machines, where servers hold the trained parameters.

Of each version the worker gets what it computes with, in memory that it shares with the relay of its machine. Other
tensors (buffers, frozen parameters) are its own, as `StageState` has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.parameters.versions import Versions
from paceline.pipeline.stage_state import StageState
from paceline.strategies.mesh_coord import MeshCoord
from paceline.strategies.part_client import PartClient
from paceline.strategies.partitioned_parameters import PartitionedParameters
from paceline.strategies.spread_state import ShardedStageState
from paceline.tensor_parallel.placement import shard_of
from paceline.tensor_parallel.sharded_model import ShardedModel


class ServedState(StageState):
    """As `StageState`, with parameters in versions."""

    def __init__(
        self,
        members: Members,
        model: nn.Module,
        optimizer: Optimizer,
        coord: MeshCoord,
        parts: PartitionedParameters,
        *more: Any,
    ) -> None:
        """members: of the replica; those that others are asked for by are their ranks in the team.

        more: what a class of states between this one and `StageState` takes.
        """
        super().__init__(members, model, optimizer, *more)
        self._coord, self._parts = coord, parts
        self._versions: Versions | None = None
        self._whole = False
        """True while all parts of a version are here."""

    def serve(self, versions: Versions, client: PartClient, current: Callable[[], tuple[int, int]]) -> None:
        """Trained parameters are in versions from now on. current: this worker's buffer and version."""
        self._versions, self._client, self._current = versions, client, current

    def _is_served(self, number: int) -> bool:
        return number < len(self.parameters) and id(self.parameters[number]) in self._parts.of

    def value_of(self, number: int, member: int) -> torch.Tensor:
        return super().value_of(number, member - self._coord.lead)

    def _take(self, held: set[int]) -> None:
        """Gets the first worker's values of what is not in versions."""
        assert self._runtime is not None
        super()._take({number for number in held if not self._is_served(number)})

    def _hold(self, numbers: set[int]) -> None:
        super()._hold(numbers)
        self.hold_own()

    def hold_own(self) -> None:
        """Gets this worker's part of its version, and of those to come."""
        assert self._versions is not None
        slots = set()
        for number in self._held:
            if self._is_served(number):
                places = self._parts.of[id(self.parameters[number])]
                slots.add(places[self._coord.part if len(places) > 1 else 0])
        self._client.hold(sorted(slots))
        self._client.pull(*self._current())
        self._versions.restrict(slots)

    @contextlib.contextmanager
    def whole(self, buffer: int) -> Iterator[None]:
        """While entered, parameters have all values of a version that is here as a whole."""
        assert self._versions is not None
        before, kept = self._current()[0], self._versions.restrict(None)
        self._versions.pull(buffer)
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._versions.restrict(kept)
            self._versions.pull(before)
            for number in range(len(self._tensors)):
                if number not in self._held:
                    self._let_go(number)

    def _foreign(self, module: nn.Module) -> list[int]:
        return [number for number in super()._foreign(module) if not (self._whole and self._is_served(number))]

    # -- the end -----------------------------------------------------------------------------------------------------

    def trained(self) -> dict[int, torch.Tensor]:
        """Copies of all trained parameters, by their numbers; all parts are here."""
        return {
            number: self._full(parameter).clone(memory_format=torch.preserve_format)
            for number, parameter in enumerate(self.parameters)
            if self._is_served(number)
        }

    def _full(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.data

    def load_parts(self, values: Mapping[str, Any]) -> None:
        """Gives all parts of sharded parameters these values, besides this worker's own; all parts are here."""

    def gather_rest(self) -> None:
        """Gives tensors that servers do not hold their values, from the workers that have them."""
        for number in range(len(self._tensors)):
            if number not in self._held and not self._is_served(number):
                self._tensors[number].data = self._value(number)

    def gather_trained(self) -> None:
        """Gives trained parameters, and the optimizer's state, the values that the replica's first worker has."""
        for number, parameter in enumerate(self.parameters):
            if self._is_served(number):
                parameter.data = StageState.value_of(self, number, 0)
                if state := self.state_of(number, 0):
                    self._optimizer.state[parameter] = state

    def release(self) -> None:
        for undo in self._undo:
            undo()


class ShardedServedState(ServedState, ShardedStageState):
    """The same with layers that are sharded."""

    def __init__(
        self,
        members: Members,
        model: nn.Module,
        optimizer: Optimizer,
        coord: MeshCoord,
        parts: PartitionedParameters,
        sharded: ShardedModel,
    ) -> None:
        super().__init__(members, model, optimizer, coord, parts, coord, sharded)
        self._gathered: dict[str, list[torch.Tensor]] = {}
        """Of sharded tensors the shards of all workers, at the end."""

    def _full(self, parameter: nn.Parameter) -> torch.Tensor:
        sharded = id(parameter) in self._sharded.placements
        return self._sharded.full_tensor(parameter) if sharded else parameter.data

    def load_parts(self, values: Mapping[str, Any]) -> None:
        for name, number in self._numbers.items():
            if self._is_served(number) and name in values:
                parameter = self.parameters[number]
                placement, parts = self._sharded.placements[id(parameter)], self._parts.values(parameter)
                for place, part in enumerate(parts):
                    part.copy_(shard_of(values[name], placement, place, len(parts)))

    def gather_rest(self) -> None:
        super().gather_rest()
        self._gathered = {name: self._shards(name) for name in self._numbers}

    def _shards(self, name: str) -> list[torch.Tensor]:
        number = self._numbers[name]
        if self._whole and self._is_served(number):
            return self._parts.values(self.parameters[number])
        return self._gathered.get(name) or super()._shards(name)


def served_state(
    members: Members,
    model: nn.Module,
    optimizer: Optimizer,
    coord: MeshCoord,
    parts: PartitionedParameters,
    sharded: ShardedModel | None,
) -> ServedState:
    """The state of a worker of a replica, sharded or not."""
    if sharded is None:
        return ServedState(members, model, optimizer, coord, parts)
    return ShardedServedState(members, model, optimizer, coord, parts, sharded)
