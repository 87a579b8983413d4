"""One batch on its way through a split model: from the call of the model to the loss and its gradient."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Protocol

import torch

from paceline.errors import UsageError
from paceline.pipeline.deferred import Autocast, Deferred, replay
from paceline.pipeline.microbatch_loss import MicrobatchLoss
from paceline.pipeline.stage_runner import laid_out, lifted


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """A call of the model, as it was made."""

    inputs: list[Any]
    """Its arguments, flat."""
    batch: int
    """Samples."""
    sizes: tuple[int, ...]
    """Of each microbatch."""
    kind: Any
    """Equal for calls that are alike in all but the numbers and the batch's size."""
    number: int
    """How many calls were before."""
    seed: int
    version: int


class Runtime(Protocol):
    """The pipeline that a batch_run goes through."""

    @property
    def is_end(self) -> bool:
        """Whether this worker has the last stage, or is the first of those that share it."""

    def forward(self, batch_run: BatchRun) -> None: ...

    def backward(self, batch_run: BatchRun, *, forwarded: bool) -> None: ...

    def to_end(self, own: dict[int, list[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """What the workers of the last stage have of each microbatch, where the end is."""

    def from_end(self, value: torch.Tensor | None) -> torch.Tensor:
        """The end's tensor, on every worker."""

    def check_loss(self, loss: Deferred, shares: MicrobatchLoss) -> None:
        """Refuse a loss that the parts of microbatches do not add up to."""

    def after_backward(self, batch_run: BatchRun) -> None: ...


class BatchRun:
    """A batch in the pipeline; the run that deferred values belong to."""

    def __init__(self, line: Runtime, call: ModelCall, training: bool) -> None:
        self._line, self.call = line, call
        self.training = training
        self.version, self.sizes = call.version, call.sizes
        self.over = False
        self._forwarded = False
        self._autocast = Autocast()
        self._shares = MicrobatchLoss(call.batch, call.sizes)
        self._results: dict[int, list[torch.Tensor]] = {}
        self._gathered = False
        """Whether the end has the results of all microbatches."""
        self._loss: Deferred | None = None
        self._losses: dict[int, list[torch.Tensor]] = {}

    # -- for the runner --------------------------------------------------------------------------------------------

    def kind(self, microbatch: int) -> Any:
        return (self.call.kind, self._autocast.key, self.training, self.sizes[microbatch])

    def given(self, number: int, microbatch: int) -> Any:
        value = self.call.inputs[number]
        cut = len(self.sizes) > 1 and isinstance(value, torch.Tensor) and value.dim()
        if cut and value.shape[0] == self.call.batch:
            return self._shares.rows(value, microbatch)
        return value

    def seed(self, microbatch: int) -> int:
        mixed = hash((self.call.seed, self.call.number, microbatch))
        return mixed & 0x7FFF_FFFF_FFFF_FFFF

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        return self._autocast.again()

    def arrived(self, results: list[torch.Tensor], microbatch: int) -> None:
        self._results[microbatch] = [result.detach() for result in results]

    def loss(self, results: list[torch.Tensor], microbatch: int) -> torch.Tensor:
        assert self._loss is not None
        with torch.enable_grad():
            part = self._shares.loss(self._loss, results, microbatch)
        self._losses[microbatch] = [part.detach()]
        return part

    # -- for the script ----------------------------------------------------------------------------------------------

    def outputs(self) -> list[torch.Tensor]:
        """The model's results for the whole batch, on every worker, without a backward pass."""
        self._line.forward(self)
        self._gather()
        count = len(self._results[0]) if self._line.is_end else 0
        told = self._line.from_end(torch.tensor([count]) if self._line.is_end else None)
        return [
            self._line.from_end(self._whole(number) if self._line.is_end else None) for number in range(int(told[0]))
        ]

    def _gather(self) -> None:
        if not self._gathered:
            self._results = self._line.to_end(self._results)
            self._gathered = True

    def _whole(self, number: int) -> torch.Tensor:
        parts = [results[number] for results in self._results.values()]
        if len(parts) == 1:
            return parts[0]
        if any(not part.dim() for part in parts):
            raise UsageError("the model returns a scalar for every microbatch; write microbatches=1")
        order = laid_out(parts[0])
        return lifted(torch.cat([part.permute(order) for part in parts], order.index(0)), order)

    def backward(self, loss: Deferred) -> None:
        if self.over:
            raise UsageError("backward was called a second time on what one call of a split model gave")
        if loss.outline.numel() != 1:
            raise UsageError(
                f"backward needs a loss of one element; this one has the shape {tuple(loss.outline.shape)}"
            )
        self._shares.check(loss)
        if len(self.sizes) > 1:
            self._line.check_loss(loss, self._shares)
        self._loss = loss
        try:
            self._line.backward(self, forwarded=self._forwarded)
        finally:
            self._loss = (
                None  # it keeps this batch_run, with all that has arrived: together they would wait for the collector
            )
        self.over = True
        losses = self._line.to_end(self._losses)
        total = sum(value for (value,) in losses.values()) if self._line.is_end else None
        loss.known = self._line.from_end(total.reshape(()) if isinstance(total, torch.Tensor) else None)
        self._line.after_backward(self)

    def value(self, of: Deferred) -> torch.Tensor:
        if not self.over and not self._forwarded:
            self._line.forward(self)
            self._forwarded = True
        self._gather()
        return self._line.from_end(self._computed(of, {}) if self._line.is_end else None)

    def _computed(self, of: Deferred, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """A value of the whole batch, made where the results are."""
        if of.known is not None:
            return of.known
        if id(of) not in made:
            if of.function is None:
                made[id(of)] = self._whole(of.number)
            else:
                with torch.no_grad():
                    made[id(of)] = replay(of, lambda leaf: self._computed(leaf, made), lambda tensor: tensor)
        return made[id(of)]
