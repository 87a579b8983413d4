"""The base of loaders that take the place of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.division_watch import DivisionWatch, Iteration
from paceline.data.epochs import EpochLeft
from paceline.data.loader_attributes import LoaderAttributes
from paceline.data.place import LoaderPlace, generators_of, restore_sampler, sampler_state
from paceline.errors import UsageError


class UserLoader(LoaderAttributes):
    """Base of loaders that take the place of the user's own."""

    reads_whole = False
    """True if this is a stream that every worker reads as a whole."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._evaluated = False
        """True if the last epoch was only evaluated."""
        self._epochs_over = 0
        """Epochs of training that are over in the run that this one goes on from, and that the script will begin."""
        self.on_epoch: Callable[[bool], None] = lambda _over: None
        """Called when the script begins an epoch of training; with True if that one is over already."""
        self.watch: DivisionWatch | None = None
        """Notices divided batches that the script only evaluates."""

    def __len__(self) -> int:
        return len(self._loader) if self._evaluated else self._length()

    def _length(self) -> int:
        """Batches in an epoch of training."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        # A loader draws its seed here, not with the first batch: another one may be iterated at the same time.
        self._evaluated = self._evaluates()
        if self._evaluated:
            return self._evaluate(iter(self._whole()))
        self._before_epoch()
        over, self._epochs_over = self._epochs_over > 0, max(0, self._epochs_over - 1)
        self.on_epoch(over)
        batches = iter(()) if over else self._train()
        return batches if self.watch is None or self._steps() is None else self._watched(batches, self.watch)

    def _watched(self, batches: Iterator[Any], watch: DivisionWatch) -> Iterator[Any]:
        """The same batches; notices an evaluation that looks like training when it begins."""
        iteration, over = Iteration(self), False
        try:
            for batch in batches:
                watch.give(iteration)
                yield batch
            over = True
        finally:
            watch.end(iteration, over=over)

    def _before_epoch(self) -> None:
        """Called before the script begins an epoch of training."""

    @property
    def has_place(self) -> bool:
        """True if `place` can say how far this loader is, or never can."""
        return True

    def place(self, left: EpochLeft | None) -> LoaderPlace | None:
        """How far this loader is, for a snapshot; None if it cannot say that.

        left: of a leased loader, what is left of its current epoch.
        """
        return None

    def resume(self, place: LoaderPlace) -> None:
        """Go on from there; called before the first epoch."""
        if place.stream is not None and not self.reads_whole:
            raise UsageError(
                "the snapshot is of the middle of a stream that every worker reads as a whole, under a strategy "
                "without a server; go on with the same dataset, and such a strategy"
            )
        self._epochs_over = place.epoch
        self._continue(place)
        self.restore(place)

    def _continue(self, place: LoaderPlace) -> None:
        """Begin with the next epoch, or with what is left of it."""
        if place.left is not None:
            raise UsageError(
                "the snapshot is of the middle of an epoch of another kind of loader; go on with the script as it was"
            )

    def restore(self, place: LoaderPlace) -> None:
        """Restore the random generators and the sampler of the user's loader."""
        for generator, state in zip(generators_of(self._loader), place.generators, strict=False):
            generator.set_state(state)
        restore_sampler(self._loader, place.sampler)

    def draws(self) -> dict[str, Any]:
        """What the next orders are drawn from, for a place."""
        generators = [generator.get_state() for generator in generators_of(self._loader)]
        return {"generators": generators, "sampler": sampler_state(self._loader)}

    def _evaluate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch that is only evaluated; refuses to go on if the script trains on them."""
        made = self._steps() if torch.is_grad_enabled() else None
        for batch in batches:
            yield batch
            if made is not None and self._steps() != made:
                raise UsageError(
                    "the model is trained in evaluation mode, in which every worker gets the whole loader; call "
                    "model.train(), and eval() on layers that are to keep their statistics"
                )

    def _steps(self) -> int | None:
        """Steps of the optimizer so far; None where training does not divide batches either."""
        raise NotImplementedError

    def _whole(self) -> Iterable[Any]:
        """The batches of an epoch that is only evaluated."""
        return self._loader

    def _evaluates(self) -> bool:
        """True if the script evaluates the model now, instead of training it."""
        raise NotImplementedError

    def _train(self) -> Iterator[Any]:
        """This worker's batches of an epoch of training."""
        raise NotImplementedError
