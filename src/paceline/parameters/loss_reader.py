"""Reads from a worker's losses how they combine with the other workers', and says once where they cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from paceline.parameters.loss_digest import LossDigest
from paceline.parameters.loss_weight import Batch, Kind, LossWeight, is_compiled, loss_weight
from paceline.parameters.sample_coupling import Coupling, find_coupling
from paceline.parameters.tensor_hooks import TensorHooks

SUM = float("inf")
"""The weight of a step whose loss is a sum."""
_LOOKS = (1, 2, 4, 8)
"""The uses of a kind of loss at which it is looked for samples that meet in it."""


class LossReader:
    """Reads the weights of losses from their graphs, until `close`."""

    def __init__(self, say: Callable[[str], None], *, divided: bool) -> None:
        """divided: True if other workers have other samples of a batch."""
        self._say_line, self.divided = say, divided
        self.samples = 0
        """Of the minibatch; 0 if it does not come from a loader that divides batches."""
        self.copied = False
        """True if the minibatch is a copy of another worker's, whose gradient has no weight."""
        self._said: set[str] = set()
        self.averaged = False
        """True if gradients were averaged by numbers of samples for which that is not exact."""
        self._constants: set[float] = set()
        """Numbers by which the script divides sums, though they count no samples."""
        self._counts: set[float] = set()
        """Numbers by which it divides sums, and which were taken for numbers of samples."""
        self._terms: set[int] = set()
        """Numbers of losses that sums have had for other numbers of samples."""
        self._uses: Counter[int] = Counter()
        """How often a kind of loss was used."""
        self._rows: dict[Coupling, int] = {}
        """Rows per sample of outputs in which samples seem to meet."""
        self._hooks = TensorHooks()
        self.digest = LossDigest()
        """Of the losses of a step."""

    def read(self, loss: Any, given: float | None = None) -> LossWeight:
        """The weight of a loss; given: the number of items that it is a mean over, if the script says it."""
        hooked, samples = self._hooks.any_new(), self.samples
        operations = self.digest.add(loss, samples) if self.divided and samples else 0
        if self.copied:
            found = loss_weight(loss, Batch(0, set()))
            return found if found.is_empty else LossWeight()
        if given is not None:
            return LossWeight(Kind.SUM) if given == SUM else LossWeight(Kind.MEAN, given, by_sample=False)
        counts, lists = set[float](), set[int]()
        found = loss_weight(loss, Batch(samples, self._constants, counts, lists, self._terms))
        self._counts |= counts
        lists -= self._terms
        if counts:
            self._say(
                "count",
                f"the loss is a sum divided by {counts.pop():g}, which is taken for the number of this worker's items, "
                "so that the loss is a mean; if it is a constant, write `with team.step(weight='sum'):`",
            )
        if lists:
            self._say(
                "list",
                f"the loss adds up {lists.pop()} losses, which is also the number of this worker's samples; if each is "
                "of one sample, write `with team.step(weight='sum'):`, or `weight=len(x)` if they are averaged",
            )
        if found.kind is Kind.MEAN and self.digest.by_samples:
            self._say(
                "product",
                f"the loss is a mean multiplied by {samples}, which is also the number of this worker's samples; if it "
                "is meant to be that, so that the loss is a sum, write `with team.step(weight='sum'):`",
            )
        if found.kind is Kind.UNKNOWN:
            self.say_averaged(
                "it comes out of a compiled function, which does not show how it is reduced (compute it outside)"
                if is_compiled(loss)
                else "it is neither a mean nor a sum over samples"
            )
        elif self.divided and samples > 1 and not hooked:
            self._look_for_coupling(loss, operations, found)
        if found.kind is Kind.SUM and not samples:
            self.say_averaged("it is a sum, and its samples do not come from a loader of the team")
            return LossWeight()
        return found

    def settle(self) -> None:
        """Another worker knows that the script's losses are sums, so the numbers that divide them are constants."""
        self._constants |= self._counts
        self._counts.clear()

    def _look_for_coupling(self, loss: torch.Tensor, operations: int, weight: LossWeight) -> None:
        """operations: the digest of the loss's operations, by which its kind is known."""
        self._uses[operations] += 1
        if self._uses[operations] not in _LOOKS:
            return
        # With fewer items than samples, it may be of a part of the batch that the script has cut off itself.
        part = 0 < weight.items < self.samples
        found, rows = find_coupling(loss, self.samples, self._uses[operations], rows_only=part)
        # Rows of samples of unlike lengths may be a multiple of the samples by chance, but not again the same one.
        if found is not Coupling.NONE and (rows == 1 or self._rows.get(found) == rows):
            self._say(
                "coupling",
                f"the loss {found.value}, of which each worker has a part, so it is not the loss of one process; use "
                "tensor, a pipeline with microbatches=1 or one worker, or write `with team.step(weight=…)` if each "
                "worker's part is meant",
            )
        self._rows[found] = rows

    def say_averaged(self, why: str) -> None:
        """Says once that the gradients of a loss are averaged by numbers of samples."""
        self.averaged = self.divided
        self._say(
            "averaged",
            f"the gradients of this loss are averaged by numbers of samples, since {why}; "
            "`with team.step(weight=…)` gives them another weight",
        )

    def _say(self, what: str, line: str) -> None:
        if self.divided and what not in self._said:
            self._said.add(what)
            self._say_line(line)

    def close(self) -> None:
        self._hooks.close()
