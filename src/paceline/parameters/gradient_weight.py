"""How much a worker's gradient counts in that of the undivided batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.parameters.gradients import Gradients
from paceline.parameters.loss_weight import Batch, Kind, LossWeight, loss_weight

Exchange = Callable[[float, float], tuple[float, float]]
SUM = float("inf")
"""The weight of a step whose loss is a sum."""


class GradientWeight:
    """The weight of the gradient that a worker is making, from the losses of its backward passes."""

    def __init__(
        self, share: float, gradients: Gradients, say: Callable[[str], None], exchange: Exchange | None = None
    ) -> None:
        """share: of the samples, if all workers have as many.

        exchange: returns all workers' sums of two counts; without it, sums of gradients are weighted by samples.
        """
        self.whole_share = self.share = share
        """This worker's share of the samples of a step of all workers."""
        self._unit: float | None = None
        """The weight of a sum of gradients whose losses were divided by different totals."""
        self._gradients, self._say, self._exchange = gradients, say, exchange
        self._samples = 0
        """Samples of the minibatch; 0 if it does not come from a loader that divides batches."""
        self._constants: set[float] = set()
        self.loss = LossWeight()
        """The weight of the gradient; of unknown kind if that is the share of samples."""
        self._said = self._said_count = False

    def take_batch(self, samples: int, share: float) -> None:
        """The script has a minibatch with this share of the samples of all workers."""
        if share != self.share:
            by_share = self.loss.by_sample and self.loss.kind is not Kind.SUM and self._unit is None
            if by_share and self._gradients.any:
                # Summed over minibatches of unlike shares: scale the sum so far as the next minibatches will be.
                self._gradients.scale(self.share / share)
                self.loss = LossWeight()
            self.share = share
        self._samples = samples

    def take_whole_batches(self) -> None:
        """The script has batches that are not divided among the workers."""
        self.share, self._samples = self.whole_share, 0

    def resize(self, before: int, now: int) -> None:
        """The number of workers has changed."""
        if self.share == 1.0 / before:
            self.share = 1.0 / now
        self.whole_share = 1.0 / now

    def add(self, loss: Any, weight: float | None, exposed: int = 0) -> bool:
        """A backward pass from this loss begins; returns False if it is a mean over nothing: its gradient is zero.

        weight: the number of items that the loss is a mean over, if the script says it.
        exposed: the number of workers whose gradients are in `.grad` now, if that is the team's.
        """
        found = self._find(loss) if weight is None else given_weight(weight)
        if exposed and found.kind is Kind.SUM:
            self._gradients.scale(1.0 / exposed)  # it is on all of them
        if self._gradients.any and not exposed:
            self.loss = self._joined(found)
        else:
            self.loss, self._unit = found, None
        if found.is_empty:
            self._gradients.fill()
        return not found.is_empty

    def _find(self, loss: Any) -> LossWeight:
        counts: set[float] = set()
        found = loss_weight(loss, Batch(self._samples, self._constants, counts))
        if counts and not self._said_count:
            self._said_count = True
            self._say(
                f"the loss is a sum divided by {counts.pop():g}, which is taken for the number of this worker's items, "
                "so that the loss is a mean; if it is a constant, write `with team.step(weight='sum'):`"
            )
        if found.kind is Kind.UNKNOWN:
            self._say_once("it is neither a mean nor a sum over samples")
        if found.kind is Kind.SUM and not self._samples:
            self._say_once("it is a sum, and its samples do not come from a loader of the team")
            return LossWeight()
        return found

    def _joined(self, found: LossWeight) -> LossWeight:
        """The weight of a sum of gradients, when the one of this loss is added to those that are there."""
        before = self.loss
        if before.kind is found.kind is Kind.SUM:
            return found
        if self._exchange is None or (
            before.by_sample and found.by_sample and Kind.SUM not in (before.kind, found.kind)
        ):
            if self._samples and any(one.kind is Kind.MEAN and one.items % self._samples for one in (before, found)):
                self._say_once("it is added to another one, and both leave out some samples")
            return LossWeight()
        # Each minibatch is divided by its own total, so the sum so far is scaled as this gradient will be.
        totals = self._exchange(before.items, found.items)
        old, new = (self._normalized(one, total) for one, total in zip((before, found), totals, strict=True))
        self._unit = new or old
        self._gradients.scale(old / self._unit)
        return LossWeight(by_sample=False)

    def _normalized(self, loss: LossWeight, total: float) -> float:
        if loss.kind is Kind.SUM:
            return 1.0
        return loss.items / total if loss.kind is Kind.MEAN and total > 0 else self.weight

    @property
    def weight(self) -> float:
        """The weight of the gradient, if its loss does not tell another: its share of the samples."""
        return self.share if self._unit is None else self._unit

    def _say_once(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"the gradients of this loss are averaged by numbers of samples, since {why}; "
                "`with team.step(weight=…)` gives them another weight"
            )


def given_weight(weight: float) -> LossWeight:
    """The weight that a script has given to its step."""
    return LossWeight(Kind.SUM) if weight == SUM else LossWeight(Kind.MEAN, weight, by_sample=False)
