"""The microbatches of one call of the model: what goes into the first stages and comes out of the last one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.pipeline.deferred import Autocast, Deferred
from paceline.pipeline.microbatch_loss import MicrobatchLoss
from paceline.pipeline.stage_links import from_memory_order, memory_order


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """One call of the model by the script."""

    inputs: list[Any]
    """Its arguments, flattened."""
    batch: int
    """Samples."""
    sizes: tuple[int, ...]
    """Samples of each microbatch."""
    kind: Any
    """Key of its trace: equal for calls that differ only in values and batch size."""
    number: int
    """Number of calls before it."""
    seed: int
    version: int
    """Version of the parameters."""


class Microbatches:
    """Inputs and seeds of each microbatch; on the last stage's workers also their results and losses."""

    def __init__(self, call: ModelCall, training: bool) -> None:
        """training: True if a backward pass follows."""
        self.call, self.training = call, training
        self.sizes, self.version = call.sizes, call.version
        self.microbatch_loss = MicrobatchLoss(call.batch, call.sizes)
        self.loss: Deferred | None = None
        """The script's loss, during the backward pass."""
        self.results: dict[int, list[torch.Tensor]] = {}
        self.losses: dict[int, list[torch.Tensor]] = {}
        self.autocast = Autocast()
        """The state in which the script called the model."""

    def kind(self, microbatch: int) -> Any:
        """Equal for microbatches whose values at every stage have equal shapes and dtypes."""
        return (self.call.kind, self.autocast.key, self.training, self.sizes[microbatch])

    def input(self, number: int, microbatch: int) -> Any:
        """A microbatch's rows of an input of the model; the input itself if it has no row per sample."""
        value = self.call.inputs[number]
        divided = len(self.sizes) > 1 and isinstance(value, torch.Tensor) and value.dim()
        if divided and value.shape[0] == self.call.batch:
            return self.microbatch_loss.rows(value, microbatch)
        return value

    def seed(self, microbatch: int) -> int:
        """Seed of a microbatch's random numbers; each operation derives its own from it."""
        mixed = hash((self.call.seed, self.call.number, microbatch))
        return mixed & 0x7FFF_FFFF_FFFF_FFFF

    def loss_of(self, results: list[torch.Tensor], microbatch: int) -> torch.Tensor:
        """The microbatch's term of the loss."""
        assert self.loss is not None
        with torch.enable_grad():
            term = self.microbatch_loss.term(self.loss, results, microbatch)
        self.losses[microbatch] = [term.detach()]
        return term

    def whole_result(self, index: int) -> torch.Tensor:
        """One of the model's results for the whole batch, from those of all microbatches."""
        parts = [results[index] for results in self.results.values()]
        if len(parts) == 1:
            return parts[0]
        if any(not part.dim() for part in parts):
            raise UsageError("the model returns a scalar for every microbatch; write microbatches=1")
        order = memory_order(parts[0])
        return from_memory_order(torch.cat([part.permute(order) for part in parts], order.index(0)), order)
