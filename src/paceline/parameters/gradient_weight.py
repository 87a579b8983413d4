"""How much a worker's gradient counts in that of the undivided batch."""

from __future__ import annotations

from collections.abc import Callable

from paceline.parameters.gradients import Gradients
from paceline.parameters.loss_reader import LossReader
from paceline.parameters.loss_weight import Kind, LossWeight

Exchange = Callable[[float, float], tuple[float, float]]


class GradientWeight:
    """The weight of the gradient that a worker is making, from the losses of its backward passes."""

    def __init__(
        self, share: float, gradients: Gradients, reader: LossReader, exchange: Exchange | None = None
    ) -> None:
        """share: of the samples, if all workers have as many.

        exchange: returns all workers' sums of two counts; without it, sums of gradients are weighted by samples.
        """
        self.whole_share = self.share = share
        """This worker's share of the samples of a step of all workers."""
        self._unit: float | None = None
        """The weight of a sum of gradients whose losses were divided by different totals."""
        self._scale = 1.0
        """By which the gradient was multiplied since the last loss, as its share was another one than the next."""
        self.undecided = False
        """True if sums were weighted as means, of minibatches with unlike shares: it is too late to learn otherwise."""
        self._gradients, self._reader, self._exchange = gradients, reader, exchange
        self._void = False
        """True if the sum so far is of copies only, so that it was set to 0."""
        self._samples_before = 0
        """Samples of the minibatch of the gradient before."""
        self.loss = LossWeight()
        """The weight of the gradient; of unknown kind if that is the share of samples."""

    def take_batch(self, share: float) -> None:
        """The script has a minibatch with this share of the samples of all workers."""
        if share != self.share:
            by_share = self.loss.by_sample and self.loss.kind is not Kind.SUM and self._unit is None
            if by_share and share and self._gradients.any:
                # Summed over minibatches of unlike shares: scale the sum so far as the next minibatches will be.
                self._gradients.scale(self.share / share)
                self._scale *= self.share / share
                self.loss = LossWeight(guessed=self.loss.guessed)
                self._void = not self.share
            self.share = share

    def take_whole_batches(self) -> None:
        """The script has batches that are not divided among the workers."""
        self.share, self._reader.samples, self._reader.copied = self.whole_share, 0, False

    def resize(self, before: int, now: int) -> None:
        """The number of workers has changed."""
        if self.share == 1.0 / before:
            self.share = 1.0 / now
        self.whole_share = 1.0 / now

    def add(self, found: LossWeight, exposed: int = 0, *, stale: bool = False) -> None:
        """A backward pass from a loss of this weight begins.

        exposed: the number of workers whose gradients are in `.grad` now, if that is the team's.
        stale: True if the gradients that are there have been used, and will be cleared.
        """
        if exposed and found.kind is Kind.SUM:
            self._gradients.scale(1.0 / exposed)  # it is on all of them
        if self._gradients.any and not exposed and not stale and not (self._void and found.kind is Kind.SUM):
            self.loss = self._joined(found)
        else:
            self.loss, self._unit, self.undecided = found, None, False
        self._samples_before, self._scale, self._void = self._reader.samples, 1.0, False
        if found.is_empty:
            self._gradients.fill()

    def _joined(self, found: LossWeight) -> LossWeight:
        """The weight of a sum of gradients, when the one of this loss is added to those that are there."""
        before = self.loss
        if before.kind is found.kind is Kind.SUM:
            return found
        if before.guessed and not self.undecided and found.kind is Kind.SUM:
            self._gradients.scale(1.0 / self._scale)  # the number of before was a constant, too
            return found
        if before.guessed and before == found:
            return found  # another worker may know better
        if before.guessed and found.guessed and before.by_sample and found.by_sample:
            self.undecided = True
            return LossWeight(guessed=True)
        if self._exchange is None or (
            before.by_sample and found.by_sample and Kind.SUM not in (before.kind, found.kind)
        ):
            pairs = ((before, self._samples_before), (found, self._reader.samples))
            uneven = any(one.kind is Kind.MEAN and samples and not one.counts_alike(samples) for one, samples in pairs)
            if uneven or Kind.SUM in (before.kind, found.kind):
                self._reader.say_averaged("it is added to another one, and both leave out some samples")
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
