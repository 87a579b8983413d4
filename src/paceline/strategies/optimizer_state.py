"""The optimizer's state, which lies in shared memory, as plain torch knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from paceline.parameters.joint import parts_of
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.whole import WholeOptimizer
from paceline.strategies.optimizer_patch import own_state

if TYPE_CHECKING:  # few trainers need it, and it takes long to import
    from paceline.strategies.partitioned_parameters import PartitionedParameters

Shard = ShardedOptimizer | WholeOptimizer


class OptimizerState:
    """Exports the state of all shards to the user's optimizer, and imports it from there."""

    def __init__(
        self, optimizer: Optimizer, shards: Callable[[], Iterable[Shard]], parts: PartitionedParameters | None = None
    ) -> None:
        """shards: those that this worker imports state to; parts: of a split model, whose state has whole tensors."""
        self._optimizer, self._shards, self._parts = optimizer, shards, parts

    def export(self, *, copy: bool) -> None:
        """Fill `optimizer.state` with the whole state, as views of shared memory where they can be, or copies."""
        shard = next(iter(self._shards()))
        if self._parts is None:
            shard.export_state(self._optimizer)
        else:
            self._parts.export_state(shard)
        if copy:
            own_state(self._optimizer)

    def import_all(self) -> None:
        """Move `optimizer.state` to the shards, and empty it."""
        if self._parts is None:
            self._import(self._optimizer)
        else:
            self._parts.import_state(self._import)
        self._optimizer.state.clear()

    def _import(self, optimizer: Optimizer) -> None:
        state = dict(optimizer.state)
        for shard in self._shards():
            optimizer.state.update(state)
            shard.import_state(optimizer)

    def state_dict(self, optimizer: Optimizer, *, copy: bool = False) -> dict[str, Any]:
        """An optimizer's `state_dict()`, with the whole state; optimizer: the user's, or one of several."""
        self.export(copy=copy)
        try:
            return type(optimizer).state_dict(optimizer)
        finally:
            self._optimizer.state.clear()

    def kept(self, kept: KeptVersion) -> list[dict[str, Any]]:
        """The `state_dict` of each optimizer, with the state of a copy that updates have made."""
        next(iter(self._shards())).export_kept(kept, self._optimizer)
        try:
            return [type(part).state_dict(part) for part in parts_of(self._optimizer)]
        finally:
            self._optimizer.state.clear()

    def load_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loads the state of an optimizer: the user's, or one of several, which keep theirs."""
        if optimizer is not self._optimizer:
            self.export(copy=True)
        type(optimizer).load_state_dict(optimizer, state)
        self.import_all()
